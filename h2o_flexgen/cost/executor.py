"""Walks the ticks of a schedule as the executor does, on a clock instead of a machine.

It waits as `engine.execution.executor`, `engine.state.weights`, `engine.state.kv_store`, `engine.state.backing` and
`engine.execution.host_attention` do, in the same order: for loads of weights, caches and hidden states, buffers whose
last store is still under way, staging buffers between a GPU and the disk, and attention on the host. Change them
together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from h2o_flexgen.cost.model import CostModel, Price
from h2o_flexgen.schedule.footprint import STAGING_BUFFERS, STATE_BUFFERS
from h2o_flexgen.schedule.tasks import Task, TaskKind, Tick
from h2o_flexgen.schedule.workspace import FILL_BUFFERS, HOST_ATTENTION

Place = tuple[int, int]  # (layer, batch index)
Span = tuple[Task, float, float, str]
"""(task, start, end, resource), in seconds."""

_DONE = 1e-12  # seconds: less than that is left over by rounding alone


class _LinkQueue:
    """A queue of jobs, in the order in which they were asked for. `bit`: of the link in sets of links; `works`: whether
    it was at one of them when the clock last looked around."""

    __slots__ = ("bit", "busy", "moved", "name", "queue", "works")

    def __init__(self, name: str, bit: int) -> None:
        self.name, self.bit, self.works = name, bit, False
        self.queue: list[LinkJob] = []
        self.busy = self.moved = 0.0


class LinkJob:
    """One transfer over one link. `left`: seconds of it that remain, while nothing else runs."""

    __slots__ = ("after", "done", "left", "link", "started", "task")

    def __init__(self, task: Task, link: _LinkQueue, seconds: float, after: LinkJob | None) -> None:
        self.task, self.link, self.left, self.after = task, link, seconds, after
        self.done, self.started = False, -1.0


class SimulatedClock:
    """Time passes while the computing thread computes or waits; links work through their queues meanwhile.

    A link takes its earliest job whose predecessor (`after`) is done, and drops it for an earlier one that becomes
    ready, as the copy threads do piece by piece. Everything that is busy goes on at a rate that depends on what else
    is: `slowdown[a][b]` of a HardwareProfile.
    """

    def __init__(self, slowdown: Mapping[str, Mapping[str, float]], *, trace: bool = True) -> None:
        """trace: whether to keep `spans`, which a search of many plans has no use for."""
        self.now = 0.0
        self.spans: list[Span] = []
        self._trace = trace
        self._slowdown = slowdown
        self._links: dict[str, _LinkQueue] = {}
        self._computed = 0.0
        self._running: list[LinkJob] | None = []
        self._factors: tuple[list[float], list[float]] = ([], [1.0])
        """How many times as long each of `_running` takes, alone and beside computing; the latter's own comes last."""
        self._known: dict[int, tuple[list[float], list[float]]] = {}
        """The same by the set of links that are running."""
        self._held: _LinkQueue | None = None

    @property
    def busy(self) -> dict[str, float]:
        return {**{name: link.busy for name, link in self._links.items()}, "compute": self._computed}

    @property
    def moved(self) -> dict[str, float]:
        """The part of its jobs that a link has done, in seconds that it takes alone."""
        return {name: link.moved for name, link in self._links.items()}

    def submit(self, task: Task, link: str, seconds: float, after: LinkJob | None = None) -> LinkJob:
        """Queue a transfer that starts once `after` is done."""
        there = self._link(link)
        job = LinkJob(task, there, seconds, after if after is not None and not after.done else None)
        there.queue.append(job)
        if job.after is None and not there.works:  # else the links go on with what they are at
            self._running = None
        return job

    def compute(self, task: Task | None, seconds: float) -> None:
        """The computing thread works for `seconds`, or longer where links slow it down; without a task unrecorded."""
        start = self.now
        while seconds > _DONE:
            seconds -= self._pass(seconds)
        self._computed += self.now - start
        if task is not None:
            self.note(task, start, "compute")

    def carry(self, task: Task, link: str, seconds: float) -> None:
        """The computing thread takes something over `link` itself, and what is queued there stands still meanwhile."""
        start, held = self.now, self._link(link)
        self._held, self._running = held, None
        self.compute(None, seconds)
        self._held, self._running = None, None
        held.moved += seconds
        held.busy += self.now - start
        self.note(task, start, link)

    def note(self, task: Task, start: float, resource: str) -> None:
        """Keep that `task` ran on `resource` from `start` until now."""
        if self._trace:
            self.spans.append((task, start, self.now, resource))

    def wait(self, job: LinkJob | None) -> None:
        """The computing thread idles until `job` is done."""
        while job is not None and not job.done:
            self._pass(None)

    def drain(self) -> None:
        """The computing thread idles until every link does."""
        while any(link.queue for link in self._links.values()):
            self._pass(None)

    def _link(self, name: str) -> _LinkQueue:
        if name not in self._links:
            self._links[name] = _LinkQueue(name, 1 << len(self._links))
        return self._links[name]

    def _pass(self, work: float | None) -> float:
        """Let time pass until some transfer ends or `work` seconds of computing are done; returns the seconds of it."""
        if self._running is None:
            self._look_around()
        running, factors = self._running or (), self._factors[work is not None]
        if work is None and not running:
            raise RuntimeError("the computing thread waits for a transfer that can never start")
        elapsed = math.inf if work is None else work * factors[-1]
        for job, factor in zip(running, factors, strict=False):
            needed = job.left * factor
            if needed < elapsed:
                elapsed = needed
        self.now += elapsed
        for job, factor in zip(running, factors, strict=False):
            alone, link = elapsed / factor, job.link
            link.busy += elapsed
            link.moved += alone
            job.left -= alone
            if job.left <= _DONE:
                self._end(job)
        return 0.0 if work is None else elapsed / factors[-1]

    def _look_around(self) -> None:
        """Find out which job each link works on from now, and how much they disturb each other."""
        running, links = [], 0
        for link in self._links.values():
            link.works = False
            if link is self._held:
                continue
            for job in link.queue:
                if job.after is None or job.after.done:
                    if job.started < 0:
                        job.started = self.now
                    running.append(job)
                    links |= link.bit
                    link.works = True
                    break
        if links not in self._known:
            names = [job.link.name for job in running]
            self._known[links] = (self._disturbed(names), self._disturbed([*names, "compute"]))
        self._running, self._factors = running, self._known[links]

    def _disturbed(self, names: list[str]) -> list[float]:
        """How many times as long each of `names` takes beside the others."""
        slowed = (
            [self._slowdown.get(name, {}).get(beside, 1.0) for beside in names if beside != name] for name in names
        )
        return [math.prod(factors) for factors in slowed]

    def _end(self, job: LinkJob) -> None:
        job.done = True
        job.after = None
        job.link.queue.remove(job)
        self._running = None
        self.note(job.task, job.started, job.link.name)


class _SimulatedParking:
    """The `Parking` of one kind of state: transfer buffers on the compute tier, of which counting is enough as all are
    alike, and the staging buffers that its stores share. `loading`: the loads under way, by owner."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock, self._free = clock, STATE_BUFFERS
        self._saving: list[LinkJob] = []
        self._last: dict[object, LinkJob] = {}
        self._staging = deque[LinkJob | None]([None] * STAGING_BUFFERS, STAGING_BUFFERS)
        self.loading: dict[object, LinkJob | None] = {}

    def take(self) -> None:
        if self._free:
            self._free -= 1
        else:
            self._clock.wait(self._saving.pop(0))

    def give_back(self, after: LinkJob | None = None) -> None:
        if after is None:
            self._free += 1
        else:
            self._saving.append(after)

    def load(self, owner: object, task: Task, price: Price) -> None:
        self.take()
        self.loading[owner] = self._move(owner, task, price)

    def save(self, owner: object, task: Task, price: Price) -> None:
        """Store from a buffer that was taken."""
        self.give_back(self._move(owner, task, price))

    def _move(self, owner: object, task: Task, price: Price) -> LinkJob | None:
        """Queue the transfers of `task` behind the last ones of `owner`; the last of them, None without any."""
        transfers = price.transfers
        staged = len(transfers) > 1
        if staged:
            self._clock.wait(self._staging[0])
        last = self._last.get(owner)
        for link, _, seconds in transfers:
            last = self._last[owner] = self._clock.submit(task, link, seconds, last)
        if staged:
            self._staging.append(last)
        return last if transfers else None


class SimulatedExecutor:
    """One block on the way. `ends`: when each step's last compute ended, and its clock's `busy` and `moved` then."""

    def __init__(self, model: CostModel, steps: Sequence[int], *, trace: bool) -> None:
        """`steps`: which step each step of the schedule stands for, and has the prices of; `trace`: of the clock."""
        self.clock = SimulatedClock(model.machine.slowdown, trace=trace)
        self.ends: list[tuple[float, dict[str, float], dict[str, float]]] = []
        self._model, self._steps, self._shape = model, steps, model.shape
        self._key = model.moves.key
        self._weights: dict[str, LinkJob | None] = {}
        self._caches, self._hidden = _SimulatedParking(self.clock), _SimulatedParking(self.clock)
        self._used: list[Place] = []
        self._late: dict[int, tuple[Task, LinkJob]] = {}  # attention that the host is at, by GPU batch
        self._filled: dict[Place, LinkJob] = {}  # prompts that the host brings into caches, the last of each
        self._filling = deque[LinkJob | None]([None] * FILL_BUFFERS, FILL_BUFFERS)
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
        computing = ((tick, tick.compute) for tick in ticks if tick.compute is not None)
        for _, of_step in groupby(computing, key=lambda each: each[1].step):
            for tick, task in of_step:
                for move in (*tick.stores, *tick.loads):
                    self._issue[move.kind](move)
                    if not overlap:
                        clock.drain()
                self._compute(task)
                for free in tick.frees:
                    self._keep(free)
                    clock.wait(self._weights.pop(self._key(free)))
            self.ends.append((clock.now, clock.busy, clock.moved))

    def _compute(self, task: Task) -> None:
        self._finish(task.batch)
        clock, unit = self.clock, self._model.spec.units[task.unit]
        for key in [unit.experts[expert] for expert in task.experts] or [unit.weights]:
            if key in self._shape.streamed:
                clock.wait(self._weights[key])
        if task.experts:
            clock.compute(task, self._price(task).seconds)
            return
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
            clock.wait(self._filling[0])
            clock.compute(None, price.seconds / parts)
            down = clock.submit(task, move.link, move.seconds)
            job = clock.submit(task, HOST_ATTENTION, price.host / parts, down)
            self._filling.append(job)
            self._filled[place] = job
        clock.note(task, start, "compute")

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
        key = self._key(free)
        if any(self._key(task) == key for task, _ in self._late.values()):
            self.clock.compute(None, self._price(free).seconds)

    def _load_weights(self, task: Task) -> None:
        job = None
        for link, _, seconds in self._price(task).transfers:
            job = self.clock.submit(task, link, seconds, job)
        self._weights[self._key(task)] = job

    def _load_cache(self, task: Task) -> None:
        self._free_used()
        self._caches.load(self._place(task), task, self._price(task))

    def _wait_cache(self, task: Task) -> None:
        place = self._place(task)
        if self._model.spec.units[task.unit].kind != "attn":
            return
        self.clock.wait(self._filled.pop(place, None))
        if place not in self._shape.cache_moves:
            return
        if task.step == 0:
            self._free_used()
            self._caches.take()
        else:
            self.clock.wait(self._caches.loading.pop(place))
        self._used.append(place)

    def _store_cache(self, task: Task) -> None:
        place, price = self._place(task), self._price(task)
        self.clock.compute(None, price.seconds)
        self._used.remove(place)
        self._caches.save(place, task, price)

    def _free_used(self) -> None:
        # Used buffers that have no store to come are free: their stores would be issued by now.
        for _ in self._used:
            self._caches.give_back()
        self._used.clear()

    def _load_hidden(self, task: Task) -> None:
        if task.batch not in self._late:
            self._hidden.load(task.batch, task, self._price(task))

    def _wait_hidden(self, task: Task) -> None:
        if task.batch in self._hidden.loading:
            self.clock.wait(self._hidden.loading.pop(task.batch))
            self._hidden.give_back()

    def _store_hidden(self, task: Task) -> None:
        if task.batch in self._late:
            return
        price = self._price(task)
        self._hidden.take()
        self.clock.compute(None, price.seconds)
        self._hidden.save(task.batch, task, price)

    def _price(self, task: Task) -> Price:
        # Weights may be read ahead for a step that is not simulated: their price is the same in all.
        return self._model.price(task, self._steps[min(task.step, len(self._steps) - 1)])

    def _place(self, task: Task) -> Place:
        return self._model.spec.units[task.unit].layer or 0, task.batch
