"""Proof that a schedule is sound, rule by rule, from its ticks alone.

Nothing here is shared with the generators: the checker plays the ticks and keeps its own account of what lies where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import NamedTuple

from h2o_flexgen.schedule.tasks import NO_BATCH, ScheduleShape, Task, TaskKind, Tick

Schedule = Callable[
    [ScheduleShape, Callable[[int], Sequence[int]] | None, Callable[[int], bool] | None], Iterator[Tick]
]
"""The signature of a generator of ticks: `zigzag` and `row_by_row`."""
LOADS = frozenset({TaskKind.LOAD_WEIGHTS, TaskKind.LOAD_CACHE, TaskKind.LOAD_HIDDEN})
STORES = frozenset({TaskKind.STORE_CACHE, TaskKind.STORE_HIDDEN})
WEIGHTS = frozenset({TaskKind.LOAD_WEIGHTS, TaskKind.FREE_WEIGHTS})
CACHE = frozenset({TaskKind.LOAD_CACHE, TaskKind.STORE_CACHE})


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
    then the schedule may end after any step. One that `last` ended is that of a shape with so many steps; `steps`
    has them group by group, for those that it ended. Rules:
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
    - end: no copy is alive and nothing is left to store;
    - experts: their ticks stand behind the last one of their unit in a step, see `_check_experts`; all other rules are
      of the schedule without these ticks.
    Weights, cache, hidden and end are judged stage by stage, as if there were no others' ticks: the numbers that these
    rules name ticks by are counted within the stage.
    """
    ticks = list(ticks)
    loads = _check_experts(ticks, shape)
    ticks = _without_experts(ticks)
    _check_form(ticks, shape)
    order = _check_order if len(shape.stages) == 1 else _check_slots
    done, late = order(ticks, shape, active)
    known = [shape.num_steps] * len(shape.groups) if steps is None else list(steps)
    of_batch = [known[number] for number, group in enumerate(shape.groups) for _ in group]
    early = any(max(done[batch] for batch in group) < known[number] for number, group in enumerate(shape.groups))
    peak = unused = 0
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


def _check_experts(ticks: Sequence[Tick], shape: ScheduleShape) -> Counter[str]:
    """Check the ticks of experts, and count the loads of streamed ones.

    The experts of a unit are computed once in a step, ascending, for all GPU batches. A streamed one is loaded no
    earlier than behind the last tick of the unit with streamed experts before, no later than in the tick before its
    own, or the first of its unit's experts; it is freed in its tick, which it shares with streamed ones alone. What
    nobody chose is freed once that is known, and the tick after may be late. At most `expert_slots` are there.
    """
    loads, before, here, past = Counter[str](), None, dict[tuple[int, int], Task](), -1
    at, unwanted = dict[tuple[int, int], int](), -2
    with_experts = [unit.index for unit in shape.units if shape.streamed.intersection(unit.experts)]
    for tick in ticks:
        compute = tick.compute
        now = (shape.num_steps, 0) if compute is None else (compute.step, compute.unit)
        for load in (task for task in tick.loads if task.experts):
            place, (expert,) = (load.unit, *load.experts), load.experts
            require(load.batch == NO_BATCH and now <= (load.step, load.unit), tick.index, "experts: {} is late", load)
            between = [unit for unit in with_experts if now[1] < unit < load.unit and now[0] == load.step]
            require(not between and load.step <= now[0] + 1, tick.index, "experts: {} is early", load)
            key = shape.units[load.unit].experts[expert]
            require(key in shape.streamed and place not in here, tick.index, "experts: {}", load)
            here[place], at[place] = load, tick.index
            loads[key] += 1
        require(len(here) <= shape.expert_slots, tick.index, "experts: {} copies are there", len(here))
        streams: list[int] = []
        if compute is not None and compute.experts:
            follows = before is not None and (before.step, before.unit, NO_BATCH) == (*now, compute.batch)
            require(follows, tick.index, "experts: {} follows {}", compute, before)
            unit = shape.units[compute.unit]
            streams = [expert for expert in compute.experts if unit.experts[expert] in shape.streamed]
            alike = not streams or len(streams) == len(compute.experts) <= shape.experts_per_tick
            require(alike, tick.index, "experts: {} stream with others", streams)
            for expert in streams:
                place = (compute.unit, expert)
                require(place in here, tick.index, "experts: {} is not there", expert)
                late = past >= 0 and unwanted < tick.index - 1 and at[place] == tick.index
                require(not late, tick.index, "experts: the load of {} only starts", expert)
            for expert in compute.experts:
                require(past < expert, tick.index, "experts: {} is computed after {}", expert, past)
                past = expert
        else:
            before, past = compute, -1
        for free in (task for task in tick.frees if task.experts):
            place = (free.unit, *free.experts)
            require(place in here and here[place].step == free.step, tick.index, "experts: {} is not there", free)
            used = (free.step, free.unit) == now and free.experts[0] in streams
            chosen = any(
                each.compute is not None
                and (each.compute.step, each.compute.unit) == (free.step, free.unit)
                and free.experts[0] in each.compute.experts
                for each in ticks
            )
            known = (free.step, free.unit) <= now
            require(used or (known and not chosen), tick.index, "experts: {} is early or late", free)
            unwanted = unwanted if used else tick.index
            del here[place]
        for expert in streams:
            require((now[1], expert) not in here, tick.index, "experts: {} is not freed", expert)
    require(not here, len(ticks), "experts: {} are loaded and never freed", sorted(here))
    return loads


def _without_experts(ticks: Sequence[Tick]) -> list[Tick]:
    """The schedule as if no unit had experts: what their ticks store is stored in the next one."""
    kept, owed, left_out = list[Tick](), tuple[Task, ...](), 0
    for tick in ticks:
        if tick.compute is not None and tick.compute.experts:
            owed, left_out = (*owed, *tick.stores), left_out + 1
            continue
        loads, frees = (tuple(task for task in tasks if not task.experts) for tasks in (tick.loads, tick.frees))
        stores, index = (*owed, *tick.stores), tick.index - left_out
        if tick.compute is not None or stores or frees:
            kept.append(replace(tick, index=index, stores=stores, loads=loads, frees=frees))
        owed = ()
    return kept


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


class ScheduleError(AssertionError):
    """A schedule breaks a rule: always a fault of the generator, never of the user."""


def require(holds: bool, tick: int, rule: str, *parts: object) -> None:
    """`rule` is a template for `parts`, filled in only where it is broken: most time would go into sentences else."""
    if not holds:
        raise ScheduleError(f"tick {tick}: {rule.format(*parts)}")


@dataclass
class _Copy:
    """A weight group on the compute tier: its load, and its last use so far."""

    load: Task
    loaded: int
    used: int | None = None
    last: Task | None = None


class WeightBooks:
    """Account of the streamed weight groups on the compute tier."""

    def __init__(self, shape: ScheduleShape, stage: int, ticks: Sequence[Tick], *, ended_early: bool) -> None:
        """`ticks`: all of the stage's. `ended_early`: whether a group of batches may have ended by surprise."""
        self._shape, self._ended_early = shape, ended_early
        units = shape.stages[stage]
        self._first, self._last = shape.units[units[0]].weights, units[-1]
        self._final = max(tick.index for tick in ticks if tick.compute is not None)
        self._copies: dict[str, _Copy] = {}
        self.loads: Counter[str] = Counter()
        self.peak = self.unused = 0

    def play(self, tick: Tick) -> None:
        """Loads, then the compute, then the frees of one tick."""
        for task in tick.loads:
            if task.kind is TaskKind.LOAD_WEIGHTS:
                self._load(tick.index, task)
        if tick.compute is not None:
            self._use(tick.index, tick.compute)
        for task in tick.frees:
            self._free(tick, task)

    def close(self) -> None:
        """Nothing may be alive after the last tick."""
        if self._copies:
            key, copy = next(iter(self._copies.items()))
            raise ScheduleError(f"tick {copy.loaded}: end: {key} is loaded by {copy.load} and never freed")

    def _load(self, tick: int, task: Task) -> None:
        key = self._shape.units[task.unit].weights
        require(key in self._shape.streamed, tick, "weights: {} loads {}, which is resident", task, key)
        require(key not in self._copies, tick, "weights: {} loads {}, which is there already", task, key)
        self._copies[key] = _Copy(task, tick)
        self.loads[key] += 1
        self.peak = max(self.peak, len(self._copies))
        bound = self._shape.lookahead + 1
        require(len(self._copies) <= bound, tick, "weights: {} makes {} copies of {}", task, len(self._copies), bound)

    def _use(self, tick: int, task: Task) -> None:
        key = self._shape.units[task.unit].weights
        if key not in self._shape.streamed:
            return
        copy = self._copies.get(key)
        if copy is None:
            raise ScheduleError(f"tick {tick}: weights: {task} needs {key}, which is not there")
        require(copy.loaded < tick or tick == 0, tick, "weights: {} needs {}, whose load only starts", task, key)
        first = (copy.load.step, copy.load.unit) == (task.step, task.unit)
        if len(self._shape.stages) > 1 and self._ended_early:
            # What was read ahead for a group that ended by surprise serves the next one.
            first = first or (copy.load.unit == task.unit and copy.load.step <= task.step)
        require(copy.used is not None or first, tick, "weights: {} does not name its first use, {}", copy.load, task)
        copy.used, copy.last = tick, task

    def _free(self, tick: Tick, task: Task) -> None:
        key = self._shape.units[task.unit].weights
        copy = self._copies.pop(key, None)
        if copy is None:
            raise ScheduleError(f"tick {tick.index}: weights: {task} frees {key}, which is not there")
        # An early end surprises what was for the next step: read ahead, or kept by the head for its tied embedding.
        tied = key == self._first
        kept = tied and copy.used == tick.index - 1
        drained = tick.compute is None and self._ended_early and (copy.used is None or kept)
        require(copy.used == tick.index or drained, tick.index, "weights: {} is not in the tick of the last use", task)
        hasty = tied and self._may_go_on(tick)
        require(not hasty, tick.index, "weights: {} frees what the next step may need", task)
        last = copy.last or copy.load
        named = (last.step, last.unit) == (task.step, task.unit)
        require(named, tick.index, "weights: {} does not name {}", task, last)
        self.unused += copy.used is None

    def _may_go_on(self, tick: Tick) -> bool:
        """Whether another step may follow this head: its tokens decide, and the tick is handed out before them. Of one
        stage of many it is enough that another pass does follow."""
        compute, shape = tick.compute, self._shape
        if compute is None or compute.unit != self._last:
            return False
        return compute.step < shape.num_steps - 1 if len(shape.stages) == 1 else tick.index < self._final


class _State(NamedTuple):
    """The cache of one (layer, GPU batch), or the hidden state of one GPU batch (layer None)."""

    name: str
    layer: int | None
    batch: int


class StateBooks:
    """Account of the caches and hidden states that move.

    A state is at home, or loaded for the next compute, or owed to its home by the last one, or nowhere of interest.
    """

    def __init__(
        self, shape: ScheduleShape, stage: int, ticks: Sequence[Tick], late: Container[int], steps: Sequence[int]
    ) -> None:
        """`ticks`: all of the stage's; those numbered in `late` may load what they compute on themselves. `steps`: of
        each GPU batch, as far as was known."""
        self._shape, self._late, self._steps = shape, late, steps
        self._first, self._last = shape.stages[stage][0], shape.stages[stage][-1]
        self._computes = [tick.compute for tick in ticks]
        self._home: set[_State] = set()
        self._loaded: set[_State] = set()
        self._owed: dict[_State, Task] = {}

    def play(self, tick: Tick) -> None:
        """Stores, then loads, then the compute of one tick."""
        for task in tick.stores:
            self._store(tick.index, task)
        if self._owed:
            state, wrote = next(iter(self._owed.items()))
            raise ScheduleError(f"tick {tick.index}: {state.name}: what {wrote} wrote is not stored in the next tick")
        for task in tick.loads:
            if task.kind is not TaskKind.LOAD_WEIGHTS:
                self._load(tick.index, task)
        if tick.compute is not None:
            self._compute(tick.index, tick.compute)

    def close(self) -> None:
        """Nothing may be left to store after the last tick."""
        for wrote in self._owed.values():
            raise ScheduleError(f"tick {len(self._computes)}: end: what {wrote} wrote is never stored")

    def _store(self, tick: int, task: Task) -> None:
        state = self._state(task)
        wrote = self._owed.pop(state, None)
        matches = wrote is not None and (wrote.step, wrote.unit) == (task.step, task.unit)
        require(matches, tick, "{}: {} stores what the tick before did not leave to be stored", state.name, task)
        self._home.add(state)

    def _load(self, tick: int, task: Task) -> None:
        state = self._state(task)
        require(state in self._home, tick, "{}: {} loads what is not stored", state.name, task)
        targets = [self._compute_at(at) for at in ((tick, tick + 1) if tick in self._late else (tick + 1,))]
        same = any(t is not None and (t.step, t.unit, t.batch) == (task.step, task.unit, task.batch) for t in targets)
        require(same, tick, "{}: {} is not for the compute of the next tick", state.name, task)
        self._home.remove(state)
        self._loaded.add(state)

    def _compute(self, tick: int, task: Task) -> None:
        unit = self._shape.units[task.unit]
        if unit.kind == "attn" and (unit.layer, task.batch) in self._shape.cache_moves:
            cache = _State("cache", unit.layer, task.batch)
            ready = (cache in self._loaded) == (task.step > 0)
            require(ready, tick, "cache: {} reads a cache that is not loaded, or the prompt finds one", task)
            self._loaded.discard(cache)
            if task.step < self._steps[task.batch] - 1:
                self._owed[cache] = task
        hidden = _State("hidden", None, task.batch)
        require(hidden not in self._home, tick, "hidden: {} needs a hidden state that is parked", task)
        self._loaded.discard(hidden)
        following = self._compute_at(tick + 1)
        interrupted = following is None or following.batch != task.batch
        if task.batch in self._shape.hidden_moves and task.unit != self._last and interrupted:
            self._owed[hidden] = task

    def _compute_at(self, tick: int) -> Task | None:
        return self._computes[tick] if tick < len(self._computes) else None

    def _state(self, task: Task) -> _State:
        if task.kind in (TaskKind.LOAD_HIDDEN, TaskKind.STORE_HIDDEN):
            return _State("hidden", None, task.batch)
        return _State("cache", self._shape.units[task.unit].layer, task.batch)
