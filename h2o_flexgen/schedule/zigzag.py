"""The zig-zag block schedule of one device (FlexGen, section 4.1).

The order is step i, unit j, GPU batch k: weights are read once per step for the whole block, and each compute overlaps
with the loads of what comes next and the stores of what came before. A *pass* is one walk over all units: one per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import NamedTuple

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.schedule.tasks import NO_BATCH, ScheduleShape, Task, TaskKind, Tick


def zigzag(
    shape: ScheduleShape,
    active: Callable[[int], Sequence[int]] | None = None,
    last: Callable[[int], bool] | None = None,
    whole: Callable[[int], bool] | None = None,
    chosen: Callable[[int, UnitSpec], Sequence[int]] | None = None,
    streams: Callable[[str], bool] | None = None,
    ahead: Callable[[int, UnitSpec], bool] | None = None,
) -> Iterator[Tick]:
    """Yield the ticks of a block: for each step, for each unit, one tick per active GPU batch.

    Lazy: the callables are asked as late as possible, so that they may look at the tokens of the step before.

    active(step)        ascending subset of the batches of the step before (else ValueError); the empty one ends the
                        schedule. None: all batches in every step
    last(step)          asked after `active`: whether `step` is surely the last, so that it reads no weights ahead and
                        stores no cache. None: only `shape.num_steps` ends the schedule
    whole(batch)        asked after the first unit: the units between the first and the last have nothing to do
    chosen(step, unit)  asked once a unit's tokens are routed: the experts that have any tokens. None: all
    streams(key)        asked then: whether a group has to be loaded. None: as `shape` says
    ahead(step, unit)   whether the unit's experts are read before tokens choose, see `ExpertStream`. None: never
    """
    stage = StageTicks(shape, range(len(shape.units)), whole=whole, chosen=chosen, streams=streams, ahead=ahead)
    of_group = None if active is None else lambda step, group: active(step)
    group = BatchGroup(shape, 0, of_group, None if last is None else lambda step, group: last(step))
    while (now := group.enter()) is not None:
        yield from stage.walk(now, next_step=None if now.ends else now.step + 1)
    yield from stage.drain()


class Pass(NamedTuple):
    """The walk of a group's active batches over one stage. `ends`: the group is known to have no step after it."""

    group: int
    step: int
    batches: tuple[int, ...]
    ends: bool


class BatchGroup:
    """GPU batches that go through a stage together, step by step. `active` and `last`: as for `pipeline`."""

    def __init__(
        self,
        shape: ScheduleShape,
        index: int,
        active: Callable[[int, int], Sequence[int]] | None,
        last: Callable[[int, int], bool] | None,
    ) -> None:
        self._index, self._active, self._last, self._num_steps = index, active, last, shape.num_steps
        self._batches: Sequence[int] = shape.groups[index]
        self.step = -1
        """Of the last step that has begun."""
        self.over = False
        """Whether no other step will begin."""

    def enter(self) -> Pass | None:
        """The group's next step; None if there is none."""
        if self.over:
            return None
        step, batches = self.step + 1, tuple(self._batches)
        if self._active is not None:
            batches = still_active(self._active(step, self._index), self._batches, step)
        if not batches:
            self.over = True
            return None
        self.over = step == self._num_steps - 1 or (self._last is not None and self._last(step, self._index))
        self.step, self._batches = step, batches
        return Pass(self._index, step, batches, self.over)


class StageTicks:
    """The ticks of one device, pass by pass. The callables are those of `zigzag`."""

    def __init__(
        self,
        shape: ScheduleShape,
        units: range,
        number: int = 0,
        *,
        whole: Callable[[int], bool] | None = None,
        chosen: Callable[[int, UnitSpec], Sequence[int]] | None = None,
        streams: Callable[[str], bool] | None = None,
        ahead: Callable[[int, UnitSpec], bool] | None = None,
    ) -> None:
        """`units`: the units that stage `number` computes."""
        self._shape, self._number, self._index = shape, number, 0
        self._units = [shape.units[index] for index in units]
        self._whole, self._chosen = whole, chosen
        self._weights = WeightStream(shape, self._units)
        self._experts = ExpertStream(shape, self._units, streams or shape.streamed.__contains__, ahead)
        self._stores: tuple[Task, ...] = ()  # owed by the compute of the tick before

    def walk(
        self, now: Pass, following: Pass | None = None, next_step: int | None = None, idled: bool = False
    ) -> Iterator[Tick]:
        """The ticks of a pass. `following`: the one right after it, if known; `next_step`: of the next pass, None if
        there can be none; `idled`: the slot before was empty."""
        shape, first, last = self._shape, self._units[0], self._units[-1]
        self._weights.start_pass(now.step if next_step is None else next_step, goes_on=next_step is not None)
        self._experts.start_pass(now.step, next_step)
        order = [(unit, batch) for unit in self._units for batch in now.batches]
        targets = [(now, *target) for target in order[1:]]
        ahead = [*targets, None if following is None else (following, first, following.batches[0])]
        for number, ((unit, batch), target) in enumerate(zip(order, ahead, strict=True)):
            if self._whole is not None and unit is not first and unit is not last and self._whole(batch):
                continue
            # Loads that were unknown in the tick before are issued now.
            loads = self._loads(now, *order[0]) if number == 0 and idled else ()
            loads += () if target is None else self._loads(*target)
            if batch == now.batches[0]:
                loads = (*self._weights.loads(unit, loads), *self._experts.loads())
            frees = self._weights.frees(now.step, unit) if batch == now.batches[-1] else ()
            frees = (*frees, *self._experts.unwanted())
            compute = Task(TaskKind.COMPUTE, now.step, unit.index, batch)
            passed = unit is last and unit is not shape.units[-1]
            passes = (Task(TaskKind.PASS_HIDDEN, now.step, unit.index, batch),) if passed else ()
            yield self._tick(loads, compute, frees, passes)
            self._stores = state_stores(shape, compute, now.ends, len(now.batches), last.index)
            self._index += 1
            if unit.experts and batch == now.batches[-1]:
                yield from self._expert_ticks(now.step, unit)

    def drain(self) -> Iterator[Tick]:
        """The stores and frees that are left."""
        frees = (*self._weights.drain(), *self._experts.drain())
        if self._stores or frees:
            yield self._tick((), None, frees)

    def _tick(
        self, loads: tuple[Task, ...], compute: Task | None, frees: tuple[Task, ...], passes: tuple[Task, ...] = ()
    ) -> Tick:
        """The next tick, with the stores of the tick before."""
        return Tick(
            index=self._index,
            stores=self._stores,
            loads=loads,
            compute=compute,
            passes=passes,
            frees=frees,
            stage=self._number,
        )

    def _loads(self, target: Pass, unit: UnitSpec, batch: int) -> tuple[Task, ...]:
        return state_loads(self._shape, target.step, (unit, batch), len(target.batches), self._units[0].index)

    def _expert_ticks(self, step: int, unit: UnitSpec) -> Iterator[Tick]:
        """The ticks of the chosen experts of `unit`, ascending, so that sums are always made in the same order.
        Resident neighbours share one, and streamed ones that have places in the buffer, up to a part of it."""
        chosen = range(len(unit.experts)) if self._chosen is None else self._chosen(step, unit)
        away = self._experts.begin(step, unit, chosen)
        for streams, members in groupby(chosen, key=lambda expert: expert in away):
            left = list(members)
            while left:
                loads = self._experts.loads()
                count = self._experts.together(unit, left) if streams else len(left)
                experts, left = tuple(left[:count]), left[count:]
                used = (self._experts.used(unit, expert) for expert in experts if streams)
                frees = (*used, *self._experts.unwanted())
                compute = Task(TaskKind.COMPUTE, step, unit.index, NO_BATCH, experts)
                yield self._tick(loads, compute, frees)
                self._index, self._stores = self._index + 1, ()


def still_active(batches: Sequence[int], before: Sequence[int], step: int) -> tuple[int, ...]:
    """`batches` as a tuple; ValueError unless it is an ascending subset of `before`."""
    if list(batches) != sorted(set(batches) & set(before)):
        raise ValueError(
            f"active batches of step {step} are {list(batches)}: needed an ascending subset of {list(before)}"
        )
    return tuple(batches)


def state_loads(
    shape: ScheduleShape, step: int, target: tuple[UnitSpec, int], group_size: int, first: int = 0
) -> tuple[Task, ...]:
    """Loads for the next tick's compute: its cache (not at the prompt) and parked hidden states.

    `first`: the unit that a stage begins with, which reads neither, so that nothing is loaded before it is known which
    batches go on.
    """
    unit, batch = target
    tasks: tuple[Task, ...] = ()
    if unit.kind == "attn" and step > 0 and (unit.layer, batch) in shape.cache_moves:
        tasks = (Task(TaskKind.LOAD_CACHE, step, unit.index, batch),)
    if group_size > 1 and batch in shape.hidden_moves and unit.index != first:
        tasks = (*tasks, Task(TaskKind.LOAD_HIDDEN, step, unit.index, batch))
    return tasks


def state_stores(shape: ScheduleShape, source: Task, ends: bool, group_size: int, last: int = -1) -> tuple[Task, ...]:
    """Stores after a compute: its cache, except in the last step, and hidden states to be parked, unless the batch is
    alone in its pass. `last`: the unit that a stage ends with, by default the head."""
    unit, step, batch = shape.units[source.unit], source.step, source.batch
    tasks: tuple[Task, ...] = ()
    if unit.kind == "attn" and not ends and (unit.layer, batch) in shape.cache_moves:
        tasks = (Task(TaskKind.STORE_CACHE, step, unit.index, batch),)
    if group_size > 1 and batch in shape.hidden_moves and unit.index not in (last, len(shape.units) - 1):
        tasks = (*tasks, Task(TaskKind.STORE_HIDDEN, step, unit.index, batch))
    return tasks


class _GroupUse(NamedTuple):
    """Consecutive units that use the same weight group: one load, one free."""

    key: str
    first: int
    last: int


class WeightStream:
    """Reads streamed weight groups ahead, in order of use, into at most lookahead + 1 copies.

    A load is issued as soon as a copy is free, in the first tick of a unit. A group is never alive twice. One that the
    last and the first unit of a pass use (tied embeddings) stays from one pass to the next.
    """

    def __init__(self, shape: ScheduleShape, stage: Sequence[UnitSpec]) -> None:
        """`stage`: the units that a pass computes."""
        runs = []
        for key, units in groupby(stage, key=lambda unit: unit.weights):
            indices = [unit.index for unit in units]
            runs.append(_GroupUse(key, indices[0], indices[-1]))
        self._wraps = runs[0].key == runs[-1].key
        self._first_run, self._head_run = runs[0], runs[-1]
        self._runs = [run for run in runs if run.key in shape.streamed]
        self._last_run_of_unit = {run.last: run for run in self._runs}
        self._copies = shape.lookahead + 1
        self._queue: deque[Task] = deque(self._pass_loads(0, first=True))  # of this pass and the next, not yet issued
        self._keys = [unit.weights for unit in shape.units]
        self._alive: dict[str, Task] = {}  # the free that is owed for each group, as far as it is known
        self._goes_on = False

    def start_pass(self, next_step: int, *, goes_on: bool) -> None:
        """Begin a pass, and queue the reads of the pass after it, of `next_step`, if there is one."""
        self._goes_on = goes_on
        if goes_on:
            self._queue.extend(self._pass_loads(next_step, first=False))

    def loads(self, unit: UnitSpec, state_loads: tuple[Task, ...]) -> tuple[Task, ...]:
        """The loads of the first tick of `unit`: its own weights, the next tick's state, then weights read ahead."""
        own: list[Task] = []
        ahead: list[Task] = []
        while self._queue and len(self._alive) < self._copies:
            task = self._queue[0]
            key = self._keys[task.unit]
            if key in self._alive:
                break
            self._alive[key] = Task(TaskKind.FREE_WEIGHTS, task.step, task.unit, NO_BATCH)
            (own if key == unit.weights else ahead).append(self._queue.popleft())
        return (*own, *state_loads, *ahead)

    def frees(self, step: int, unit: UnitSpec) -> tuple[Task, ...]:
        """The free of a group that `unit` uses last; none while the next pass uses it."""
        run = self._last_run_of_unit.get(unit.index)
        if run is None:
            return ()
        owed = Task(TaskKind.FREE_WEIGHTS, step, unit.index, NO_BATCH)
        if run is self._head_run and self._wraps and self._goes_on:
            self._alive[run.key] = owed
            return ()
        del self._alive[run.key]
        return (owed,)

    def drain(self) -> tuple[Task, ...]:
        """Free what was read ahead or kept for a pass that did not come."""
        frees = tuple(self._alive.values())
        self._alive.clear()
        return frees

    def _pass_loads(self, step: int, *, first: bool) -> list[Task]:
        shared = self._wraps and not first  # the first run of this pass still has the last run's copy
        runs = [run for run in self._runs if not (shared and run is self._first_run)]
        return [Task(TaskKind.LOAD_WEIGHTS, step, run.first, NO_BATCH) for run in runs]


class ExpertStream:
    """Reads streamed experts, in order of use, into `expert_slots` places.

    Chosen experts are read once a unit's tokens are routed. If `ahead` expects nearly all experts of the next unit to
    be chosen, they are read as soon as places are free; experts not chosen are freed after the next tick. One place
    stays free for an expert that was not read ahead.
    """

    def __init__(
        self,
        shape: ScheduleShape,
        stage: Sequence[UnitSpec],
        streams: Callable[[str], bool],
        ahead: Callable[[int, UnitSpec], bool] | None,
    ) -> None:
        """`stage`: the units that a pass computes."""
        self._slots, self._together = shape.expert_slots, shape.experts_per_tick
        self._streams, self._ahead = streams, ahead
        self._units = [unit for unit in stage if not shape.streamed.isdisjoint(unit.experts)]
        self._next_step: int | None = None
        self._alive: dict[tuple[int, int], Task] = {}
        """The loads of the experts in places, by unit and expert."""
        self._waiting: deque[Task] = deque()  # loads of experts that were chosen, not yet issued
        self._early: deque[Task] = deque()  # of the unit after
        self._unwanted: list[Task] = []

    def start_pass(self, step: int, next_step: int | None) -> None:
        """Begin a pass; `next_step`: of the pass after it, None if there can be none."""
        self._next_step = next_step
        if self._units and not (self._alive or self._early):
            self._aim(step, self._units[0])

    def begin(self, step: int, unit: UnitSpec, chosen: Sequence[int]) -> frozenset[int]:
        """The tokens of `unit` have chosen. Returns the streamed ones of the `chosen` experts."""
        here = [expert for index, expert in self._alive if index == unit.index]
        self._unwanted += [self._alive[unit.index, expert] for expert in here if expert not in chosen]
        away = frozenset(
            expert for expert in chosen if (unit.index, expert) in self._alive or self._streams(unit.experts[expert])
        )
        self._waiting.extend(_load(step, unit, expert) for expert in chosen if expert in away.difference(here))
        self._early.clear()
        after = [each for each in self._units if each.index > unit.index]
        if after:
            self._aim(step, after[0])
        elif self._next_step is not None and self._units and self._units[0] is not unit:
            self._aim(self._next_step, self._units[0])
        return away

    def loads(self) -> tuple[Task, ...]:
        """As many loads as there are places for."""
        found: list[Task] = []
        while (self._waiting and len(self._alive) < self._slots) or (
            self._early and not self._waiting and len(self._alive) < self._slots - 1
        ):
            task = (self._waiting or self._early).popleft()
            self._alive[task.unit, task.experts[0]] = task
            found.append(task)
        return tuple(found)

    def together(self, unit: UnitSpec, experts: Sequence[int]) -> int:
        """How many of `experts`, the next to compute, share a tick: the first ones, whose loads were issued."""
        return sum(1 for _ in takewhile(lambda expert: (unit.index, expert) in self._alive, experts[: self._together]))

    def used(self, unit: UnitSpec, expert: int) -> Task:
        """The free of an expert whose tick this is."""
        return self._free(self._alive[unit.index, expert])

    def unwanted(self) -> tuple[Task, ...]:
        """Frees of what was read ahead and not chosen."""
        found, self._unwanted = self._unwanted, []
        return tuple(self._free(task) for task in found)

    def drain(self) -> tuple[Task, ...]:
        """Free what was read ahead for a pass that did not come."""
        self._unwanted.clear()
        return tuple(self._free(task) for task in list(self._alive.values()))

    def _free(self, load: Task) -> Task:
        del self._alive[load.unit, load.experts[0]]
        return replace(load, kind=TaskKind.FREE_WEIGHTS)

    def _aim(self, step: int, unit: UnitSpec) -> None:
        """Queue the experts of `unit`, if nearly all of them will be needed."""
        if self._ahead is not None and self._ahead(step, unit):
            away = [expert for expert, key in enumerate(unit.experts) if self._streams(key)]
            away = [expert for expert in away if (unit.index, expert) not in self._alive]
            self._early = deque(_load(step, unit, expert) for expert in away)


def _load(step: int, unit: UnitSpec, expert: int) -> Task:
    return Task(TaskKind.LOAD_WEIGHTS, step, unit.index, NO_BATCH, (expert,))
