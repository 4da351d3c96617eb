"""Records of a suite: one figure of one policy at one budget, with its 95 % confidence interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal, NamedTuple

from h2o_flexgen.config.checks import known_keys

Kind = Literal["mean", "share", "perplexity", "increase"]
"""How a figure follows from its values: their mean; the share of those that are 1; exp of the mean; the same minus 1 of
the differences from the full cache's."""
_Z = NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """A figure, and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def interval(kind: Kind, values: Sequence[float]) -> Interval:
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
class SuiteRecord:
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
    kind: Kind
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

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SuiteRecord:
        """The record of `to_json`; unknown keys raise UsageError with a suggestion."""
        values = known_keys(data, cls)
        answers = tuple(tuple(answer) for answer in values.get("answers", ()))
        return cls(**{**values, "values": tuple(values["values"]), "answers": answers})
