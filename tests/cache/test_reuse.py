"""Which entry of a full store goes, by an oracle that looks at all entries each time."""

from __future__ import annotations

import math
import random

from h2o_flexgen.cache.reuse import GONE, PRIOR, ExpectedReuse
from tests.cache.conftest import by_torch
from tests.seeds import moved

pytestmark = by_torch


class Kind:
    """All that is known of a category: how often it was asked for, and the waits of what came back."""

    def __init__(self) -> None:
        self.asked, self.waits = 0, list[float]()


def _priority(last: float, kind: Kind, kinds: list[Kind], now: float, life: float) -> float:
    """P(reuse within `life` | not yet), of a share that comes back after exponential waits, as if PRIOR more were known
    of the category that are as those of all."""
    asked, every = sum(each.asked for each in kinds), [wait for each in kinds for wait in each.waits]
    share = (len(kind.waits) + PRIOR * (len(every) + 1) / (asked + 2)) / (kind.asked + PRIOR)
    mean = (sum(kind.waits) + PRIOR * (sum(every) / len(every) if every else life)) / (len(kind.waits) + PRIOR)

    def returned(age: float) -> float:
        return share * (1 - math.exp(-age / mean))

    age = now - last
    return (returned(age + life) - returned(age)) / (1 - returned(age))


def test_the_least_likely_to_come_back_goes() -> None:
    """Also learnt is what comes back after it was evicted."""
    source, life = random.Random(moved(1)), 50.0
    order: ExpectedReuse[int] = ExpectedReuse(life)
    kinds = {name: Kind() for name in "abc"}
    kind_of = {key: source.choice("abc") for key in range(30)}
    asked, held, now = dict[int, float](), set[int](), 0.0
    for _ in range(3000):
        now += source.choice([0.5, 1, 7])
        key = min(int(source.expovariate(0.15)), 29)
        kind = kinds[kind_of[key]]
        if key in asked:
            kind.waits.append(now - asked[key])
        kind.asked += 1
        asked[key] = now
        held.add(key)
        order.touch(key, (kind_of[key], 0), 16 * key, now)
        if len(held) > 12:
            victim = order.victim(now, {key})
            assert victim is not None
            every = list(kinds.values())
            likely = {each: _priority(asked[each], kinds[kind_of[each]], every, now, life) for each in held - {key}}
            assert likely[victim] <= min(likely.values()) + 1e-9
            order.forget(victim)
            held.remove(victim)
    assert order.victim(now, held) is None
    order.forget(99)


def test_of_one_prompt_the_deepest_goes_first() -> None:
    order = ExpectedReuse[str](10.0)
    for key, offset in (("tail", 32), ("middle", 16), ("head", 0)):
        order.touch(key, ("a", 0), offset, 5.0)
    order.touch("other", ("a", 0), 0, 6.0)
    gone = []
    while (victim := order.victim(7.0)) is not None:
        gone.append(victim)
        order.forget(victim)
    assert gone == ["tail", "middle", "head", "other"]


def test_a_category_that_comes_back_sooner_stays_longer() -> None:
    """By the last use alone the other would go."""
    order = ExpectedReuse[str](5.0)
    for now in range(2 * PRIOR):
        order.touch("often", ("a", 0), 0, float(now))
        if now % 50 == 0:
            order.touch("seldom", ("b", 0), 0, float(now))
    end = 2.0 * PRIOR
    assert order.victim(end + 20) == "often"  # long dead, for one of its kind
    order.touch("often", ("a", 0), 0, end + 20)
    assert order.victim(end + 20.5) == "seldom"


def test_a_category_of_which_little_comes_back_goes_first() -> None:
    """Though it was asked for last, and what comes back of it does so as soon."""
    order = ExpectedReuse[str](5.0)
    for now in range(2 * PRIOR):
        order.touch("chat", ("a", 0), 0, float(now))
        order.touch(f"single {now}", ("b", 0), 0, float(now))
    order.touch("single", ("b", 0), 0, 2.0 * PRIOR)
    for now in range(2 * PRIOR):
        order.forget(f"single {now}")
    assert order.victim(2.0 * PRIOR) == "single"


def test_what_is_remembered_of_the_evicted_is_bounded() -> None:
    order = ExpectedReuse[int](5.0)
    for key in range(GONE + 100):
        order.touch(key, ("a", 0), 0, float(key))
        order.forget(key)
    assert len(order._gone) == GONE
