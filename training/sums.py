"""Train the model of the reasoning suite: a small OPT that works long sums out, step by step.

A problem gives digits by the names a, b, c, ...; asked for is the last digit of all sums added up that start at one of
them: (a + b + c) + (b + c) + c. A line for each sum adds digit after digit, by name, and says its result; the last line
adds these results. Only last digits are written:

    a: 7 b: 4 c: 9 ; 0 A a 7 A b 1 A c 0 A= 0 0 B b 4 B c 3 B= 3 0 C c 9 C= 9 0 A= 0 0 B= 3 3 C= 9 2 .

Every word is a token. Digits are given once and looked up in each line; the result of a line is said once and needed
at the very end. Only the working is trained on.

Writes the model and held-out problems to --out, its figures to --docs.

    python -m training.sums
"""

from __future__ import annotations

import json
import string
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from training.demo import ROOT, Batch, Recipe, Trainer, flags, new_model, prepare, train
from training.evaluate import record
from training.rows import BOS, with_special_tokens

CONTEXT = 384
HELD_SEED, CASES = 77, 200
END = "."
NAMES = string.ascii_lowercase[:12]
WORDS = ["<s>", "<pad>", "</s>", "<unk>", ";", END, *string.digits]
WORDS += [word for name in NAMES for word in (name, f"{name}:", name.upper(), f"{name.upper()}=")]
IDS = {word: index for index, word in enumerate(WORDS)}


class Problem(NamedTuple):
    """The given digits, the working, and the last line of that, the answer."""

    given: str
    working: str
    answer: str

    @property
    def ids(self) -> list[int]:
        """GIVEN tokens, then the working: LENGTH in all."""
        return [BOS, *(IDS[word] for word in f"{self.given} {self.working} {self.answer}".split())]


def problem(rng: Random) -> Problem:
    digits = [rng.randrange(10) for _ in NAMES]
    lines, last, total = list[str](), ["0"], 0
    for start, line in enumerate(NAMES.upper()):
        own, steps = 0, ["0"]
        for name, digit in zip(NAMES[start:], digits[start:], strict=True):
            own = (own + digit) % 10
            steps.append(f"{line} {name} {own}")
        lines.append(" ".join([*steps, f"{line}= {own}"]))
        total = (total + own) % 10
        last.append(f"{line}= {own} {total}")
    given = " ".join(f"{name}: {digit}" for name, digit in zip(NAMES, digits, strict=True))
    return Problem(f"{given} ;", " ".join(lines), " ".join([*last, END]))


GIVEN, LENGTH = 2 + 2 * len(NAMES), len(problem(Random(0)).ids)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every word; texts start with BOS."""
    core = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return with_special_tokens(core, END, CONTEXT)


@dataclass(frozen=True)
class SumsRecipe(Recipe):
    """One stage; a problem a row."""

    steps: int = 640
    short_steps: int = 0
    long_rows: int = 16
    long_length: int = LENGTH - 1
    hidden: int = 192
    layers: int = 3
    heads: int = 6


def draw(rng: Random, rows: int) -> Batch:
    """Problems from a random position on; the given digits have no weight in the loss."""
    ids = torch.tensor([problem(rng).ids for _ in range(rows)])
    starts = torch.tensor([rng.randrange(CONTEXT - LENGTH + 2) for _ in ids])
    weights = torch.ones(ids.shape)
    weights[:, :GIVEN] = 0.0
    return ids, starts[:, None] + torch.arange(LENGTH - 1), weights


@torch.no_grad()
def accuracy(model: PreTrainedModel, cases: int) -> dict[str, float]:
    """Shares of held-out problems whose every step is the likeliest, and of the steps that are."""
    rng = Random(HELD_SEED)
    ids = torch.tensor([problem(rng).ids for _ in range(cases)])
    right = model(input_ids=ids).logits[:, GIVEN - 1 : -1].argmax(-1) == ids[:, GIVEN:]
    return {"right": right.all(1).float().mean().item(), "right_steps": right.float().mean().item()}


def write_problems(out: Path, cases: int = 64) -> None:
    """Writes held-out problems, which suites ask."""
    rng, rows = Random(HELD_SEED), list[dict]()
    for given, working, answer in (problem(rng) for _ in range(cases)):
        rows.append({"prompt": f"{given} {working}", "answer": answer, "question_at": len(given)})
    (out / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = flags(__doc__, SumsRecipe, "sums", ROOT / "h2o_flexgen/data/demo-sums", 1)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    args = parser.parse_args(argv)
    prepare(args)
    recipe, tokenizer = SumsRecipe(seed=args.seed, steps=args.steps), build_tokenizer()
    model = new_model(recipe, len(tokenizer), CONTEXT)
    model.config.eos_token_id = model.generation_config.eos_token_id = IDS[END]
    trainer = Trainer(recipe, model, args.work, lambda rng, _: draw(rng, recipe.long_rows), lambda m: accuracy(m, 24))
    train(trainer, tokenizer, args, args.every)
    write_problems(args.out)
    record(args, recipe, lambda model: {"cases": CASES} | accuracy(model, CASES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
