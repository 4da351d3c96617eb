"""The accounts that a proof of a schedule keeps: of weights, caches and hidden states on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from h2o_flexgen.schedule.tasks import ScheduleShape, Task, TaskKind, Tick


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
