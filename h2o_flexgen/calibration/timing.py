"""Measuring within a time limit: how seconds are divided, medians of repetitions and how far they spread. No torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

Clock = Callable[[], float]
_Taken = TypeVar("_Taken")

MOST_SAMPLES = 50
FEWEST_SAMPLES = 3
SPAN = 1e-3
"""Seconds that one sample lasts at least: shorter calls are repeated within it."""
_LEAST_SHARE = 0.1
WIDE = 0.2
"""Quartiles further apart than this share of the median say little: the measurement was disturbed."""
_RESTS = (0.0, 0.3, 1.0)  # seconds before measuring again: a disturbance may go on for a while
_REPEATED_SHARE = 2 / 3  # of the time that went by otherwise


class Sample(NamedTuple):
    """The median of `taken` samples of one call, in seconds; `spread` is the distance of the quartiles over it."""

    seconds: float
    spread: float
    taken: int


def sample_of(taken: list[float]) -> Sample:
    """Median and spread of what was taken, none of it 0: a clock may be too coarse to see a call."""
    median = max(statistics.median(taken), 1e-9)
    if len(taken) < 2:
        return Sample(median, 0.0, len(taken))
    low, _, high = statistics.quantiles(taken, n=4, method="inclusive")
    return Sample(median, (high - low) / median, len(taken))


@dataclass
class Spreads:
    """How far the quartiles of what was measured lie apart, figure by figure, and what else is to be said of each."""

    found: dict[str, list[float]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def note(self, figure: str, sample: Sample) -> Sample:
        """`sample` itself, remembered as one of those that `figure` is made of."""
        spreads = self.found.setdefault(figure, [])
        if sample.taken >= FEWEST_SAMPLES:
            spreads.append(sample.spread)
        return sample

    @property
    def typical(self) -> dict[str, float]:
        """The median over the samples of each figure that has any with enough repetitions."""
        return {figure: statistics.median(spreads) for figure, spreads in self.found.items() if spreads}

    def sources(self) -> dict[str, str]:
        typical, sources = self.typical, {}
        for figure in self.found:
            wide = f"quartiles {typical[figure]:.0%} apart" if figure in typical else "too few repetitions for a spread"
            sources[figure] = "; ".join(filter(None, ["measured", self.said.get(figure), wide]))
        return sources


class TimeBudget:
    """Seconds divided over parts by weight.

    Seconds that a part leaves go to the parts after it. Seconds that it overdraws are taken from them, but for a tenth
    of their share: every part is measured, however late it is.
    """

    def __init__(self, seconds: float, weights: Mapping[Any, float], clock: Clock = time.perf_counter) -> None:
        self.seconds, self._clock = seconds, clock
        self._weights, self._left = dict(weights), dict(weights)
        self._start = clock()

    def take(self, part: object) -> float:
        """Seconds that `part`, which starts now, may take; KeyError for one that is unknown or was taken before."""
        waiting = sum(self._left.values())
        weight = self._left.pop(part)
        least = _LEAST_SHARE * self.seconds * weight / sum(self._weights.values())
        return max(least, (self.seconds - self.elapsed) * weight / waiting)

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start


class Repeats:
    """Repeats disturbed measurements, within seconds that all measurements of one calibration share.

    At any time repeating may have taken two thirds of the time that went by otherwise, so that what comes first leaves
    some to what comes last, and never more than `seconds`.
    """

    def __init__(
        self, seconds: float = 0.0, clock: Clock = time.perf_counter, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._most, self._clock, self._sleep = seconds, clock, sleep
        self._start, self._untimed = clock(), 0.0
        self.spent = 0.0
        """Seconds that repeating took."""
        self.count = 0
        """Repetitions so far."""

    def clock(self) -> float:
        """The clock that time is divided by: it stands still while anything is repeated, or `untimed`."""
        return self._clock() - self.spent - self._untimed

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """The time spent within is not taken from what is measured afterwards."""
        begun = self.clock()
        try:
            yield
        finally:
            self._untimed += self.clock() - begun

    def steadiest(self, take: Callable[[], _Taken | None], spread: Callable[[_Taken], float]) -> _Taken:
        """The result of `take`, taken again while its `spread` is WIDE and there is time: the one that spreads least.

        `take` gives None where it can give nothing more; ValueError where it gives nothing at all.
        """
        start = self._clock()
        best = take()
        lasted = self._clock() - start
        if best is None:
            raise ValueError("nothing was measured")
        for rest in _RESTS:
            begun = self._clock()
            if spread(best) <= WIDE or rest + lasted > self._left():
                break
            self._sleep(rest)
            other = take()
            self.spent += self._clock() - begun
            if other is None:
                break
            self.count += 1
            best = min(best, other, key=spread)
        return best

    def _left(self) -> float:
        return min(self._most, _REPEATED_SHARE * (self.clock() - self._start)) - self.spent


class Timer:
    """Times calls on one device. `synchronise` waits for what the device still has to do.

    `repeats` repeats disturbed measurements; None: none is repeated.
    """

    def __init__(
        self,
        synchronise: Callable[[], object] = lambda: None,
        clock: Clock = time.perf_counter,
        repeats: Repeats | None = None,
    ) -> None:
        self._synchronise, self.clock = synchronise, clock
        self.repeats = Repeats(0.0, clock) if repeats is None else repeats

    def budget(self, seconds: float, weights: Mapping[Any, float]) -> TimeBudget:
        """`seconds` divided by `weights`; repeated measurements take none of them."""
        return TimeBudget(seconds, weights, self.repeats.clock)

    def once(self, call: Callable[[], object], times: int = 1) -> float:
        """Seconds of one call, or so many, from an idle device to an idle device."""
        self._synchronise()
        start = self.clock()
        for _ in range(times):
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
        most: int | None = None,
    ) -> Sample:
        """Seconds of one of the `per` operations that `call` does, measured for about `seconds`.

        One untimed call goes before: it touches memory, fills pools, and compiles what is compiled then; another one
        where that took all the time and as much again, which is the sample itself if it does so too. Fewer than
        FEWEST_SAMPLES are taken only where half as much time again would not do. `prepare` runs untimed before every
        call; without it, calls shorter than SPAN are repeated within a sample. Disturbed samples are taken again, as
        `repeats` has time. `most`: samples in all, repeated ones too; None: MOST_SAMPLES each time.
        """
        for _ in ("what is compiled", "what the call takes"):
            start: float | None = self.clock()
            first = self._prepared(call, prepare)
            if first <= 2 * seconds:
                break
        else:
            return sample_of([first / per])
        together = 1
        if prepare is None and first < SPAN:
            together = max(1, round(SPAN / max(self.once(call), 1e-7)))
        done = 0

        def series() -> Sample | None:
            nonlocal done, start
            left = MOST_SAMPLES if most is None else most - done
            if done and left < FEWEST_SAMPLES:
                return None
            # Warming up takes time from the first series, and is not done again.
            begun, start = self.clock() if start is None else start, None
            taken = self._series(lambda: self._prepared(call, prepare, together) / together / per, begun, seconds, left)
            again, done = done > 0, done + len(taken)
            return None if again and len(taken) < FEWEST_SAMPLES else sample_of(taken)

        return self.repeats.steadiest(series, lambda sample: sample.spread if sample.taken >= FEWEST_SAMPLES else 0.0)

    def _series(self, sample: Callable[[], float], start: float, seconds: float, most: int) -> list[float]:
        """As many samples as there is time for, `seconds` from `start` on; one at least."""
        taken: list[float] = []
        longest = 0.0
        while not taken or len(taken) < most:
            before = self.clock()
            if taken:
                fewest = len(taken) < FEWEST_SAMPLES
                if before - start + longest > seconds * (1.5 if fewest else 1.0):
                    break
            taken.append(sample())
            longest = max(longest, self.clock() - before)
        return taken

    def _prepared(self, call: Callable[[], object], prepare: Callable[[], object] | None, repeats: int = 1) -> float:
        if prepare is not None:
            prepare()
        return self.once(call, repeats)
