"""Threads that move bytes. Knows nothing of files or tensors."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from h2o_flexgen.memory.jobs import Job, Piece, Ticket, TraceCallback

_IDLE = 0.5  # seconds between an idle worker's looks at whether the program has ended


@dataclass
class _Lane:
    """Threads that share a queue of jobs: jobs of one lane use the same resource."""

    name: str
    size: int
    wake: threading.Condition
    jobs: deque[Job] = field(default_factory=deque)
    threads: list[threading.Thread] = field(default_factory=list)


@dataclass
class _Meter:
    """Bytes over one link, and the seconds in which at least one piece was running on it."""

    nbytes: int = 0
    seconds: float = 0.0
    active: int = 0
    since: float = 0.0

    def start(self, now: float) -> None:
        """A piece starts."""
        if self.active == 0:
            self.since = now
        self.active += 1

    def stop(self, now: float, nbytes: int) -> None:
        """A piece ends that moved `nbytes`."""
        self.active -= 1
        if self.active == 0:
            self.seconds += now - self.since
        self.nbytes += nbytes


class _Claim(NamedTuple):
    job: Job
    piece: Piece


class Workers:
    """Runs jobs on lanes of threads, started when first needed and joined by `close`.

    A lane prefers earlier jobs; one whose `after` is not issued is passed over, and fails if that fails. For what a GPU
    is still copying the thread waits. A ticket is done only when none of its pieces runs, so that its buffer is the
    caller's again even after an error.
    """

    def __init__(self, trace: TraceCallback | None = None) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._lanes: dict[str, _Lane] = {}
        self._meters: dict[str, _Meter] = {}
        self._pending = 0
        self._closing = False

    def submit(self, lane_name: str, job: Job, threads: int = 1) -> Ticket:
        """Queue `job` on a lane of up to `threads` threads. RuntimeError after `close`."""
        with self._lock:
            if self._closing:
                raise RuntimeError(f"the copy engine is closed: {job.ticket.label} cannot start")
            lane = self._lanes.get(lane_name)
            if lane is None:
                lane = self._lanes[lane_name] = _Lane(lane_name, threads, threading.Condition(self._lock))
            if len(lane.threads) < lane.size:
                name = f"h2o-{lane_name}-{len(lane.threads)}"
                thread = threading.Thread(target=self._work, args=(lane,), name=name)
                lane.threads.append(thread)  # first, so that `close` joins it even if a signal interrupts the start
                thread.start()
            if not job.on_device:
                self._meters.setdefault(job.ticket.link, _Meter())
            self._pending += 1
            lane.jobs.append(job)
            lane.wake.notify(max(1, len(job.pieces)))
        return job.ticket

    def drain(self) -> None:
        """Wait until nothing is under way. Errors stay with their tickets."""
        with self._lock:
            while self._pending:
                self._idle.wait()

    def close(self) -> None:
        """Drop what has not started, let running pieces end, join every thread. May be called again."""
        with self._lock:
            self._closing = True
            self._drop_all()
            threads = [thread for lane in self._lanes.values() for thread in lane.threads]
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def meters(self) -> tuple[Counter[str], dict[str, float]]:
        """(bytes moved, busy seconds) per link, pieces that are still running left out."""
        with self._lock:
            moved = Counter({link: meter.nbytes for link, meter in self._meters.items()})
            return moved, {link: meter.seconds for link, meter in self._meters.items()}

    def _work(self, lane: _Lane) -> None:
        while True:
            claim = self._claim(lane)
            if claim is None:
                return
            error: BaseException | None = None
            try:
                for before in () if claim.job.on_device else claim.job.after:
                    before.wait()
                claim.piece.run()
            except BaseException as caught:
                error = caught
            if self._settle(lane, claim, error):
                self._finish(claim.job)
            del claim, error

    def _claim(self, lane: _Lane) -> _Claim | None:
        """The next piece for a thread of `lane`; waits for one. None when the thread must end."""
        with self._lock:
            while not self._closing:
                job = self._next_job(lane)
                if job is None:
                    lane.wake.wait(_IDLE)
                    if not threading.main_thread().is_alive():  # nobody closed us, and the interpreter waits for us
                        self._closing = True
                        self._drop_all()
                    continue
                now = time.perf_counter()
                job.started = job.started or now
                if not job.on_device:
                    self._meters[job.ticket.link].start(now)
                job.running += 1
                piece = job.pieces.popleft()
                if not job.pieces:
                    lane.jobs.remove(job)
                return _Claim(job, piece)
        return None

    def _next_job(self, lane: _Lane) -> Job | None:
        for job in tuple(lane.jobs):
            if all(before.issued() for before in job.after):
                error = next((before.error for before in job.after if before.error is not None), None)
                if error is None:
                    return job
                lane.jobs.remove(job)
                self._complete(job, error)
        return None

    def _settle(self, lane: _Lane, claim: _Claim, error: BaseException | None) -> bool:
        """Book a piece that ended; True if it was the last of its job."""
        job, piece = claim
        with self._lock:
            if not job.on_device:
                self._meters[job.ticket.link].stop(time.perf_counter(), 0 if error else piece.nbytes)
            job.running -= 1
            if error is not None:
                job.error = job.error or error
                if job.pieces:
                    job.pieces.clear()
                    lane.jobs.remove(job)
            return not job.pieces and not job.running

    def _finish(self, job: Job) -> None:
        try:
            if job.error is None and job.finish is not None:
                job.finish()
            if not job.on_device:
                job.ticket.seconds = time.perf_counter() - job.started
                if self._trace is not None:
                    self._trace(job.ticket.label, job.started, job.started + job.ticket.seconds, job.ticket.link)
        except BaseException as error:
            job.error = job.error or error
        with self._lock:
            self._complete(job, job.error)

    def _complete(self, job: Job, error: BaseException | None) -> None:
        """Resolve the ticket and wake whoever may go on now. The lock is held."""
        job.finish, job.after = None, ()
        job.ticket.resolve(error)
        self._pending -= 1
        if not self._pending:
            self._idle.notify_all()
        for lane in self._lanes.values():
            if lane.jobs:
                lane.wake.notify_all()

    def _drop_all(self) -> None:
        """Fail every job that still has unstarted pieces; those with running ones resolve when these end."""
        for lane in self._lanes.values():
            jobs, lane.jobs = lane.jobs, deque()
            for job in jobs:
                job.error = job.error or RuntimeError(f"{job.ticket.label}: dropped, the copy engine was closed")
                job.pieces.clear()
                if not job.running:
                    self._complete(job, job.error)
            lane.wake.notify_all()
