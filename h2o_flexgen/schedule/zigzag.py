"""The zig-zag block schedule (FlexGen, section 4.1): every index of a run on one device is computed here.

The order is step i, unit j, GPU batch k: weights are read once per step for the whole block, and each compute is
overlapped with the loads of what comes next and the stores of what came before. A *pass* is one walk over all units by
some of the GPU batches: zig-zag makes one pass per step, a row-by-row schedule one per GPU batch and step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from h2o_flexgen.schedule.moves import WeightStream, state_loads, state_stores, still_active
from h2o_flexgen.schedule.tasks import ActiveBatches, LastStep, ScheduleShape, Task, TaskKind, Tick, WholeStep


def zigzag(
    shape: ScheduleShape,
    active: ActiveBatches | None = None,
    last: LastStep | None = None,
    whole: WholeStep | None = None,
) -> Iterator[Tick]:
    """Yield the ticks of a block: for each step, for each unit, one tick per active GPU batch.

    Lazy: `active(step)` is called when the tick after the last one of `step - 1` is asked for, so it may look at the
    tokens of that step. It returns an ascending subset of the batches of the step before (else ValueError); the empty
    one ends the schedule. None means all batches in every step.

    `last(step)`, called right after `active(step)`, says whether nothing can follow `step`: from there on the schedule
    is that of a shape with `step` + 1 steps, which reads no weights ahead and stores no cache in its last one. None
    means that only `shape.num_steps` ends it for certain.

    `whole(batch)`, called behind the tick of its first unit, where nothing moves: whether ticks of the units between
    the first and the last would have nothing to do. They are left out then.
    """
    return walk(shape, active, last, lambda batches: [batches], whole)


def walk(
    shape: ScheduleShape,
    active: ActiveBatches | None,
    last: LastStep | None,
    split: Callable[[Sequence[int]], list[Sequence[int]]],
    whole: WholeStep | None = None,
) -> Iterator[Tick]:
    """Yield the ticks of a schedule that walks over all units once for each group in `split(active(step))`."""
    weights = WeightStream(shape, shape.units)
    batches: Sequence[int] = range(shape.num_batches)
    stores: tuple[Task, ...] = ()  # owed by the compute of the tick before
    index = 0
    for step in range(shape.num_steps):
        batches = batches if active is None else still_active(active(step), batches, step)
        if not batches:
            break
        ends = step == shape.num_steps - 1 or (last is not None and last(step))
        groups = split(batches)
        for number, group in enumerate(groups):
            last_of_step = number == len(groups) - 1
            weights.start_pass(step + last_of_step, goes_on=not (ends and last_of_step))
            order = [(unit, batch) for unit in shape.units for batch in group]
            for here, following in zip(order, [*order[1:], None], strict=True):
                unit, batch = here
                if whole is not None and 0 < unit.index < len(shape.units) - 1 and whole(batch):
                    continue
                loads = state_loads(shape, step, following, len(group)) if following else ()
                if batch == group[0]:
                    loads = weights.loads(unit, loads)
                frees = weights.frees(step, unit) if batch == group[-1] else ()
                compute = Task(TaskKind.COMPUTE, step, unit.index, batch)
                yield Tick(index, loads, compute, stores, frees)
                stores = state_stores(shape, compute, ends, len(group))
                index += 1
        if ends:
            break
    frees = weights.drain()
    if stores or frees:
        yield Tick(index, (), None, stores, frees)
