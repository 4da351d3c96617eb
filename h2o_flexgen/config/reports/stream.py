"""What scoring long streams reports: perplexity along the stream, a curve per eviction policy and kind of positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from h2o_flexgen.config.checks import known_keys, whole
from h2o_flexgen.config.reports.quality import MAX_NLL, Report
from h2o_flexgen.errors import UsageError

Positions = Literal["recomputed", "rolling", "absolute"]
POSITIONS: tuple[Positions, ...] = ("recomputed", "rolling", "absolute")
"""recomputed: each window with a full cache made anew from the tokens before it, as many as the context has room for.
rolling: within the cache. absolute: in the stream, past the context."""


def perplexity_of(nlls: Sequence[float]) -> float | None:
    """exp of the mean of `nlls` (nats per token, equally many tokens each); None for none."""
    return math.exp(min(sum(nlls) / len(nlls), MAX_NLL)) if nlls else None


@dataclass(frozen=True, kw_only=True)
class StreamRow:
    """One eviction policy with one kind of positions, over all streams.

    `nll` has the mean negative log-likelihood of each window of the stream in nats per token, first window first.
    `eviction` is that of the run's record.
    """

    policy: str
    positions: Positions
    eviction: dict[str, Any]
    nll: tuple[float, ...]
    kv_bytes: int
    """KV cache of the largest block."""
    seconds: float

    def __post_init__(self) -> None:
        whole(self.kv_bytes, "kv_bytes", 0)
        if self.positions not in POSITIONS:
            raise UsageError(f"positions is {self.positions!r}", f"needed one of {', '.join(POSITIONS)}")
        if not self.nll or any(not math.isfinite(value) or value < 0 for value in self.nll):
            raise UsageError(f"nll is {self.nll}", "needed finite numbers, at least 0")

    @property
    def perplexity(self) -> tuple[float, ...]:
        """Of each window, per token of the model's own tokenizer."""
        return tuple(math.exp(min(value, MAX_NLL)) for value in self.nll)

    def to_json(self) -> dict[str, Any]:
        """Every field and what follows from them."""
        return {**dataclasses.asdict(self), "perplexity": self.perplexity}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamRow:
        """The row of `to_json`; unknown keys raise UsageError with a suggestion."""
        values = known_keys(data, cls, derived=("perplexity",))
        return cls(**{**values, "nll": tuple(values["nll"])})


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
        """Position of the first token of each window."""
        return list(range(self.prompt, self.length, self.window))

    def between(self, row: StreamRow, first: int, last: int) -> float | None:
        """Perplexity of `row` over the windows that lie within positions `first` to `last`; None where none does."""
        inside = [nll for at, nll in zip(self.starts(), row.nll, strict=True) if first <= at <= last - self.window]
        return perplexity_of(inside)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamReport:
        """The report of `to_json`; unknown keys raise UsageError with a suggestion."""
        values = known_keys(data, cls)
        return cls(**{**values, "rows": tuple(StreamRow.from_json(row) for row in values["rows"])})
