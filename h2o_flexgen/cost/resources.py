"""Links and the computing thread on one clock: who works when, and how much they slow each other down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from h2o_flexgen.schedule.tasks import Task

Span = tuple[Task, float, float, str]
"""(task, start, end, resource), in seconds."""

_DONE = 1e-12  # seconds: less than that is left over by rounding alone


class Job:
    """One transfer over one link. `left`: seconds of it that remain, while nothing else runs."""

    __slots__ = ("after", "done", "left", "link", "started", "task")

    def __init__(self, task: Task, link: str, seconds: float, after: Job | None) -> None:
        self.task, self.link, self.left, self.after = task, link, seconds, after
        self.done, self.started = False, -1.0


class Clock:
    """Time passes while the computing thread computes or waits; links work through their queues meanwhile.

    A link takes its earliest job whose predecessor (`after`) is done, and drops it for an earlier one that becomes
    ready, as the copy threads do piece by piece. Everything that is busy goes on at a rate that depends on what else
    is: `slowdown[a][b]` of a HardwareProfile. `busy`: seconds of each resource; `moved`: what of its jobs is done by a
    link, in seconds that it takes alone.
    """

    def __init__(self, slowdown: Mapping[str, Mapping[str, float]]) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.moved: defaultdict[str, float] = defaultdict(float)
        self._slowdown = slowdown
        self._queues: dict[str, list[Job]] = {}
        self._running: list[Job] | None = []
        self._held = ""
        self._factors: dict[tuple[str, ...], list[float]] = {}

    def submit(self, task: Task, link: str, seconds: float, after: Job | None = None) -> Job:
        """Queue a transfer that starts once `after` is done."""
        job = Job(task, link, seconds, after if after is not None and not after.done else None)
        self._queues.setdefault(link, []).append(job)
        self._running = None
        return job

    def compute(self, task: Task | None, seconds: float) -> None:
        """The computing thread works for `seconds`, or longer where links slow it down; without a task unrecorded."""
        start = self.now
        while seconds > _DONE:
            seconds -= self._pass(seconds)
        self.busy["compute"] += self.now - start
        if task is not None:
            self.spans.append((task, start, self.now, "compute"))

    def carry(self, task: Task, link: str, seconds: float) -> None:
        """The computing thread takes something over `link` itself, and what is queued there stands still meanwhile."""
        start, alone = self.now, seconds
        self._held, self._running = link, None
        while seconds > _DONE:
            seconds -= self._pass(seconds)
        self._held, self._running = "", None
        self.moved[link] += alone
        self.busy["compute"] += self.now - start
        self.busy[link] += self.now - start
        self.spans.append((task, start, self.now, link))

    def wait(self, job: Job | None) -> None:
        """The computing thread idles until `job` is done."""
        while job is not None and not job.done:
            self._pass(None)

    def drain(self) -> None:
        """The computing thread idles until every link does."""
        while any(self._queues.values()):
            self._pass(None)

    def _pass(self, work: float | None) -> float:
        """Let time pass until some transfer ends or `work` seconds of computing are done; returns the seconds of it."""
        running = self._running
        if running is None:
            running = self._running = self._ready()
        if not running:
            if work is None:
                raise RuntimeError("the computing thread waits for a transfer that can never start")
            self.now += work
            return work
        factors = self._rates(running, work is not None)
        elapsed = min([job.left * factor for job, factor in zip(running, factors, strict=False)])
        done = 0.0
        if work is not None:
            elapsed = min(elapsed, work * factors[-1])
            done = elapsed / factors[-1]
        self.now += elapsed
        for job, factor in zip(running, factors, strict=False):
            self.busy[job.link] += elapsed
            self.moved[job.link] += elapsed / factor
            job.left -= elapsed / factor
            if job.left <= _DONE:
                self._end(job)
        return done

    def _ready(self) -> list[Job]:
        """What each link works on from now."""
        running = []
        for link, queue in self._queues.items():
            for job in queue if link != self._held else ():
                if job.after is None or job.after.done:
                    if job.started < 0:
                        job.started = self.now
                    running.append(job)
                    break
        return running

    def _rates(self, running: list[Job], computing: bool) -> list[float]:
        """How many times as long each of `running` takes, and last the computing thread."""
        names = (*(job.link for job in running), *(("compute",) if computing else ()))
        factors = self._factors.get(names)
        if factors is None:
            factors = []
            for name in (*names, "compute"):
                factor = 1.0
                for beside in names:
                    factor *= self._slowdown.get(name, {}).get(beside, 1.0) if beside != name else 1.0
                factors.append(factor)
            self._factors[names] = factors
        return factors

    def _end(self, job: Job) -> None:
        job.done = True
        job.after = None
        self._queues[job.link].remove(job)
        self._running = None
        self.spans.append((job.task, job.started, self.now, job.link))
