"""Sequences that wait for a place, and what is true of all that still wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from h2o_flexgen.cache.lengths import slots_needed
from h2o_flexgen.engine.requests.sequence import Sequence


class WaitingQueue:
    """A queue that is only ever taken from. Blocks ask for its extremes: those of every rest are found only once."""

    def __init__(self, rows: Iterable[Sequence] = ()) -> None:
        self._rows = list(rows)
        self._taken = 0
        self._steps = list(accumulate((row.steps for row in reversed(self._rows)), initial=0))
        self._prompts = self._largest(lambda row: len(row.prompt_ids))
        self._slots: dict[int | None, list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows) - self._taken

    @property
    def first(self) -> Sequence:
        """The one that comes in next; IndexError where nobody waits."""
        return self._rows[self._taken]

    def take(self, count: int) -> list[Sequence]:
        """The next `count`, or as many as there are."""
        taken = self._rows[self._taken : self._taken + count]
        self._taken += len(taken)
        return taken

    @property
    def steps(self) -> int:
        """Steps of all of them together."""
        return self._steps[len(self)]

    @property
    def longest_prompt(self) -> int:
        """Tokens that go through at once; 0 where nobody waits."""
        return self._prompts[len(self)]

    def slots(self, window: int | None) -> int:
        """Cache slots of the one that needs most, in a layer with this window; 0 where nobody waits."""
        if window not in self._slots:
            self._slots[window] = self._largest(lambda row: slots_needed([row.budget.within(window)]))
        return self._slots[window][len(self)]

    def _largest(self, size: Callable[[Sequence], int]) -> list[int]:
        """Of the last 0, 1, 2, ... rows."""
        return list(accumulate((size(row) for row in reversed(self._rows)), max, initial=0))
