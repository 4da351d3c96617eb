"""Walks the ticks of a schedule as the executor does, on a clock instead of a machine.

What `engine.execution.executor`, `engine.state.weights`, `engine.state.kv_store`, `engine.state.backing` and
`engine.execution.host_attention` wait for is waited for here, in the same order: loads of weights, caches and hidden
states, buffers whose last store is still under way, staging buffers between a GPU and the disk, and attention on the
host. Change them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from h2o_flexgen.cost.resources import Clock, Job
from h2o_flexgen.cost.terms import CostModel, Price
from h2o_flexgen.schedule.footprint import STAGING_BUFFERS, STATE_BUFFERS
from h2o_flexgen.schedule.host_attention import FILL_BUFFERS, HOST_ATTENTION
from h2o_flexgen.schedule.tasks import Task, TaskKind, Tick

Place = tuple[int, int]  # (layer, batch index)


class _Ring:
    """Transfer buffers on the compute tier, those of `Parking`: all are alike, so that counting them is enough."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free = clock, STATE_BUFFERS
        self._saving: list[Job] = []

    def take(self) -> None:
        if self._free:
            self._free -= 1
        else:
            self._clock.wait(self._saving.pop(0))

    def give_back(self, after: Job | None) -> None:
        if after is None:
            self._free += 1
        else:
            self._saving.append(after)


class _Homes:
    """Homes of one kind of state, and the staging buffers they share: `HomeMaker`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[object, Job] = {}
        self._staging: list[Job | None] = [None] * STAGING_BUFFERS
        self._turn = 0

    def move(self, owner: object, task: Task, price: Price) -> Job | None:
        """Queue the transfers of `task` behind the last ones of `owner`; the last of them, None without any."""
        transfers = price.transfers
        staged = len(transfers) > 1
        if staged:
            self._clock.wait(self._staging[self._turn])
        last = self._last.get(owner)
        for link, _, seconds in transfers:
            last = self._last[owner] = self._clock.submit(task, link, seconds, last)
        if staged:
            self._staging[self._turn] = last
            self._turn = (self._turn + 1) % STAGING_BUFFERS
        return last if transfers else None


class Walk:
    """One block on the way. `ends`: when each step's last compute ended; `busy` and `moved`: of its clock, by then."""

    def __init__(self, model: CostModel, steps: Sequence[int]) -> None:
        """`steps`: which step each step of the schedule stands for, and has the prices of."""
        self.clock = Clock(model.profile.slowdown)
        self.ends: list[float] = []
        self.busy: list[dict[str, float]] = []
        self.moved: list[dict[str, float]] = []
        self._model, self._steps, self._shape = model, steps, model.shape
        self._keys = [unit.weights for unit in model.spec.units]
        self._weights: dict[str, Job | None] = {}
        self._cache_ring, self._hidden_ring = _Ring(self.clock), _Ring(self.clock)
        self._caches, self._hidden = _Homes(self.clock), _Homes(self.clock)
        self._loads: dict[tuple[TaskKind, int, int], Job | None] = {}
        self._used: list[Place] = []
        self._late: dict[int, tuple[Task, Job]] = {}  # attention that the host is at, by GPU batch
        self._filled: dict[Place, Job] = {}  # prompts that the host brings into caches, the last of each
        self._filling: list[Job | None] = [None] * FILL_BUFFERS
        self._turn = 0
        self._issue: dict[TaskKind, Callable[[Task], None]] = {
            TaskKind.LOAD_WEIGHTS: self._load_weights,
            TaskKind.LOAD_CACHE: self._load_cache,
            TaskKind.STORE_CACHE: self._store_cache,
            TaskKind.LOAD_HIDDEN: self._load_hidden,
            TaskKind.STORE_HIDDEN: self._store_hidden,
        }

    def run(self, ticks: Iterable[Tick]) -> None:
        """To the last compute of `ticks`."""
        clock, overlap = self.clock, self._model.policy.overlap
        before: Task | None = None
        for tick in ticks:
            task = tick.compute
            if before is not None and (task is None or task.step != before.step):
                self._mark()
            if task is None:
                return
            for move in tick.stores:
                self._issue[move.kind](move)
                if not overlap:
                    clock.drain()
            for move in tick.loads:
                self._issue[move.kind](move)
                if not overlap:
                    clock.drain()
            self._compute(task)
            for free in tick.frees:
                self._keep(free)
                clock.wait(self._weights.pop(self._keys[free.unit]))
            before = task
        if before is not None:
            self._mark()

    def _mark(self) -> None:
        self.ends.append(self.clock.now)
        self.busy.append(self.clock.busy)
        self.moved.append(self.clock.moved)

    def _compute(self, task: Task) -> None:
        self._finish(task.batch)
        clock, key = self.clock, self._keys[task.unit]
        if key in self._shape.streamed:
            clock.wait(self._weights[key])
        self._wait_hidden(task)
        self._wait_cache(task)
        price = self._price(task)
        if not price.transfers:
            clock.compute(task, price.seconds)
        elif task.step == 0:
            self._fill(task, price)
        else:
            clock.compute(task, price.seconds - price.finish)
            down = price.transfers[0]
            queries = clock.submit(task, down.link, down.seconds)
            self._late[task.batch] = task, clock.submit(task, HOST_ATTENTION, price.host, queries)

    def _fill(self, task: Task, price: Price) -> None:
        """The prompts' attention, part by part, each of which the host brings into the cache: `HostAttention.fill`."""
        clock, start, place, parts = self.clock, self.clock.now, self._place(task), len(price.transfers)
        for move in price.transfers:
            clock.wait(self._filling[self._turn])
            clock.compute(None, price.seconds / parts)
            down = clock.submit(task, move.link, move.seconds)
            job = clock.submit(task, HOST_ATTENTION, price.host / parts, down)
            self._filling[self._turn] = self._filled[place] = job
            self._turn = (self._turn + 1) % FILL_BUFFERS
        clock.spans.append((task, start, clock.now, "compute"))

    def _finish(self, batch: int) -> None:
        """The second half of an attention unit that the host has attended for, if there is one: `HostAttention`."""
        if batch not in self._late:
            return
        task, attended = self._late.pop(batch)
        self.clock.wait(attended)
        price = self._price(task)
        up = price.transfers[-1]
        self.clock.carry(task, up.link, up.seconds)
        self.clock.compute(task, price.finish - up.seconds)

    def _keep(self, free: Task) -> None:
        key = self._keys[free.unit]
        if any(self._keys[task.unit] == key for task, _ in self._late.values()):
            self.clock.compute(None, self._price(free).seconds)

    def _load_weights(self, task: Task) -> None:
        job = None
        for link, _, seconds in self._price(task).transfers:
            job = self.clock.submit(task, link, seconds, job)
        self._weights[self._keys[task.unit]] = job

    def _load_cache(self, task: Task) -> None:
        self._take_cache_buffer()
        place = self._place(task)
        self._loads[TaskKind.LOAD_CACHE, *place] = self._caches.move(place, task, self._price(task))

    def _wait_cache(self, task: Task) -> None:
        place = self._place(task)
        if self._model.spec.units[task.unit].kind != "attn":
            return
        self.clock.wait(self._filled.pop(place, None))
        if place not in self._shape.cache_moves:
            return
        if task.step == 0:
            self._take_cache_buffer()
        else:
            self.clock.wait(self._loads.pop((TaskKind.LOAD_CACHE, *place)))
        self._used.append(place)

    def _store_cache(self, task: Task) -> None:
        place, price = self._place(task), self._price(task)
        self.clock.compute(None, price.seconds)
        self._used.remove(place)
        self._cache_ring.give_back(self._caches.move(place, task, price))

    def _take_cache_buffer(self) -> None:
        # What was used and has no store coming makes room: its store would be issued by now.
        for _ in self._used:
            self._cache_ring.give_back(None)
        self._used.clear()
        self._cache_ring.take()

    def _load_hidden(self, task: Task) -> None:
        if task.batch in self._late:
            return
        self._hidden_ring.take()
        self._loads[TaskKind.LOAD_HIDDEN, -1, task.batch] = self._hidden.move(task.batch, task, self._price(task))

    def _wait_hidden(self, task: Task) -> None:
        key = (TaskKind.LOAD_HIDDEN, -1, task.batch)
        if key in self._loads:
            self.clock.wait(self._loads.pop(key))
            self._hidden_ring.give_back(None)

    def _store_hidden(self, task: Task) -> None:
        if task.batch in self._late:
            return
        price = self._price(task)
        self._hidden_ring.take()
        self.clock.compute(None, price.seconds)
        self._hidden_ring.give_back(self._hidden.move(task.batch, task, price))

    def _price(self, task: Task) -> Price:
        # Weights may be read ahead for a step that is not simulated: their price is the same in all.
        return self._model.price(task, self._steps[min(task.step, len(self._steps) - 1)])

    def _place(self, task: Task) -> Place:
        return self._model.spec.units[task.unit].layer or 0, task.batch
