"""How much resources slow each other down: each works alone, then every two of them at once."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from itertools import combinations

from h2o_flexgen.calibration.links import Link
from h2o_flexgen.memory.transfers import Ticket

COMPUTE = "compute"
NOTICED = 1.05
"""A factor below this is no more than the noise of measuring it."""
_ROUNDS = 2
_DEPTH = 3  # transfers that are queued at any time
_FEWEST = 3  # times that each resource is seen to be done with something
_NAP = 1e-3

Factors = dict[str, dict[str, float]]


class Feeder:
    """Keeps one link busy from a thread of its own. `done` gets the time at which each transfer ended.

    Errors surface at `stop`.
    """

    def __init__(self, link: Link, done: list[float]) -> None:
        self._link, self._done, self._stopping = link, done, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._feed, name=f"h2o-calibrate-{link.name}")
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Nothing more will be done."""
        return self._error is not None

    def stop(self) -> None:
        """Let what is queued end, join the thread; raises what went wrong."""
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _feed(self) -> None:
        queued: deque[Ticket] = deque()
        try:
            while not self._stopping.is_set() and threading.main_thread().is_alive():
                while len(queued) < _DEPTH:
                    queued.append(self._link.submit())
                queued.popleft().wait()
                self._done.append(time.perf_counter())
            for ticket in queued:
                ticket.wait()
        except BaseException as error:
            self._error = error


class Contest:
    """Resources that can be kept busy: links by feeders, "compute" by calling `compute` on this thread.

    `compute` returns only when its work is done.
    """

    def __init__(self, links: Mapping[str, Link], compute: Callable[[], object]) -> None:
        self._links, self._compute = dict(links), compute

    def slowdown(self, seconds: float) -> Factors:
        """`slowdown` of a HardwareProfile: factors below NOTICED are left out."""
        names = (COMPUTE, *self._links)
        sets = [*((name,) for name in names), *combinations(names, 2)]
        window = seconds / _ROUNDS / len(sets)
        seen: defaultdict[tuple[str, ...], list[dict[str, float]]] = defaultdict(list)
        for _ in range(_ROUNDS):  # alone and together in turns: what else the machine does falls on both alike
            for busy in sets:
                seen[busy].append(self.rates(busy, window))
        rate = {
            (busy, name): statistics.median(each[name] for each in found)
            for busy, found in seen.items()
            for name in busy
        }
        factors: Factors = {}
        for pair in combinations(names, 2):
            for name, beside in (pair, pair[::-1]):
                factor = rate[(name,), name] / rate[pair, name]
                if factor >= NOTICED:
                    factors.setdefault(name, {})[beside] = factor
        return factors

    def rates(self, names: tuple[str, ...], seconds: float) -> dict[str, float]:
        """Calls or transfers per second of each of `names` while all of them are busy."""
        feeders: dict[str, Feeder] = {}
        done: dict[str, list[float]] = {name: [] for name in names}
        try:
            for name in names:
                if name != COMPUTE:
                    feeders[name] = Feeder(self._links[name], done[name])
            start = time.perf_counter()
            while time.perf_counter() - start < seconds or min(map(len, done.values())) < _FEWEST:
                if COMPUTE in names:
                    self._compute()
                    done[COMPUTE].append(time.perf_counter())
                else:
                    time.sleep(_NAP)
                if any(feeder.failed for feeder in feeders.values()):
                    break
            rates = {name: _rate(ends[:]) for name, ends in done.items()}
        finally:
            for feeder in feeders.values():
                feeder.stop()
        return rates


def _rate(ends: list[float]) -> float:
    """How many per second, from the end of the first to that of the last."""
    return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 and ends[-1] > ends[0] else 1.0
