"""Heavy hitters over the text: the prompt's tokens by score, layer and KV head, and which of them a budget keeps.

The page chooses as the cache does (`cache/slots.py`): the most recent tokens and the sinks stay, and of the others
those with the highest scores, of equal ones the first. Prompts are attended to whole before anything goes, so that
their scores do not depend on the budget, and what any budget keeps of them follows from one run.
"""

from __future__ import annotations

import math
from typing import Any

from h2o_flexgen.errors import UsageError
from h2o_flexgen.pages.page import Chapter, Figure, Passage, Table
from h2o_flexgen.pages.reading import Json, Material, model_name, object_in

MOST_SEQUENCES = 12


def section(material: Material) -> Chapter:
    parts = [_prompts(each.source, each.data) for each in material.scores]
    texts = [
        "Each token of a prompt is coloured by its score: the attention that it received from the tokens after it. H2O "
        "keeps the most recent tokens and those with the highest scores, the heavy hitters. Evicted tokens are "
        "struck through. Layers and heads choose for themselves.",
    ]
    return Chapter("tokens", "Heavy hitters", texts, parts)


def _prompts(source: str, data: Json) -> Passage:
    sequences = data.get("sequences")
    if not isinstance(sequences, list):
        raise UsageError(f"{source}: sequences is {sequences!r:.60}", "needed a list of recorded prompts")
    checked = [_sequence(source, number, each) for number, each in enumerate(sequences)]
    name = model_name(data.get("model", "?"))
    if not checked:
        return Passage(
            name,
            ["No prompt was scored: the budget holds whole prompts, or the policy needs no scores."],
        )
    eviction, windows = object_in(data, "eviction", source), data.get("windows")
    layers = len(checked[0]["scores"])
    if not isinstance(windows, list) or len(windows) != layers:
        raise UsageError(f"{source}: windows is {windows!r:.60}", f"needed one for each of {layers} layers, or null")
    left = len(checked) - MOST_SEQUENCES
    texts = [f"{name}, policy {eviction.get('name', '?')}."]
    texts += [f"{left} more prompts are in the file and not on this page."] if left > 0 else []
    texts += [f"{data['left_out']} further prompts were not recorded."] if data.get("left_out") else []
    if "budget_by_layer" in eviction:
        texts.append("This run gave layers budgets of their own; the slider gives all the same.")
    shown = {"sequences": checked[:MOST_SEQUENCES], "windows": windows, **_bits(source, data)}
    if "bits" in shown:
        newest = f"; the newest {shown['newest']} tokens have twice as many" if shown["newest"] else ""
        texts.append(f"Kept keys have {shown['bits'][0]} bits, values {shown['bits'][-1]}{newest}.")
    rows = [_returned(number, each) for number, each in enumerate(shown["sequences"], 1) if "returns" in each]
    if rows:
        texts.append("Evicted tokens wait for recall: underlined ones came back before the run ended.")
    head = ["prompt", "tokens that came back, per cache", "of these kept at the end", "times, over all caches"]
    tables = [Table("Recall", head, rows)] if rows else []
    title = f"Prompts of {name}"
    return Passage("", texts, [Figure("tokens", title, f"{title}, coloured by score.", shown, wide=True)], tables)


def _bits(source: str, data: Json) -> Json:
    """Of packed caches the bits of keys and values, and the number of newest tokens that have more. UsageError for
    others."""
    if "bits" not in data:
        return {}
    bits, newest = data["bits"], data.get("newest")
    if not (isinstance(bits, list) and len(bits) == 2 and all(type(each) is int for each in [*bits, newest])):
        raise UsageError(f"{source}: bits is {bits!r:.60} and newest {newest!r:.60}", "needed two numbers and one")
    return {"bits": bits, "newest": newest}


def _returned(number: int, one: Json) -> list[str]:
    """The table row of one prompt: means over the caches, of a layer and KV head each, with recall; times in all."""
    caches = [
        ([position for position, _ in head], sum(times for _, times in head), set(kept))
        for layer, held in zip(one["returns"], one["kept"], strict=True)
        for head, kept in zip(layer, held if layer else [], strict=True)
    ]
    count = max(1, len(caches))
    came, there = sum(len(each) for each, *_ in caches), sum(len(kept.intersection(each)) for each, _, kept in caches)
    return [str(number), f"{came / count:.1f}", f"{there / count:.1f}", f"{sum(times for _, times, _ in caches):,}"]


def _sequence(source: str, number: int, data: Any) -> Json:
    """One prompt, its numbers in the shapes that the page relies on. UsageError where they are not."""
    try:
        tokens, prompt, budget = [str(each) for each in data["tokens"]], int(data["prompt"]), data["budget"]
        split = {name: int(budget[name]) for name in ("heavy", "recent", "sinks", "total")}
        scores = [[[_finite(score) for score in head] for head in layer] for layer in data["scores"]]
        kept = [[[int(position) for position in head] for head in layer] for layer in data["kept"]]
        back = {"returns": _returns(data["returns"], kept, len(tokens))} if "returns" in data else {}
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{source}: recorded prompt {number} is not whole: {error!r}", "needed what --record-scores writes"
        ) from None
    heads = {len(layer) for layer in scores}
    if not (
        0 < prompt <= len(tokens) and len(heads) == 1 and all(len(head) == prompt for layer in scores for head in layer)
    ):
        raise UsageError(f"{source}: recorded prompt {number} does not have a score per token, layer and head")
    return {"tokens": tokens, "prompt": prompt, "budget": split, "scores": scores, "kept": kept, **back}


def _finite(score: Any) -> float:
    if not math.isfinite(number := float(score)):
        raise ValueError(f"a score is {score}")
    return number


def _returns(data: Any, kept: list[list[list[int]]], count: int) -> list[list[list[list[int]]]]:
    """[position, times] by layer and KV head; a layer that chooses nothing has no heads. ValueError for others."""
    found = [[[[int(at), int(times)] for at, times in head] for head in layer] for layer in data]
    if [len(layer) for layer in found] != [len(held) if layer else 0 for layer, held in zip(found, kept, strict=True)]:
        raise ValueError("returns are of other layers and heads than kept")
    if not all(0 <= at < count for layer in found for head in layer for at, _ in head):
        raise ValueError(f"returns are not of {count} tokens")
    return found
