"""Who may touch what when: finds two accesses to the same bytes that nothing puts in an order, one of them a write.

Actors are the streams of a device and the threads of the host. Each counts its steps, and knows how far the others had
come when it last heard of them (a vector clock); an access comes after another if its actor knows of the other's step.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from typing import NamedTuple

Clock = dict[str, int]


class Access(NamedTuple):
    """Bytes [start, end) touched by an actor, who was at `step`."""

    actor: str
    start: int
    end: int
    write: bool
    step: int
    what: str


class Races:
    """The clocks of all actors, and the last accesses to memory that is watched. Thread safe."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.accesses = 0
        self._clocks: dict[str, Clock] = {}
        self._starts: list[int] = []
        self._buffers: dict[int, tuple[int, str, dict[tuple[str, int, int, bool], Access]]] = {}
        self._lock = threading.RLock()

    @staticmethod
    def host() -> str:
        """The actor that the calling thread is."""
        return f"thread {threading.get_ident()}"

    def watch(self, start: int, nbytes: int, what: str) -> None:
        """From now on accesses to these bytes count; what was there before is forgotten."""
        with self._lock:
            self.forget(start, nbytes)
            insort(self._starts, start)
            self._buffers[start] = (start + nbytes, what, {})

    def forget(self, start: int, nbytes: int) -> None:
        """Memory that is gone."""
        with self._lock:
            for base in [b for b in self._starts if b < start + nbytes and start < self._buffers[b][0]]:
                self._starts.remove(base)
                del self._buffers[base]

    def release(self, actor: str) -> Clock:
        """What others learn who hear of `actor` now."""
        with self._lock:
            clock = self._clocks.setdefault(actor, {actor: 1})
            told = dict(clock)
            clock[actor] += 1
            return told

    def acquire(self, actor: str, told: Clock) -> None:
        """`actor` hears of what `release` returned: all of that came before its next step."""
        with self._lock:
            clock = self._clocks.setdefault(actor, {actor: 1})
            for other, step in told.items():
                if step > clock.get(other, 0):
                    clock[other] = step

    def meet(self, actor: str) -> None:
        """`actor` hears of all threads of the host."""
        with self._lock:
            for other in [name for name in self._clocks if name.startswith("thread") and name != actor]:
                self.acquire(actor, self.release(other))

    def access(self, actor: str, start: int, nbytes: int, write: bool, what: str) -> None:
        """Notes an access, and whether it may meet another."""
        with self._lock:
            at = bisect_right(self._starts, start) - 1
            if at < 0 or not nbytes or start >= self._buffers[self._starts[at]][0]:
                return
            self.accesses += 1
            _, buffer, last = self._buffers[self._starts[at]]
            clock = self._clocks.setdefault(actor, {actor: 1})
            now = Access(actor, start, start + nbytes, write, clock[actor], what)
            for other in last.values():
                overlaps = other.start < now.end and now.start < other.end
                if overlaps and (write or other.write) and clock.get(other.actor, 0) < other.step:
                    self.found.append(f"{buffer}: {other.what} by {other.actor} and {what} by {actor} have no order")
            if write:  # what comes after this comes after all that it covers
                for key in [key for key, old in last.items() if now.start <= old.start and old.end <= now.end]:
                    del last[key]
            last[actor, now.start, now.end, write] = now
