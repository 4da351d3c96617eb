"""Tickets that callers wait on, and queues of threads that move bytes. Knows nothing of files or tensors."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from h2o_flexgen.memory.cuda import Device

TraceCallback = Callable[[str, float, float, str], None]
"""(task, start, end, resource); times are `time.perf_counter` readings. Called on the worker threads."""

_IDLE = 0.5  # seconds between an idle worker's looks at whether the program has ended


class Operation(NamedTuple):
    """A part of a transfer that one thread does in one go."""

    run: Callable[[], None]
    nbytes: int


class Ticket:
    """One transfer under way. Made by the copy engine; any thread but the engine's own may wait.

    Its operations may run in any order, and in parallel; `finish` runs once after all went well. `after`: tickets that
    have to be done before. `seconds` is the time from its first byte to its last, checks included, once it is done.
    """

    on_device = False
    """Whether its operations queue work on a GPU: they start as soon as all of `after` is issued, and are not timed."""

    def __init__(
        self,
        label: str,
        link: str,
        nbytes: int,
        operations: Iterable[Operation] = (),
        after: tuple[Ticket, ...] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.label, self.link, self.nbytes = label, link, nbytes
        self.operations, self.after, self.finish = deque(operations), after, finish
        self.running, self.started, self.seconds = 0, 0.0, 0.0
        self.error: BaseException | None = None
        """The error; None when all went well."""
        self._finished = threading.Event()

    def wait(self) -> None:
        """Return once all bytes are there; raise what went wrong, every time. A signal may interrupt the wait."""
        self._finished.wait()
        if self.error is not None:
            raise self.error

    def wait_on_device(self, device: Device | None = None) -> None:
        """Work that is computed from now on finds the bytes there, or the source read. Raises what is known to be
        wrong.

        For a copy to or from a GPU the host waits only until it is queued, and the GPU's compute does the rest; any
        other transfer is waited for. To be called by the thread that computes. `device`: which GPU's compute is meant,
        if it is not the one that the copy was asked of.
        """
        self.wait()

    def wait_issued(self) -> None:
        self._finished.wait()

    def issued(self) -> bool:
        """Whether no thread has anything left to do for it, well or not: a GPU may still be copying."""
        return self._finished.is_set()

    def resolve(self, error: BaseException | None) -> None:
        """Called once, by the engine that carries out the transfer. Releases the tickets before it and its buffers."""
        self.error, self.after, self.finish = error, (), None
        self.operations.clear()
        self._finished.set()


@dataclass
class WorkQueue:
    """Transfers that use the same resource, and the threads that take them."""

    wake: threading.Condition
    tickets: deque[Ticket] = field(default_factory=deque)
    threads: list[threading.Thread] = field(default_factory=list)


class LinkMeters:
    """Bytes moved per link, and the seconds in which at least one operation was running on it. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved, self._busy = Counter[str](), dict[str, float]()
        self._active, self._since = Counter[str](), dict[str, float]()

    def start(self, link: str, now: float) -> None:
        with self._lock:
            if not self._active[link]:
                self._since[link] = now
            self._active[link] += 1

    def stop(self, link: str, now: float, nbytes: int) -> None:
        with self._lock:
            self._active[link] -= 1
            self._add(link, nbytes, 0.0 if self._active[link] else now - self._since[link])

    def add(self, link: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._add(link, nbytes, seconds)

    def read(self) -> tuple[Counter[str], dict[str, float]]:
        """(bytes moved, busy seconds) per link, operations that are still running left out."""
        with self._lock:
            return Counter(self._moved), dict(self._busy)

    def _add(self, link: str, nbytes: int, seconds: float) -> None:
        self._moved[link] += nbytes
        self._busy[link] = self._busy.get(link, 0.0) + seconds


class Workers:
    """Carries out transfers on queues of threads, started when first needed and joined by `close`.

    A queue prefers earlier tickets. It passes over a ticket whose `after` is not issued; a ticket fails if its `after`
    fails. A thread waits for copies of `after` that a GPU has not finished. A ticket is done only when none of its
    operations runs, so its buffer is the caller's again even after an error.
    """

    def __init__(self, meters: LinkMeters, trace: TraceCallback | None = None) -> None:
        self._meters, self._trace = meters, trace
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queues: dict[str, WorkQueue] = {}
        self._pending = 0
        self._closing = False

    def submit(self, name: str, ticket: Ticket, threads: int = 1) -> Ticket:
        """Put `ticket` in the queue called `name`, of up to `threads` threads. RuntimeError after `close`."""
        if not ticket.operations:  # an empty transfer still resolves its ticket
            ticket.operations.append(Operation(lambda: None, 0))
        with self._lock:
            if self._closing:
                raise RuntimeError(f"the copy engine is closed: {ticket.label} cannot start")
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = WorkQueue(threading.Condition(self._lock))
            if len(queue.threads) < threads:
                thread = threading.Thread(target=self._work, args=(queue,), name=f"h2o-{name}-{len(queue.threads)}")
                queue.threads.append(thread)  # first, so that `close` joins it even if a signal interrupts the start
                thread.start()
            self._pending += 1
            queue.tickets.append(ticket)
            queue.wake.notify(len(ticket.operations))
        return ticket

    def drain(self) -> None:
        """Wait until nothing is under way. Errors stay with their tickets."""
        with self._lock:
            while self._pending:
                self._idle.wait()

    def close(self) -> None:
        """Drop what has not started, let running operations end, join every thread. May be called again."""
        with self._lock:
            self._closing = True
            self._drop_all()
            threads = [thread for queue in self._queues.values() for thread in queue.threads]
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def abandon(self) -> None:
        """Nobody will `submit` any more: idle threads end on their own. Without the lock, which a thread may hold while
        it collects garbage."""
        self._closing = True

    def _work(self, queue: WorkQueue) -> None:
        while (claim := self._claim(queue)) is not None:
            (ticket, operation), error = claim, None
            try:
                for before in () if ticket.on_device else ticket.after:
                    before.wait()
                operation.run()
            except BaseException as caught:
                error = caught
            if self._settle(queue, ticket, operation, error):
                self._finish(ticket)
            del claim, ticket, operation, error  # a thread that waits for work keeps no buffer alive

    def _claim(self, queue: WorkQueue) -> tuple[Ticket, Operation] | None:
        """The next operation for a thread of `queue`; waits for one. None when the thread must end."""
        with self._lock:
            while not self._closing:
                ticket = self._next_ticket(queue)
                if ticket is None:
                    queue.wake.wait(_IDLE)
                    if not threading.main_thread().is_alive():  # nobody closed us, and the interpreter waits for us
                        self._closing = True
                        self._drop_all()
                    continue
                now = time.perf_counter()
                ticket.started = ticket.started or now
                if not ticket.on_device:
                    self._meters.start(ticket.link, now)
                ticket.running += 1
                operation = ticket.operations.popleft()
                if not ticket.operations:
                    queue.tickets.remove(ticket)
                return ticket, operation
        return None

    def _next_ticket(self, queue: WorkQueue) -> Ticket | None:
        for ticket in tuple(queue.tickets):
            if all(before.issued() for before in ticket.after):
                error = next((before.error for before in ticket.after if before.error is not None), None)
                if error is None:
                    return ticket
                queue.tickets.remove(ticket)
                self._complete(ticket, error)
        return None

    def _settle(self, queue: WorkQueue, ticket: Ticket, operation: Operation, error: BaseException | None) -> bool:
        """Book an operation that ended; True if it was the last of its ticket."""
        with self._lock:
            if not ticket.on_device:
                self._meters.stop(ticket.link, time.perf_counter(), 0 if error else operation.nbytes)
            ticket.running -= 1
            if error is not None:
                ticket.error = ticket.error or error
                if ticket.operations:
                    ticket.operations.clear()
                    queue.tickets.remove(ticket)
            return not ticket.operations and not ticket.running

    def _finish(self, ticket: Ticket) -> None:
        try:
            if ticket.error is None and ticket.finish is not None:
                ticket.finish()
            if not ticket.on_device:
                ticket.seconds = time.perf_counter() - ticket.started
                if self._trace is not None:
                    self._trace(ticket.label, ticket.started, ticket.started + ticket.seconds, ticket.link)
        except BaseException as error:
            ticket.error = ticket.error or error
        with self._lock:
            self._complete(ticket, ticket.error)

    def _complete(self, ticket: Ticket, error: BaseException | None) -> None:
        """Resolve the ticket and wake the threads whose transfers may start now. The lock is held."""
        ticket.resolve(error)
        self._pending -= 1
        if not self._pending:
            self._idle.notify_all()
        for queue in self._queues.values():
            if queue.tickets:
                queue.wake.notify_all()

    def _drop_all(self) -> None:
        """Fail every ticket that still has unstarted operations; tickets with running ones resolve when these end."""
        for queue in self._queues.values():
            tickets, queue.tickets = queue.tickets, deque()
            for ticket in tickets:
                ticket.error = ticket.error or RuntimeError(f"{ticket.label}: dropped, the copy engine was closed")
                ticket.operations.clear()
                if not ticket.running:
                    self._complete(ticket, ticket.error)
            queue.wake.notify_all()
