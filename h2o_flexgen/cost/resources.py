"""Links and the computing thread on one clock: who works when, and how much they slow each other down."""

from __future__ import annotations

import math
from collections.abc import Mapping

from h2o_flexgen.schedule.tasks import Task

Span = tuple[Task, float, float, str]
"""(task, start, end, resource), in seconds."""

_DONE = 1e-12  # seconds: less than that is left over by rounding alone


class _Link:
    """A queue of jobs, in the order in which they were asked for. `bit`: of the link in sets of links."""

    __slots__ = ("bit", "busy", "moved", "name", "queue")

    def __init__(self, name: str, bit: int) -> None:
        self.name, self.bit = name, bit
        self.queue: list[Job] = []
        self.busy = self.moved = 0.0


class Job:
    """One transfer over one link. `left`: seconds of it that remain, while nothing else runs."""

    __slots__ = ("after", "done", "left", "link", "started", "task")

    def __init__(self, task: Task, link: _Link, seconds: float, after: Job | None) -> None:
        self.task, self.link, self.left, self.after = task, link, seconds, after
        self.done, self.started = False, -1.0


class Clock:
    """Time passes while the computing thread computes or waits; links work through their queues meanwhile.

    A link takes its earliest job whose predecessor (`after`) is done, and drops it for an earlier one that becomes
    ready, as the copy threads do piece by piece. Everything that is busy goes on at a rate that depends on what else
    is: `slowdown[a][b]` of a HardwareProfile.
    """

    def __init__(self, slowdown: Mapping[str, Mapping[str, float]]) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self._slowdown = slowdown
        self._links: dict[str, _Link] = {}
        self._computed = 0.0
        self._running: list[Job] | None = []
        self._factors: tuple[list[float], list[float]] = ([], [1.0])
        """How many times as long each of `_running` takes, alone and beside computing; the latter's own comes last."""
        self._known: dict[int, tuple[list[float], list[float]]] = {}
        """The same by the set of links that are running."""
        self._held: _Link | None = None

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of each resource."""
        return {**{name: link.busy for name, link in self._links.items()}, "compute": self._computed}

    @property
    def moved(self) -> dict[str, float]:
        """What of its jobs is done by a link, in seconds that it takes alone."""
        return {name: link.moved for name, link in self._links.items()}

    def submit(self, task: Task, link: str, seconds: float, after: Job | None = None) -> Job:
        """Queue a transfer that starts once `after` is done."""
        there = self._link(link)
        job = Job(task, there, seconds, after if after is not None and not after.done else None)
        there.queue.append(job)
        self._running = None
        return job

    def compute(self, task: Task | None, seconds: float) -> None:
        """The computing thread works for `seconds`, or longer where links slow it down; without a task unrecorded."""
        start = self.now
        while seconds > _DONE:
            seconds -= self._pass(seconds)
        self._computed += self.now - start
        if task is not None:
            self.spans.append((task, start, self.now, "compute"))

    def carry(self, task: Task, link: str, seconds: float) -> None:
        """The computing thread takes something over `link` itself, and what is queued there stands still meanwhile."""
        start, held = self.now, self._link(link)
        self._held, self._running = held, None
        held.moved += seconds
        while seconds > _DONE:
            seconds -= self._pass(seconds)
        self._held, self._running = None, None
        self._computed += self.now - start
        held.busy += self.now - start
        self.spans.append((task, start, self.now, link))

    def wait(self, job: Job | None) -> None:
        """The computing thread idles until `job` is done."""
        while job is not None and not job.done:
            self._pass(None)

    def drain(self) -> None:
        """The computing thread idles until every link does."""
        while any(link.queue for link in self._links.values()):
            self._pass(None)

    def _link(self, name: str) -> _Link:
        if name not in self._links:
            self._links[name] = _Link(name, 1 << len(self._links))
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
            if job.left * factor < elapsed:
                elapsed = job.left * factor
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
        """What each link works on from now, and how much they disturb each other."""
        running, links = [], 0
        for link in self._links.values():
            if link is self._held:
                continue
            for job in link.queue:
                if job.after is None or job.after.done:
                    if job.started < 0:
                        job.started = self.now
                    running.append(job)
                    links |= link.bit
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

    def _end(self, job: Job) -> None:
        job.done = True
        job.after = None
        job.link.queue.remove(job)
        self._running = None
        self.spans.append((job.task, job.started, self.now, job.link.name))
