"""The row-by-row schedule, for comparison: what layer-wise offloading in Accelerate and DeepSpeed does."""

from __future__ import annotations

from collections.abc import Iterator

from h2o_flexgen.schedule.tasks import ActiveBatches, LastStep, ScheduleShape, Tick
from h2o_flexgen.schedule.zigzag import walk


def row_by_row(
    shape: ScheduleShape, active: ActiveBatches | None = None, last: LastStep | None = None
) -> Iterator[Tick]:
    """Yield the ticks of a block whose GPU batches go through all units one after the other.

    Streamed weights are read once per GPU batch and step instead of once per step; hidden states never move. Laziness,
    read-ahead, `active` and `last` are those of `zigzag`.
    """
    return walk(shape, active, last, lambda batches: [(batch,) for batch in batches])
