"""Heavy hitters over the text: the prompt's tokens by score, layer and KV head, and which of them a budget keeps.

The page chooses as the cache does (`cache/slots.py`): the most recent tokens and the sinks stay, and of the others
those with the highest scores, of equal ones the first. Prompts are attended to whole before anything goes, so that
their scores do not depend on the budget, and what any budget keeps of them follows from one run.
"""

from __future__ import annotations

from typing import Any

from h2o_flexgen.errors import UsageError
from h2o_flexgen.pages.page import Chapter, Figure, Passage
from h2o_flexgen.pages.reading import Json, Material, model_name, object_in

MOST_SEQUENCES = 12


def section(material: Material) -> Chapter | None:
    """The prompts of all recorded scores; None without any."""
    parts = [_prompts(each.source, each.data) for each in material.scores]
    if not parts:
        return None
    texts = [
        "Each token of a prompt is coloured by its score: the attention that it received from the tokens after it. H2O "
        "keeps the most recent tokens and those with the highest scores, the heavy hitters. What a budget lets go is "
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
    shown = {"sequences": checked[:MOST_SEQUENCES], "windows": windows}
    title = f"Prompts of {name}"
    return Passage("", texts, [Figure("tokens", title, f"{title}, coloured by score.", shown, wide=True)])


def _sequence(source: str, number: int, data: Any) -> Json:
    """One prompt, its numbers in the shapes that the page relies on. UsageError where they are not."""
    try:
        tokens, prompt, budget = [str(each) for each in data["tokens"]], int(data["prompt"]), data["budget"]
        split = {name: int(budget[name]) for name in ("heavy", "recent", "sinks", "total")}
        scores = [[[float(score) for score in head] for head in layer] for layer in data["scores"]]
        kept = [[[int(position) for position in head] for head in layer] for layer in data["kept"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{source}: recorded prompt {number} is not whole: {error!r}", "needed what --record-scores writes"
        ) from None
    heads = {len(layer) for layer in scores}
    if not (
        0 < prompt <= len(tokens) and len(heads) == 1 and all(len(head) == prompt for layer in scores for head in layer)
    ):
        raise UsageError(f"{source}: recorded prompt {number} does not have a score per token, layer and head")
    return {"tokens": tokens, "prompt": prompt, "budget": split, "scores": scores, "kept": kept}
