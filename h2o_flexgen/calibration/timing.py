"""Measuring within a time limit: how seconds are divided, and medians of repetitions. No torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Clock = Callable[[], float]

MOST_SAMPLES = 50
FEWEST_SAMPLES = 3
SPAN = 1e-3
"""Seconds that one sample lasts at least: shorter calls are repeated within it."""
_LEAST_SHARE = 0.1


class Sample(NamedTuple):
    """The median of `taken` samples of one call, in seconds; `spread` is the distance of the quartiles over it."""

    seconds: float
    spread: float
    taken: int


class TimeBudget:
    """Seconds divided over parts by weight.

    What a part leaves goes to those after it. What it overdraws is taken from them, but for a tenth of their share:
    everything is measured, however late it is.
    """

    def __init__(self, seconds: float, weights: Mapping[str, float], clock: Clock = time.perf_counter) -> None:
        self._seconds, self._clock = seconds, clock
        self._weights, self._left = dict(weights), dict(weights)
        self._start = clock()

    def take(self, part: str) -> float:
        """Seconds that `part`, which starts now, may take; KeyError for one that is unknown or was taken before."""
        waiting = sum(self._left.values())
        weight = self._left.pop(part)
        least = _LEAST_SHARE * self._seconds * weight / sum(self._weights.values())
        return max(least, (self._seconds - self.elapsed) * weight / waiting)

    @property
    def elapsed(self) -> float:
        """Seconds since the budget was made."""
        return self._clock() - self._start

    @property
    def seconds(self) -> float:
        """All of them."""
        return self._seconds


class Timer:
    """Times calls on one device. `synchronise` waits for what the device still has to do."""

    def __init__(self, synchronise: Callable[[], object] = lambda: None, clock: Clock = time.perf_counter) -> None:
        self._synchronise, self.clock = synchronise, clock

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call, from an idle device to an idle device."""
        self._synchronise()
        start = self.clock()
        call()
        self._synchronise()
        return self.clock() - start

    def measure(
        self,
        call: Callable[[], object],
        seconds: float,
        *,
        per: int = 1,
        prepare: Callable[[], object] | None = None,
        most: int = MOST_SAMPLES,
    ) -> Sample:
        """Seconds of one of the `per` operations that `call` does, measured for about `seconds`.

        One untimed call goes before: it touches memory and fills pools. Only where that takes all the time and as much
        again, it is the sample itself. Fewer than FEWEST_SAMPLES are taken only where half as much time again would not
        do. `prepare` runs untimed before every call; without it, calls shorter than SPAN are repeated within a sample.
        `most`: samples, however short they are.
        """
        start = self.clock()
        first = self._prepared(call, prepare)
        if first > 2 * seconds:
            return sample_of([first / per])
        repeats = 1
        if prepare is None and first < SPAN:
            repeats = max(1, round(SPAN / max(self.once(call), 1e-7)))
        taken: list[float] = []
        longest = 0.0
        while len(taken) < most:
            before = self.clock()
            if taken:
                fewest = len(taken) < FEWEST_SAMPLES
                if before - start + longest > seconds * (1.5 if fewest else 1.0):
                    break
            taken.append(self._prepared(call, prepare, repeats) / repeats / per)
            longest = max(longest, self.clock() - before)
        return sample_of(taken)

    def _prepared(self, call: Callable[[], object], prepare: Callable[[], object] | None, repeats: int = 1) -> float:
        if prepare is not None:
            prepare()
        if repeats == 1:
            return self.once(call)

        def several() -> None:
            for _ in range(repeats):
                call()

        return self.once(several)


def sample_of(taken: list[float]) -> Sample:
    """Median and spread of what was taken, none of it 0: a clock may be too coarse to see a call."""
    median = max(statistics.median(taken), 1e-9)
    if len(taken) < 2:
        return Sample(median, 0.0, len(taken))
    low, _, high = statistics.quantiles(taken, n=4, method="inclusive")
    return Sample(median, (high - low) / median, len(taken))
