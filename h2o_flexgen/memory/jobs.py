"""What threads that move bytes are given, and the tickets that callers wait on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from h2o_flexgen.memory.cuda import Device

TraceCallback = Callable[[str, float, float, str], None]
"""(task, start, end, resource); times are `time.perf_counter` readings. Called on the worker threads."""


class Ticket:
    """One transfer under way. Made by the copy engine; any thread but the engine's own may wait.

    `seconds` is the time from its first byte to its last, checks included, once it is done.
    """

    def __init__(self, label: str, link: str, nbytes: int) -> None:
        self.label, self.link, self.nbytes = label, link, nbytes
        self.seconds = 0.0
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def wait(self, timeout: float | None = None) -> None:
        """Return once all bytes are there; raise what went wrong, every time. A signal may interrupt the wait.

        TimeoutError after `timeout` seconds; the transfer goes on.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.label} ({self.link}) is still under way after {timeout} s")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """True once nothing of it is running any more, whether it went well or not."""
        return self._finished.is_set()

    def wait_on_device(self, device: Device | None = None) -> None:
        """What is computed from now on finds the bytes there, or the source read. Raises what is known to be wrong.

        For a copy to or from a GPU the host waits only until it is queued, and the GPU's compute does the rest; any
        other transfer is waited for. To be called by the thread that computes. `device`: which GPU's compute is meant,
        if it is not the one that the copy was asked of.
        """
        self.wait()

    def wait_issued(self) -> None:
        """Return once `issued`."""
        self._finished.wait()

    def issued(self) -> bool:
        """Whether no thread has anything left to do for it, well or not: a GPU may still be copying."""
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        """What went wrong, None while under way or when all went well."""
        return self._error

    def resolve(self, error: BaseException | None) -> None:
        """Called once, by the workers."""
        self._error = error
        self._finished.set()


class Piece(NamedTuple):
    """Work that one thread does in one go."""

    run: Callable[[], None]
    nbytes: int


@dataclass(eq=False)
class Job:
    """A ticket's pieces. They may run in any order, and in parallel; `finish` runs once after all went well.

    `after`: what has to be done before. With `on_device` the pieces queue work on a GPU, whose order and books are not
    kept here: they start as soon as all of `after` is issued.
    """

    ticket: Ticket
    pieces: deque[Piece]
    after: tuple[Ticket, ...] = ()
    finish: Callable[[], None] | None = None
    on_device: bool = False
    running: int = 0
    started: float = 0.0
    error: BaseException | None = None


def one_piece(run: Callable[[], None], nbytes: int) -> deque[Piece]:
    """A job that cannot be cut."""
    return deque((Piece(run, nbytes),))


def many_pieces(pieces: Iterable[Piece]) -> deque[Piece]:
    """Pieces in order; at least one, so that an empty transfer still resolves its ticket."""
    return deque(pieces) or one_piece(_nothing, 0)


def _nothing() -> None: ...
