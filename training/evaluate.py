"""Measure the demo model with plain transformers, and write what ships beside it: figures, held-out samples."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from h2o_flexgen.config.reports.record import host_facts
from training.generated import story
from training.rows import BOS, CONTEXT, Corpus

if TYPE_CHECKING:
    from training.demo import Recipe

DISTANCES = (100, 300, 600, 900)
HELD_SEED = 77


@torch.no_grad()
def recall_accuracy(model: PreTrainedModel, corpus: Corpus, rng: Random, distance: int, cases: int) -> float:
    """Share of answers that greedy decoding gives exactly; checked teacher-forced, which is the same thing."""
    right = 0
    for _ in range(cases):
        case = corpus.recall_case(rng, distance)
        head = [BOS, *corpus.encode(case.prompt)]
        full = [BOS, *corpus.encode(f"{case.prompt} {case.answer}")]
        logits = model(input_ids=torch.tensor([full])).logits[0]
        right += logits[len(head) - 1 : -1].argmax(-1).tolist() == full[len(head) :]
    return right / cases


@torch.no_grad()
def perplexity(model: PreTrainedModel, corpus: Corpus, text: str) -> dict[str, float]:
    """Perplexity per token over rows of the full context, and bits per byte, which other tokenizers can be held to."""
    ids = corpus.encode(text)
    total, count = 0.0, 0
    for at in range(0, len(ids), CONTEXT - 1):
        row = torch.tensor([[BOS, *ids[at : at + CONTEXT - 1]]])
        logits = model(input_ids=row).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        count += row.shape[1] - 1
    return {
        "tokens": count,
        "perplexity": round(math.exp(total / count), 2),
        "bits_per_byte": round(total / math.log(2) / len(text.encode()), 3),
    }


def heldout_texts(corpus: Corpus, size: int) -> dict[str, str]:
    """About `size` characters per source, none of them trained on; stories come from a seed of their own."""
    rng, stories = Random(HELD_SEED), list[str]()
    while sum(len(text) for text in stories) < size:
        stories.append(" ".join(story(rng)))
    texts = {"stories": "\n".join(stories)}
    for name, lines in zip(corpus.names, corpus.held_text, strict=True):
        cut = next((n for n in range(len(lines)) if sum(len(line) for line in lines[:n]) >= size), len(lines))
        texts[name] = "\n".join(lines[:cut])
    return texts


def write_samples(corpus: Corpus, out: Path) -> None:
    """heldout.txt (every source in turn) and recall_prompts.jsonl: 40 questions about facts told once and not used
    since, 40 about facts that were asked for before (what a policy that follows attention can know to matter)."""
    (out / "heldout.txt").write_text("\n\n".join(heldout_texts(corpus, 20_000).values()) + "\n", encoding="utf-8")
    rng = Random(HELD_SEED + 1)
    text = questions(corpus, rng, "once", 40) + questions(corpus, rng, "used", 40)
    (out / "recall_prompts.jsonl").write_text(text, encoding="utf-8")


def questions(corpus: Corpus, rng: Random, kind: str, count: int) -> str:
    """Lines of a file of questions, of prompts of 400 to 900 of the demo's tokens."""
    make, sizes = (corpus.used_case, (400, 900)) if kind == "used" else (corpus.recall_case, (250, 800))
    lines: list[str] = []
    while len(lines) < count:
        case = make(rng, rng.randint(*sizes))
        tokens = len(corpus.encode(case.prompt)) + 1
        if 400 <= tokens <= 900:
            lines.append(json.dumps({"kind": kind, "tokens": tokens} | case._asdict()) + "\n")
    return "".join(lines)


def past_training(args: argparse.Namespace, recipe: Recipe) -> dict:
    """The known facts of the training: from this run's checkpoint, else from the training.json written last time."""
    checkpoint, written = args.work / "checkpoint.pt", args.docs / "training.json"
    if checkpoint.exists():
        state, host = torch.load(checkpoint, weights_only=True), host_facts()
        return {
            "recipe": asdict(recipe) | {"steps": state["step"]},
            "seconds": round(state["seconds"]),
            "tokens": recipe.tokens(state["step"]),
            "history": state["history"],
            "hardware": f"{host['cpu']}, {host['cores']} logical cores",
            "threads": args.threads,
            "torch": torch.__version__,
        }
    keys = ("recipe", "seconds", "tokens", "history", "hardware", "threads", "torch")
    return {key: value for key, value in json.loads(written.read_text()).items() if key in keys}


def figures_table(figures: dict) -> str:
    lines = ["| held-out text | tokens | perplexity | bits per byte |", "|---|---|---|---|"]
    for name, row in figures["heldout"].items():
        lines.append(f"| {name} | {row['tokens']:,} | {row['perplexity']} | {row['bits_per_byte']} |")
    lines += ["", "| fact about this many tokens back | exact recall |", "|---|---|"]
    for far, share in figures["recall"].items():
        lines.append(f"| {far} | {100 * share:.1f} % of {figures['recall_cases']} |")
    lines += [
        "",
        f"Parameters {figures['parameters']:,}; trained on {figures['tokens'] / 1e6:.1f} M tokens in "
        f"{figures['seconds'] / 60:.0f} minutes with {figures['threads']} threads ({figures['hardware']}); "
        f"seed {figures['recipe']['seed']}, {figures['recipe']['steps']} steps, torch {figures['torch']}.",
    ]
    return "\n".join(lines)


def evaluate(args: argparse.Namespace, recipe: Recipe, corpus: Corpus, cases: int = 200) -> None:
    """Measure the model in `args.out`; write the samples, training.json and the card's figures."""

    def measured(model: PreTrainedModel) -> dict:
        held = {name: perplexity(model, corpus, text) for name, text in heldout_texts(corpus, 120_000).items()}
        recall = {far: recall_accuracy(model, corpus, Random(HELD_SEED + far), far, cases) for far in DISTANCES}
        return {"heldout": held, "recall_cases": cases, "recall": {str(far): share for far, share in recall.items()}}

    write_samples(corpus, args.out)
    figures = record(args, recipe, measured)
    card = args.out / "README.md"
    if card.exists():
        text = re.sub(
            r"(?s)(<!-- figures -->\n).*?(<!-- end -->)",
            lambda m: f"{m[1]}{figures_table(figures)}\n{m[2]}",
            card.read_text(encoding="utf-8"),
        )
        card.write_text(text, encoding="utf-8")


def record(args: argparse.Namespace, recipe: Recipe, measured: Callable[[PreTrainedModel], dict]) -> dict:
    """Writes training.json of the model in `args.out`: its size, how it was trained, and what is `measured` of it in
    float32. The history of the training has a line per entry, and the rest is printed and given."""
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    parameters = sum(param.numel() for param in model.parameters())
    figures = {"parameters": parameters} | past_training(args, recipe) | measured(model)
    rows = ",\n  ".join(json.dumps(row) for row in figures.pop("history"))
    args.docs.mkdir(parents=True, exist_ok=True)
    body = json.dumps(figures, indent=1)[:-2]
    (args.docs / "training.json").write_text(f'{body},\n "history": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
    print(json.dumps(figures))
    return figures
