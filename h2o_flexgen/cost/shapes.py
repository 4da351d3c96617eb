"""Which block shapes a search looks at: a coarse grid, then finer around the best and at the edge of what fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.schedule.request import PlanRequest

MOST_ROWS = 4096
"""Rows per GPU batch: no machine's products get faster long before that."""
MOST_BATCHES = 64
_CLOSE = 1.1  # times the best bound: shapes that are worth looking around
_FEW = 6  # of these
_EDGE_STEPS = 4  # halvings of the way between rows that fit and twice as many, which do not


class BlockChoice(NamedTuple):
    """A block, and where the attention of caches on the host beside a GPU is computed."""

    gpu_batch_size: int
    num_gpu_batches: int
    cpu_cache_compute: bool

    @property
    def block_size(self) -> int:
        """Sequences that share one pass over the weights."""
        return self.gpu_batch_size * self.num_gpu_batches

    def policy(self, request: PlanRequest) -> OffloadPolicy:
        """A policy of this shape; its placements are as good as any."""
        return replace(request.policy, **self._asdict())


Bound = Callable[[BlockChoice], float]
"""Seconds per sequence that no placement of a shape can beat; infinite where none fits."""


class BlockChoices:
    """The shapes of one request. Settings that the user fixed stay."""

    def __init__(self, request: PlanRequest, bound: Bound) -> None:
        self._request, self._bound = request, bound
        self._count = None if request.endless else request.workload.num_sequences
        self.computing = [False]
        if "cpu_cache_compute" in request.fixed:
            self.computing = [request.policy.cpu_cache_compute]
        elif request.compute_tier == "gpu" and "cpu" in request.machine.compute:
            self.computing = [False, True]

    def coarse(self) -> Iterator[BlockChoice]:
        """Powers of two, up to what fits: more rows or GPU batches never need less."""
        for computing in self.computing:
            for rows in self._rows():
                fitting = 0
                for batches in self._batches(rows):
                    shape = BlockChoice(rows, batches, computing)
                    if not self._even(rows, batches):
                        continue
                    if math.isinf(self._bound(shape)):
                        break
                    fitting += 1
                    yield shape
                if not fitting:
                    break

    def fine(self, known: dict[BlockChoice, float]) -> Iterator[BlockChoice]:
        """New shapes around the best of the known ones, given with their bounds."""
        best = min(known.values())
        close = sorted((bound, shape) for shape, bound in known.items() if bound <= _CLOSE * best)[:_FEW]
        for _, shape in close:
            for new in sorted({*self._neighbours(shape), *self._edges(shape)}):
                if new not in known and not math.isinf(self._bound(new)):
                    yield new

    def smallest(self) -> list[BlockChoice]:
        """The shapes that need least: if none of them fits, nothing does."""
        rows, batches = self._fixed("gpu_batch_size") or 1, self._fixed("num_gpu_batches") or 1
        return [BlockChoice(*self._limited(rows, batches), computing) for computing in self.computing]

    def _neighbours(self, shape: BlockChoice) -> Iterator[BlockChoice]:
        rows, batches, computing = shape
        for factor in (3 / 4, 5 / 4, 3 / 2):
            yield from self._allowed(round(rows * factor), batches, computing)
            yield from self._allowed(rows, round(batches * factor), computing)
        if self._count is not None:  # blocks that leave no small rest
            blocks = max(1, round(self._count / shape.block_size))
            for number in (blocks, blocks + 1):
                yield from self._allowed(math.ceil(self._count / (number * batches)), batches, computing)

    def _edges(self, shape: BlockChoice) -> Iterator[BlockChoice]:
        """As many rows as fit, with the GPU batches of `shape`."""
        rows, batches, computing = shape
        if not list(self._allowed(2 * rows, batches, computing)) or self._fits(2 * rows, batches, computing):
            return
        low, high = rows, 2 * rows
        for _ in range(_EDGE_STEPS):
            middle = (low + high) // 2
            if middle == low:
                break
            low, high = (middle, high) if self._fits(middle, batches, computing) else (low, middle)
        yield from self._allowed(low, batches, computing)

    def _fits(self, rows: int, batches: int, computing: bool) -> bool:
        return not math.isinf(self._bound(BlockChoice(rows, batches, computing)))

    def _allowed(self, rows: int, batches: int, computing: bool) -> Iterator[BlockChoice]:
        """The shape, if it keeps what is fixed and is no larger than the work."""
        fixed = (self._fixed("gpu_batch_size") or rows, self._fixed("num_gpu_batches") or batches)
        limited = self._limited(rows, batches) if rows >= 1 and batches >= 1 else None
        even = limited == (rows, batches) == fixed and self._even(rows, batches)
        if even and rows <= MOST_ROWS and batches <= MOST_BATCHES:
            yield BlockChoice(rows, batches, computing)

    def _even(self, rows: int, batches: int) -> bool:
        """Whether all the work in one block would fill these GPU batches: 8 sequences are 4 + 4 rather than 6 + 2."""
        fixed = self._fixed("gpu_batch_size") is not None
        return (
            fixed or self._count is None or rows <= math.ceil(self._count / (self._fixed("num_gpu_batches") or batches))
        )

    def _rows(self) -> list[int]:
        fixed = self._fixed("gpu_batch_size")
        return [self._limited(fixed, 1)[0]] if fixed else _doublings(min(MOST_ROWS, self._count or MOST_ROWS))

    def _batches(self, rows: int) -> list[int]:
        fixed, most = self._fixed("num_gpu_batches"), self._most_batches(rows)
        return [min(fixed, most)] if fixed else _doublings(min(MOST_BATCHES, most))

    def _limited(self, rows: int, batches: int) -> tuple[int, int]:
        """No larger than the work there is, as the engine limits it."""
        rows = min(rows, self._count or rows)
        return rows, min(batches, self._most_batches(rows))

    def _most_batches(self, rows: int) -> int:
        return math.ceil(self._count / rows) if self._count else 1 << 30

    def _fixed(self, name: str) -> int | None:
        value: int | None = self._request.fixed.get(name)
        return value


def _doublings(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
