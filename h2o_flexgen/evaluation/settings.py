"""The settings of measurements: policies, ratios, streams, questions and text. No torch, so that `--help` answers at
once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeVar

from h2o_flexgen.config.checks import Checked, Count, one_of, share
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import between_commas, option
from h2o_flexgen.config.reports.quality import POSITIONS, Positions
from h2o_flexgen.errors import UsageError

T = TypeVar("T")
RECALL_FILE, TEXT_FILE, SUMS_FILE = "recall_prompts.jsonl", "heldout.txt", "problems.jsonl"
_SHIPPED_WITH = {RECALL_FILE: "demo", TEXT_FILE: "demo", SUMS_FILE: "demo-sums"}


def _ratios(text: str) -> tuple[float, ...]:
    ratios = []
    for word in between_commas(text):
        try:
            ratios.append(float(word))
        except ValueError:
            raise UsageError(f"{word!r} is not a number", "needed shares such as 0.1,0.2,0.5") from None
    return tuple(ratios)


@dataclass(frozen=True)
class EvaluationSettings(Checked):
    """The measurements of `evaluate`. Raises UsageError for values that make no sense."""

    policies: tuple[str, ...] = option(
        ("full", "h2o", "local", "streaming", "heavy", "random"), help="eviction policies to measure", metavar="A,B"
    )
    ratios: tuple[float, ...] = option(
        (0.1, 0.2, 0.5), help="KV budgets as shares of prompt and generated tokens", metavar="R,R", parse=_ratios
    )
    recall: str | None = option(
        None, help='questions: .jsonl with {"prompt", "answer"}', metavar="FILE", unset="the demo's"
    )
    text: str | None = option(None, help="held-out text for the perplexity", metavar="FILE", unset="the demo's")
    context: Count | None = option(
        None, help="tokens prefilled and pruned before the scored ones", unset="768, or 3/4 of the model's context"
    )
    continuation: Count | None = option(None, help="tokens scored after each context", unset="a third of --context")
    limit: Count | None = option(
        None, help="most questions, and most windows of text", unset="all questions, 32 windows"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policies or not self.ratios:
            raise UsageError("--policies or --ratios is empty", "needed at least one of each")
        for name in self.policies:
            EvictionConfig(name)
        for ratio in self.ratios:
            share(ratio, "--ratios")

    @property
    def cells(self) -> tuple[EvictionConfig, ...]:
        """Every policy at every ratio, in the order given; the full cache once."""
        return tuple(
            EvictionConfig(name=name, ratio=ratio)
            for name in dict.fromkeys(self.policies)
            for ratio in ((1.0,) if name == "full" else dict.fromkeys(self.ratios))
        )


@dataclass(frozen=True)
class StreamSettings(Checked):
    """The measurements of `evaluate --stream`, besides its policies and its text. UsageError for what makes no
    sense."""

    stream: Count | None = option(
        None,
        help="score streams of this many tokens, far beyond the model's context, instead of recall",
        unset="no streams",
    )
    budget: Count | None = option(
        None, "--kv-budget", help="KV budget of a stream, in tokens", unset="half the model's context"
    )
    positions: tuple[Positions, ...] = option(
        POSITIONS,
        help="kinds of positions: recomputed for each window, rolling within the cache, absolute past the context",
        metavar="A,B",
    )
    window: Count = option(64, "--stream-window", help="scored tokens to a point of the curve")
    streams: Count = option(4, help="parts of the text, a stream each")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.positions:
            raise UsageError("--positions is empty", f"needed some of {', '.join(POSITIONS)}")
        for kind in self.positions:
            one_of(kind, "one of --positions", POSITIONS)

    def cells(self, policies: Sequence[str], context: int) -> Iterator[tuple[Positions, EvictionConfig]]:
        """Every policy with every kind of positions, for a model of `context` tokens.

        The full cache is recomputed or has absolute positions: it grows beyond any context. UsageError where a window
        leaves no room to recompute what precedes it.
        """
        if "recomputed" in self.positions and self.window >= context:
            raise UsageError(
                f"--stream-window {self.window} with recomputed positions",
                f"needed less than the model's context of {context} tokens",
                "lower it, or name other --positions",
            )
        budget = max(1, context // 2) if self.budget is None else self.budget
        for kind in dict.fromkeys(self.positions):
            for name in dict.fromkeys(policies):
                if name == "full" and kind != "rolling":
                    yield kind, EvictionConfig()
                elif name != "full" and kind != "recomputed":
                    yield kind, EvictionConfig(name=name, budget=budget, rolling_positions=kind == "rolling")

    def rounded(self, prompt: int) -> int:
        """Length of a stream, cut to whole windows after its `prompt`. UsageError where there is not one."""
        length = 0 if self.stream is None else self.stream
        windows = (length - prompt) // self.window
        if windows < 1:
            raise UsageError(
                f"--stream {length} is not longer than {prompt} tokens of prompt and a window of {self.window}",
                change="raise it, or lower --context or --stream-window",
            )
        return prompt + windows * self.window


class Question(NamedTuple):
    """A prompt that ends where the answer must come, and that answer.

    kind: any name that questions are counted under. question_at: the passage without its question is
    `prompt[:question_at]`; None where that is not known.
    """

    prompt: str
    answer: str
    kind: str = ""
    question_at: int | None = None


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """`count` of `items` (None: all), evenly from beginning to end, in their order."""
    wanted = len(items) if count is None else min(count, len(items))
    return [items[(2 * place + 1) * len(items) // (2 * wanted)] for place in range(wanted)]


def read_cases(file: str | None, shipped: str = RECALL_FILE) -> list[Question]:
    """The questions in a .jsonl file, those `shipped` for None; UsageError naming the line where one cannot be used."""
    # Not splitlines(): a form feed or U+2028 belongs to the prompt in which it stands.
    name, lines = file or shipped, _read(file, shipped, "--recall").split("\n")
    cases = [_case(line, f"{name} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not cases:
        raise UsageError(f"{name} holds no questions", 'needed {"prompt": "...", "answer": "..."} per line')
    return cases


def read_text(file: str | None) -> str:
    """The text to score, the demo's held-out text for None."""
    return _read(file, TEXT_FILE, "--text")


def _read(file: str | None, shipped: str, flag: str) -> str:
    try:
        if file is None:
            folder = resources.files("h2o_flexgen") / "data" / _SHIPPED_WITH[shipped]
            return (folder / shipped).read_text(encoding="utf-8")
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: byte {error.start}", "needed a text file") from None
    except OSError as error:
        raise UsageError(f"{flag} {file or shipped}: {error.strerror}", "needed a readable file") from None


def _case(line: str, where: str) -> Question:
    needed = 'needed {"prompt": "...", "answer": "..."}'
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", needed) from None
    prompt, answer = (entry.get("prompt"), entry.get("answer")) if isinstance(entry, dict) else (None, None)
    if not (isinstance(prompt, str) and isinstance(answer, str) and prompt.strip() and answer.strip()):
        raise UsageError(f"{where} lacks a prompt or an answer", needed)
    kind, question_at = entry.get("kind", ""), entry.get("question_at")
    inside = question_at is None or (type(question_at) is int and 0 < question_at < len(prompt))
    if not (isinstance(kind, str) and inside):
        raise UsageError(
            f"{where} has kind {kind!r} and question_at {question_at!r}", "needed text, and a place in the prompt"
        )
    return Question(prompt, answer, kind, question_at)
