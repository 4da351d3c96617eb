"""Which entry of a full store goes, by an oracle that looks at all entries each time."""

from __future__ import annotations

import math
import random

from h2o_flexgen.cache.reuse import PRIOR, ExpectedReuse, LeastRecent
from tests.seeds import moved


def _priority(entry: tuple[str, int, float], waits: dict[str, list[float]], now: float, life: float) -> float:
    """P(reuse within `life`), from the waits of the entry's category, and as if there were PRIOR of the mean of all."""
    kind, _, last = entry
    every = [wait for each in waits.values() for wait in each] or [life]
    mean = (sum(waits[kind]) + PRIOR * sum(every) / len(every)) / (len(waits[kind]) + PRIOR)
    return math.exp(-(now - last) / mean) - math.exp(-(now - last + life) / mean)


def test_the_least_likely_to_come_back_goes() -> None:
    source, life = random.Random(moved(1)), 50.0
    order: ExpectedReuse[int] = ExpectedReuse(life)
    held, waits = dict[int, tuple[str, int, float]](), {"a": list[float](), "b": list[float](), "c": list[float]()}
    kinds = {key: source.choice("abc") for key in range(30)}
    now = 0.0
    for _ in range(3000):
        now += source.choice([0.5, 1, 7])
        key = min(int(source.expovariate(0.15)), 29)
        offset = 16 * key
        if key in held:
            waits[held[key][0]].append(now - held[key][2])
        held[key] = kinds[key], offset, now
        order.touch(key, (kinds[key], 0), offset, now)
        if len(held) > 12:
            spared = {key}
            victim = order.victim(now, spared)
            assert victim is not None
            others = {other: entry for other, entry in held.items() if other not in spared}
            likelihood = {other: _priority(entry, waits, now, life) for other, entry in others.items()}
            assert likelihood[victim] <= min(likelihood.values()) + 1e-9
            order.forget(victim)
            del held[victim]
    assert order.victim(now, set(held)) is None
    order.forget(99)


def test_of_one_prompt_the_deepest_goes_first() -> None:
    for order in (ExpectedReuse[str](10.0), LeastRecent[str]()):
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
