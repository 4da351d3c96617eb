"""Proof that a schedule is sound, rule by rule, from its ticks alone.

Nothing here is shared with the generators: the checker plays the ticks and keeps its own account of what lies where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import NamedTuple

from h2o_flexgen.schedule.check_books import ScheduleError, StateBooks, WeightBooks, require
from h2o_flexgen.schedule.tasks import NO_BATCH, ScheduleShape, Task, TaskKind, Tick

LOADS = frozenset({TaskKind.LOAD_WEIGHTS, TaskKind.LOAD_CACHE, TaskKind.LOAD_HIDDEN})
STORES = frozenset({TaskKind.STORE_CACHE, TaskKind.STORE_HIDDEN})
WEIGHTS = frozenset({TaskKind.LOAD_WEIGHTS, TaskKind.FREE_WEIGHTS})
CACHE = frozenset({TaskKind.LOAD_CACHE, TaskKind.STORE_CACHE})

__all__ = ["Report", "ScheduleError", "check"]


class Report(NamedTuple):
    """What a sound schedule does.

    ticks       number of ticks, a drain tick included
    steps       steps run; fewer than the shape's when every row finished early
    tasks       number of tasks of each kind
    loads       number of loads of each streamed weight group
    peak_alive  largest number of weight copies alive at once
    unused      weight loads that an early finish made useless
    """

    ticks: int
    steps: int
    tasks: dict[TaskKind, int]
    loads: dict[str, int]
    peak_alive: int
    unused: int


def check(
    ticks: Iterable[Tick],
    shape: ScheduleShape,
    active: Sequence[Sequence[int]] | None = None,
    steps: Sequence[int] | None = None,
) -> Report:
    """Prove that `ticks` is a sound schedule for `shape`, or raise ScheduleError naming the tick and the rule.

    active: the batches that were active in each step (a final empty entry is allowed); None: taken from the ticks, and
    then the schedule may end after any step. One that `LastStep` ended is that of a shape with so many steps; `steps`
    has them group by group, for those that `GroupLast` ended. Rules:
    - form: ticks are numbered; each task stands where its kind belongs, in a tick of its unit's stage; only the last
      tick of a stage may lack a compute, and then it loads nothing;
    - order: every (step, unit, active batch) is computed once, steps in order, within a step unit by unit (zig-zag) or
      batch by batch (row by row); on several stages slot by slot as `_slot_order` has it; active batches only ever
      become fewer;
    - weights: a streamed group is on the compute tier before the tick that uses it (the first tick loads its own), is
      there once, is freed once and in the tick of its last use, and at most lookahead + 1 groups are there at once;
    - cache and hidden: what moves is loaded in the tick before its compute, from where it was stored, and stored in the
      tick after; what does not move has no tasks; caches are not stored in the last step;
    - passes: hidden states go on to the next stage in the tick of the stage's last unit;
    - end: no copy is alive and nothing is left to store.
    Weights, cache, hidden and end are judged stage by stage, as if there were no others' ticks: the numbers that these
    rules name ticks by are counted within the stage.
    """
    ticks = list(ticks)
    _check_form(ticks, shape)
    order = _check_order if len(shape.stages) == 1 else _check_slots
    done, late = order(ticks, shape, active)
    known = [shape.num_steps] * len(shape.groups) if steps is None else list(steps)
    of_batch = [known[number] for number, group in enumerate(shape.groups) for _ in group]
    early = any(max(done[batch] for batch in group) < known[number] for number, group in enumerate(shape.groups))
    loads, peak, unused = Counter[str](), 0, 0
    for stage in range(len(shape.stages)):
        own = [tick for tick in ticks if tick.stage == stage]
        if not any(tick.compute for tick in own):
            require(not own, own[0].index if own else 0, "order: stage {} has nothing to compute", stage)
            continue
        alone = {at for at, tick in enumerate(own) if tick.index in late}
        own = [replace(tick, index=at) for at, tick in enumerate(own)]
        books = WeightBooks(shape, stage, own, ended_early=early)
        states = StateBooks(shape, stage, own, alone, of_batch)
        for tick in own:
            books.play(tick)
        books.close()
        for tick in own:
            states.play(tick)
        states.close()
        loads.update(books.loads)
        peak, unused = max(peak, books.peak), unused + books.unused
    tasks = Counter(task.kind for tick in ticks for task in _tasks(tick))
    return Report(len(ticks), max(done), dict(tasks), dict(loads), peak, unused)


def _tasks(tick: Tick) -> Iterator[Task]:
    yield from tick.stores
    yield from tick.loads
    if tick.compute is not None:
        yield tick.compute
    yield from tick.passes
    yield from tick.frees


def _check_form(ticks: Sequence[Tick], shape: ScheduleShape) -> None:
    for index, tick in enumerate(ticks):
        require(tick.index == index, index, "form: is numbered {}", tick.index)
        for place, kinds in ((tick.loads, LOADS), (tick.stores, STORES), (tick.frees, {TaskKind.FREE_WEIGHTS})):
            for task in place:
                require(task.kind in kinds, index, "form: {} does not belong there", task)
        for task in _tasks(tick):
            batches = range(NO_BATCH, 0) if task.kind in WEIGHTS else range(shape.num_batches)
            exists = task.step in range(shape.num_steps) and task.unit in range(len(shape.units))
            require(exists and task.batch in batches, index, "form: {} has an index that does not exist", task)
            cacheable = task.kind not in CACHE or shape.units[task.unit].kind == "attn"
            require(cacheable, index, "form: {} names a unit without a cache", task)
            own = tick.stage in range(len(shape.stages)) and task.unit in shape.stages[tick.stage]
            require(own, index, "form: {} is not of stage {}", task, tick.stage)
        compute = tick.compute
        if compute is None:
            drains = all(later.compute is None for later in ticks[index:])
            require(drains, index, "form: a tick without a compute is not the last one")
            require(not tick.loads, index, "form: a drain tick loads something")
        else:
            require(compute.kind is TaskKind.COMPUTE, index, "form: {} is not a compute", compute)
        passed = compute is not None and any(compute.unit == stage[-1] for stage in shape.stages[:-1])
        wanted = (replace(compute, kind=TaskKind.PASS_HIDDEN),) if passed and compute is not None else ()
        require(tick.passes == wanted, index, "passes: {} are passed on, needed {}", tick.passes, wanted)
    drained = [tick.stage for tick in ticks if tick.compute is None]
    require(len(drained) == len(set(drained)), len(ticks) - 1, "form: a stage is drained twice")


def _check_order(
    ticks: Sequence[Tick], shape: ScheduleShape, active: Sequence[Sequence[int]] | None
) -> tuple[list[int], set[int]]:
    """Check the computes of one stage; the number of steps run by each batch, and no tick that may load late."""
    computes = [tick.compute for tick in ticks if tick.compute is not None]
    before = set(range(shape.num_batches))
    steps, start = 0, 0
    for step, group in groupby(computes, key=lambda task: task.step):
        done = [(task.unit, task.batch) for task in group]
        require(step == steps, start, "order: step {} follows step {}", step, steps - 1)
        batches = {batch for _, batch in done}
        require(batches <= before, start, "order: batches {} come back in step {}", sorted(batches - before), step)
        if active is not None:
            recorded = list(active[step]) if step < len(active) else []
            require(sorted(batches) == recorded, start, "order: batches {}, active are {}", sorted(batches), recorded)
        units = range(len(shape.units))
        wanted = (
            [(unit, batch) for unit in units for batch in sorted(batches)],
            [(unit, batch) for batch in sorted(batches) for unit in units],
        )
        agreed = max(_agreement(done, order) for order in wanted)
        require(done in wanted, start + agreed, "order: step {} is neither unit by unit nor batch by batch", step)
        before, steps, start = batches, steps + 1, start + len(done)
    if active is not None:
        recorded_steps = sum(1 for batches in active if batches)
        require(steps == recorded_steps, len(ticks), "order: {} steps run, active were {}", steps, recorded_steps)
    return [steps] * shape.num_batches, set()


def _check_slots(
    ticks: Sequence[Tick], shape: ScheduleShape, active: Sequence[Sequence[int]] | None
) -> tuple[list[int], set[int]]:
    """Check the computes of several stages; the number of steps run by each batch, and the ticks of stages that had
    nothing to do in the slot before."""
    done = [tick.compute for tick in ticks if tick.compute is not None]
    batches = [sorted({task.batch for task in done if task.step == step}) for step in range(shape.num_steps)]
    for step, (going, before) in enumerate(zip(batches, [range(shape.num_batches), *batches], strict=False)):
        require(set(going) <= set(before), 0, "order: batches {} come back in step {}", going, step)
    if active is not None:
        recorded = [list(entry) for entry in active]
        recorded += [[]] * (shape.num_steps - len(recorded))
        require(batches == recorded, 0, "order: batches by step are {}, active are {}", batches, recorded)
    wanted = _slot_order(shape, batches)
    agreed = next((at for at, (task, other) in enumerate(zip(done, wanted, strict=False)) if task != other[1]), None)
    agreed = min(len(done), len(wanted)) if agreed is None else agreed
    missing = wanted[agreed][1] if agreed < len(wanted) else "nothing"
    require(len(done) == len(wanted) == agreed, agreed, "order: needed {}", missing)
    busy = [slot for slot, _ in wanted]
    late, seen = set(), set[tuple[int, int]]()
    for tick, slot in zip(ticks, busy, strict=False):
        fresh = (tick.stage, slot) not in seen
        seen.add((tick.stage, slot))
        if fresh and (tick.stage, slot - 1) not in seen:
            late.add(tick.index)
    return [sum(batch in going for going in batches) for batch in range(shape.num_batches)], late


def _slot_order(shape: ScheduleShape, batches: Sequence[Sequence[int]]) -> list[tuple[int, Task]]:
    """The computes as they should be, each with its slot. `batches`: the active ones of each step.

    In slot t stage s walks over its units with group (t - s) modulo the number of stages. Within a slot comes the
    first compute of each stage, the last stage's first, then the second of each, and so on; after all of them those
    of the head.
    """
    count, head = len(shape.stages), shape.units[-1].index
    keyed = []
    for step, going in enumerate(batches):
        for group, members in enumerate(shape.groups):
            for number, stage in enumerate(shape.stages):
                walk = product(stage, [batch for batch in members if batch in going])
                for turn, (unit, batch) in enumerate(walk):
                    slot = step * count + group + number
                    key = (slot, unit == head, turn, -number)
                    keyed.append((key, (slot, Task(TaskKind.COMPUTE, step, unit, batch))))
    return [entry for _, entry in sorted(keyed, key=lambda item: item[0])]


def _agreement(done: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> int:
    """Number of leading entries that agree, capped at the last entry of `done`."""
    pairs = enumerate(zip(done, wanted, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(done) - 1)
