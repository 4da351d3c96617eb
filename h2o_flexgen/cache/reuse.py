"""Which entry of a full store goes: the one least likely to be asked for again soon.

"KVCache Cache in the Wild" (arXiv 2506.02634): of entries of a category, such as the second turns of chats, some share
comes back, after times that are about exponential. Both are found from what was asked for lately, entries that had been
evicted by then among it. An entry that was last asked for t ago comes back within the next `life` with the probability
P(wait <= t + life | wait > t). The lowest goes, among equals the one that lies deepest in its prompt. The printed
equation is not public: this is a reconstruction.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

RECENT, PRIOR = 1 << 14, 256
"""Requests of a category after which its past counts half, and requests that the mean of all categories counts as."""
GONE = 1 << 16
"""Evicted entries that are remembered, to learn when they are asked for again."""
_MOST = 0.999
"""The largest share of a category that is believed to come back: no entry is certain to."""

Key = TypeVar("Key", bound=Hashable)
Category = tuple[str, int]
"""The common traits of entries: a kind of request, and their place in the chain of a prompt's entries (a turn)."""


@dataclass
class _Alike(Generic[Key]):
    """The entries of one category, the longest unasked first: (when last, offset). How often entries of it were asked
    for, how many of these times they came back, and after how long in all."""

    held: OrderedDict[Key, tuple[float, int]] = field(default_factory=OrderedDict)
    asked: float = 0.0
    returned: float = 0.0
    waited: float = 0.0

    def ask(self) -> None:
        if self.asked >= RECENT:
            self.asked, self.returned, self.waited = self.asked / 2, self.returned / 2, self.waited / 2
        self.asked += 1

    def came_back(self, wait: float) -> None:
        self.returned += 1
        self.waited += wait


class ExpectedReuse(Generic[Key]):
    """Evicts the entry that is least likely to be asked for within the next `life`, in the unit of `now`, which never
    decreases.

    Each category is a list by the last use, and only their heads are compared. A category of which little is known yet
    leans on the mean of all.
    """

    def __init__(self, life: float) -> None:
        self.life = life
        self._alike: dict[Category, _Alike[Key]] = {}
        self._every: _Alike[Key] = _Alike()
        self._category: dict[Key, Category] = {}
        self._gone: OrderedDict[Key, tuple[Category, float]] = OrderedDict()

    def touch(self, key: Key, category: Category, offset: int, now: float) -> None:
        """An entry has come, or was asked for; offset: tokens before it in its prompt. Of one prompt the deepest entry
        is touched first."""
        before = self._category.get(key)
        if before is not None:
            self._came_back(before, now - self._alike[before].held.pop(key)[0])
        elif key in self._gone:
            before, last = self._gone.pop(key)
            self._came_back(before, now - last)
        alike = self._alike.setdefault(category, _Alike())
        alike.ask()
        self._every.ask()
        self._category[key] = category
        alike.held[key] = now, offset

    def _came_back(self, category: Category, wait: float) -> None:
        self._alike[category].came_back(wait)
        self._every.came_back(wait)

    def forget(self, key: Key) -> None:
        """The entry is no longer held; unknown keys are ignored."""
        category = self._category.pop(key, None)
        if category is not None:
            self._gone[key] = category, self._alike[category].held.pop(key)[0]
            if len(self._gone) > GONE:
                self._gone.popitem(last=False)

    def victim(self, now: float, spared: Container[Key] = ()) -> Key | None:
        """The entry to evict next, not one of `spared`; None if there is none."""
        lowest: tuple[float, int] | None = None
        found: Key | None = None
        for alike in self._alike.values():
            key = next((key for key in alike.held if key not in spared), None)
            if key is None:
                continue
            last, offset = alike.held[key]
            priority = self._likelihood(alike, now - last), -offset
            if lowest is None or priority < lowest:
                lowest, found = priority, key
        return found

    def _likelihood(self, alike: _Alike[Key], age: float) -> float:
        """That an entry of the category, unasked since `age`, comes back within `life`."""
        every = self._every
        usual = (every.returned + 1) / (every.asked + 2)
        share = min(_MOST, (alike.returned + PRIOR * usual) / (alike.asked + PRIOR))
        wait = every.waited / every.returned if every.waited else self.life
        mean = (alike.waited + PRIOR * wait) / (alike.returned + PRIOR)
        later = share * math.exp(-age / mean)
        return later * -math.expm1(-self.life / mean) / (1 - share + later)
