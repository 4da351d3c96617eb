"""Where a checkpoint keeps a canonical tensor: a whole tensor of its own, or rows of a larger one. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """Tensor `name` of a checkpoint, or the rows of it that make up a canonical tensor.

    spans   [start, stop) of rows (the first dimension, of biases too), one after another; None: all of it
    rows    how many rows the stored tensor has in all; read only with spans

    Fused projections are rows of one tensor: in Phi-3 one span for each of q, k and v, in GPT-NeoX one per head.
    """

    name: str
    spans: tuple[tuple[int, int], ...] | None = None
    rows: int = 0


Names = dict[str, tuple[str | Stored, ...]]
"""For every canonical tensor where a checkpoint may keep it, the usual place first; a str is a whole tensor."""


def fused(names: Iterable[str], spans: Iterable[tuple[int, int]], rows: int) -> tuple[Stored, ...]:
    """The same rows of a fused tensor under each of the names it may have."""
    kept = tuple(spans)
    return tuple(Stored(name, kept, rows) for name in names)
