"""Which entry of a full store goes: the one least likely to be asked for again soon.

"KVCache Cache in the Wild" (arXiv 2506.02634): entries of a category, such as all system prompts, come back after times
that are about exponential. For each category the distribution is fitted to the recent ones; an entry that was last
asked for t ago comes back within the next `life` with probability F(t + life) - F(t). The lowest goes, among equals the
one that lies deepest in its prompt. The printed equation is not public: this is a reconstruction.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

RECENT, PRIOR = 4096, 256
"""Times that a category's distribution is fitted to: the last ones; and for how many of them the mean of all counts."""

Key = TypeVar("Key", bound=Hashable)
Category = tuple[str, int]
"""What entries are alike in: a kind of request, and their place in the chain of a prompt's entries (a turn)."""


class ReuseOrder(Protocol[Key]):
    """The order in which entries go. `now` never decreases."""

    def touch(self, key: Key, category: Category, offset: int, now: float) -> None:
        """An entry has come, or was asked for; offset: tokens before it in its prompt. Of one prompt the deepest entry
        is touched first."""

    def forget(self, key: Key) -> None:
        """It is no longer held; unknown keys are passed over."""

    def victim(self, now: float, spared: Container[Key] = ()) -> Key | None:
        """The entry that goes next, not one of `spared`; None where all are."""


class LeastRecent(Generic[Key]):
    """The entry that was not asked for the longest time goes."""

    def __init__(self) -> None:
        self._held: OrderedDict[Key, None] = OrderedDict()

    def touch(self, key: Key, category: Category, offset: int, now: float) -> None:
        self._held[key] = None
        self._held.move_to_end(key)

    def forget(self, key: Key) -> None:
        self._held.pop(key, None)

    def victim(self, now: float, spared: Container[Key] = ()) -> Key | None:
        return next((key for key in self._held if key not in spared), None)


@dataclass
class _Alike(Generic[Key]):
    """The entries of one category, the longest unasked first: (when last, offset); and times after which they came
    back."""

    held: OrderedDict[Key, tuple[float, int]] = field(default_factory=OrderedDict)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    total: float = 0.0

    def came_back(self, wait: float) -> None:
        if len(self.waits) == RECENT:
            self.total -= self.waits[0]
        self.waits.append(wait)
        self.total += wait


class ExpectedReuse(Generic[Key]):
    """The entry that is least likely to be asked for within the next `life` goes, in the unit of `now`.

    Each category is a list by the last use, and only their heads are compared: of one category the longest unasked is
    the least likely. A category of which little has come back yet leans on the mean of all.
    """

    def __init__(self, life: float) -> None:
        self.life = life
        self._alike: dict[Category, _Alike[Key]] = {}
        self._every: _Alike[Key] = _Alike()
        self._category: dict[Key, Category] = {}

    def touch(self, key: Key, category: Category, offset: int, now: float) -> None:
        before = self._category.get(key)
        if before is not None:
            last, _ = self._alike[before].held.pop(key)
            self._alike[before].came_back(now - last)
            self._every.came_back(now - last)
        self._category[key] = category
        self._alike.setdefault(category, _Alike()).held[key] = now, offset

    def forget(self, key: Key) -> None:
        category = self._category.pop(key, None)
        if category is not None:
            del self._alike[category].held[key]

    def victim(self, now: float, spared: Container[Key] = ()) -> Key | None:
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
        """F(age + life) - F(age) of the category's exponential distribution."""
        every = self._every.total / len(self._every.waits) if self._every.waits else self.life
        mean = (alike.total + PRIOR * every) / (len(alike.waits) + PRIOR)
        if mean <= 0:
            return 1.0 if age <= 0 else 0.0
        return math.exp(-age / mean) * -math.expm1(-self.life / mean)
