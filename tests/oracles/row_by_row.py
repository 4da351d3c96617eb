"""The row-by-row schedule, for comparison: what layer-wise offloading in Accelerate and DeepSpeed does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from h2o_flexgen.schedule.tasks import ScheduleShape, Task, TaskKind, Tick
from h2o_flexgen.schedule.zigzag import WeightStream, state_loads, state_stores, still_active


def row_by_row(
    shape: ScheduleShape,
    active: Callable[[int], Sequence[int]] | None = None,
    last: Callable[[int], bool] | None = None,
) -> Iterator[Tick]:
    """Yield the ticks of a block whose GPU batches go through all units one after the other.

    Streamed weights are read once per GPU batch and step instead of once per step; hidden states never move. Laziness,
    read-ahead, `active` and `last` are those of `zigzag`.
    """
    weights = WeightStream(shape, shape.units)
    batches: Sequence[int] = range(shape.num_batches)
    stores: tuple[Task, ...] = ()
    index = 0
    for step in range(shape.num_steps):
        batches = batches if active is None else still_active(active(step), batches, step)
        if not batches:
            break
        ends = step == shape.num_steps - 1 or (last is not None and last(step))
        for batch in batches:
            last_of_step = batch == batches[-1]
            weights.start_pass(step + last_of_step, goes_on=not (ends and last_of_step))
            for unit, following in zip(shape.units, [*shape.units[1:], None], strict=True):
                loads = weights.loads(unit, state_loads(shape, step, (following, batch), 1) if following else ())
                compute = Task(TaskKind.COMPUTE, step, unit.index, batch)
                yield Tick(index=index, stores=stores, loads=loads, compute=compute, frees=weights.frees(step, unit))
                stores = state_stores(shape, compute, ends, 1)
                index += 1
        if ends:
            break
    frees = weights.drain()
    if stores or frees:
        yield Tick(index=index, stores=stores, loads=(), compute=None, frees=frees)
