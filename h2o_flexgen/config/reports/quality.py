"""Reports on an eviction policy's quality: recall and perplexity, curves along streams, answers, figures of suites."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, fmean, stdev
from typing import Annotated, Any, Literal, NamedTuple

from h2o_flexgen.config.checks import Checked, KeptAsJson, Natural, Ratio, number, whole
from h2o_flexgen.config.reports.record import Report, RunRecord
from h2o_flexgen.errors import UsageError

MAX_NLL = 100.0
"""Nats per token beyond which a perplexity says nothing more, and would soon be no finite number."""


@dataclass(frozen=True)
class RecallTally:
    """Right answers to the questions of one kind ("" where a file knows no kinds).

    The question stands in the prompt, and the answer is generated greedily. Its first token then comes from the
    prompt's own attention, before anything is evicted: `long_*` counts the answers of two tokens or more.
    `later_*`: the question comes after the passage was read and evicted from, so that every token of the answer depends
    on what was kept; right is an answer each of whose tokens has more than half of the probability.
    """

    kind: str
    right: int
    cases: int
    long_right: int
    long_cases: int
    later_right: int = 0
    later_cases: int = 0

    def __post_init__(self) -> None:
        for part in ("", "long_", "later_"):
            right, cases = getattr(self, f"{part}right"), getattr(self, f"{part}cases")
            if whole(right, f"{part}right", 0) > whole(cases, f"{part}cases", 0):
                raise UsageError(f"more right answers than questions: {right} of {cases}")

    @property
    def shown(self) -> float | None:
        """The share that eviction has a say in: of long answers, of all where there are none."""
        return ratio_of(self.long_right, self.long_cases) if self.long_cases else ratio_of(self.right, self.cases)

    @property
    def later(self) -> float | None:
        """The share right where the question comes later; None without such questions."""
        return ratio_of(self.later_right, self.later_cases)


def perplexity_of(nll: float) -> float:
    """Of a mean negative log-likelihood in nats per token."""
    return math.exp(min(nll, MAX_NLL))


def ratio_of(right: int, cases: int) -> float | None:
    """`right` of `cases`, None for none."""
    return right / cases if cases else None


@dataclass(frozen=True, kw_only=True)
class QualityRow(Checked, KeptAsJson):
    """One policy at one ratio. Counts, nats per token, bytes and seconds; the accuracies are computed from the counts.

    `eviction` is that of the recall run's record: tokens per head, [smallest, largest] where prompts differ.
    """

    policy: str
    ratio: Ratio
    eviction: dict[str, Any]
    recall: tuple[RecallTally, ...]
    nll: Annotated[float, partial(number, low=0, needed="needed a finite number, at least 0")]
    """Mean negative log-likelihood of the scored tokens, in nats."""
    scored_tokens: Natural
    kv_bytes: Natural
    """KV cache of the largest block of the recall run."""
    seconds: float
    DERIVED = ("recall_accuracy", "perplexity")

    @property
    def recall_accuracy(self) -> float | None:
        """Share of all answers that are right, the question in the prompt; None without questions."""
        return ratio_of(sum(tally.right for tally in self.recall), sum(tally.cases for tally in self.recall))

    @property
    def perplexity(self) -> float:
        """Per token of the model's own tokenizer."""
        return perplexity_of(self.nll)


FigureKind = Literal["mean", "share", "perplexity", "increase"]
"""How a figure follows from its values: their mean; the share of those that are 1; exp of the mean; the same minus 1 of
the differences from the full cache's."""


class Point(NamedTuple):
    """A figure as it is drawn, in the panel of its title, with the ends of its interval."""

    title: str
    measure: str
    kind: FigureKind
    policy: str
    budget: float
    value: float
    low: float
    high: float


def panels(points: Iterable[Point]) -> list[list[Point]]:
    """The points of each title."""
    found = dict[str, list[Point]]()
    for point in points:
        found.setdefault(point.title, []).append(point)
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class QualityReport(Report):
    """Rows measured on one model, one set of recall questions and one text."""

    recall_file: str
    text_file: str
    context: int
    """Tokens that are prefilled and pruned before scoring."""
    continuation: int
    """Tokens scored after each context, one at a time, with eviction active."""
    windows: int
    rows: tuple[QualityRow, ...]

    def points(self) -> Iterator[Point]:
        """Right answers of each kind of question, asked in the prompt and after eviction, and the perplexity."""
        for row in self.rows:
            for tally in row.recall:
                in_prompt = f"in the prompt, {tally.long_cases or tally.cases} answers", tally.shown
                for when, right in (in_prompt, (f"after eviction, {tally.later_cases} answers", tally.later)):
                    if right is not None:
                        title = f"{tally.kind or 'recall'}: asked {when}"
                        yield Point(title, "right answers", "share", row.policy, row.ratio, *[right] * 3)
            title = "perplexity of held-out text"
            yield Point(title, "perplexity", "perplexity", row.policy, row.ratio, *[row.perplexity] * 3)


@dataclass(frozen=True)
class AnswerPair:
    """The answers to one prompt with the full cache and with an evicted one.

    `expected` is the right answer where the prompt asks for one; `full_right` and `evicted_right` say who gave it.
    """

    prompt: str
    full: str
    evicted: str
    expected: str | None = None
    full_right: bool = False
    evicted_right: bool = False

    @property
    def equal(self) -> bool:
        return self.full == self.evicted


@dataclass(frozen=True)
class SideBySide:
    """The same prompts run twice, with the full cache and with an eviction policy of a `budget` in tokens, a `ratio` or
    a share of `bytes`. The others are None."""

    full: RunRecord
    evicted: RunRecord
    ratio: float | None
    budget: int | None
    pairs: tuple[AnswerPair, ...]
    bytes: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Both records, and the pairs with the whole prompts left out."""
        pairs = [{**dataclasses.asdict(pair), "equal": pair.equal} for pair in self.pairs]
        for pair in pairs:
            del pair["prompt"]
        return {
            "ratio": self.ratio,
            "budget": self.budget,
            "bytes": self.bytes,
            "equal": sum(pair.equal for pair in self.pairs),
            "prompts": len(self.pairs),
            "pairs": pairs,
            "full": self.full.to_json(),
            "evicted": self.evicted.to_json(),
        }


Positions = Literal["recomputed", "rolling", "absolute"]
POSITIONS: tuple[Positions, ...] = ("recomputed", "rolling", "absolute")
"""recomputed: each window with a full cache made anew from the tokens before it, as many as the context has room for.
rolling: within the cache. absolute: in the stream, past the context."""


@dataclass(frozen=True, kw_only=True)
class StreamRow(Checked, KeptAsJson):
    """One eviction policy with one kind of positions, over all streams.

    `nll` has the mean negative log-likelihood of each window of the stream in nats per token, first window first.
    `eviction` is that of the run's record.
    """

    policy: str
    positions: Positions
    eviction: dict[str, Any]
    nll: tuple[float, ...]
    kv_bytes: Natural
    """KV cache of the largest block."""
    seconds: float
    DERIVED = ("perplexity",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.nll or any(not math.isfinite(value) or value < 0 for value in self.nll):
            raise UsageError(f"nll is {self.nll}", "needed finite numbers, at least 0")

    @property
    def perplexity(self) -> tuple[float, ...]:
        """Of each window, per token of the model's own tokenizer."""
        return tuple(map(perplexity_of, self.nll))


@dataclass(frozen=True, kw_only=True)
class StreamReport(Report):
    """Rows measured on one model and the same streams of one text."""

    text_file: str
    context: int
    """Tokens that the model was made for."""
    prompt: int
    """First tokens of a stream, which are not scored: its prompt."""
    length: int
    """Tokens of a stream."""
    window: int
    """Scored tokens to a window: window i holds the positions from `prompt` + i * `window` on."""
    streams: int
    rows: tuple[StreamRow, ...]

    def starts(self) -> list[int]:
        return list(range(self.prompt, self.length, self.window))

    def between(self, row: StreamRow, first: int, last: int) -> float | None:
        """Perplexity of `row` over the windows that lie within positions `first` to `last`; None where none does."""
        inside = [nll for at, nll in zip(self.starts(), row.nll, strict=True) if first <= at <= last - self.window]
        return perplexity_of(sum(inside) / len(inside)) if inside else None


_Z = NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """A figure, and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def interval(kind: FigureKind, values: Sequence[float]) -> Interval:
    """The figure of one value per case (window, question, prompt): Wilson's interval for shares, else Student's t.

    Of a single value nothing is known: the ends are the figure itself. ValueError for none.
    """
    if not values:
        raise ValueError("there are no values")
    if kind == "share":
        return _wilson(fmean(values), len(values))
    mean = fmean(values)
    half = _quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    ends = Interval(mean, mean - half, mean + half)
    if kind == "mean":
        return ends
    return Interval(*(math.exp(end) - (kind == "increase") for end in ends))


def _wilson(share: float, count: int) -> Interval:
    square = _Z * _Z / count
    middle = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def _quantile(freedom: int) -> float:
    """Of Student's t, 97.5 %: the expansion in 1 / freedom (Abramowitz and Stegun 26.7.5), 0.4 % off for 3."""
    if freedom < 3:
        return (12.706, 4.303)[freedom - 1]
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


@dataclass(frozen=True, kw_only=True)
class SuiteRecord(KeptAsJson):
    """A figure of a suite. `low` and `high` end its 95 % confidence interval over `n` cases, of which `values` are.

    cell: names what was measured, settings included: a rerun measures a cell only if it has no record.
    """

    suite: str
    model: str
    policy: str
    """With its budget split and other settings where it has any: "h2o, global"."""
    budget: float
    """A share of prompt and generated tokens."""
    task: str
    metric: str
    kind: FigureKind
    value: float
    low: float
    high: float
    n: int
    values: tuple[float, ...]
    cell: str
    seconds: float
    """Of the cell, all its metrics together."""
    answers: tuple[tuple[int, ...], ...] = ()
    """Tokens of the full cache's answers, with which others are compared."""
    date: str = ""
    dtype: str = ""
