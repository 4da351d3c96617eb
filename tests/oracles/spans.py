"""Spans of a prompt in the slow oracles: those that stay, and those that each have their share."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from h2o_flexgen.config.eviction import Budget
from tests.oracles.eviction import EvictionOracle, LocalOracle, RankedOracle, StreamingOracle, Vector

Prompt = Sequence[Sequence[Vector]]


class ArrivalOracle(RankedOracle):
    """The newest stay, beside sinks and spans."""

    def first_score(self, position: int) -> float:
        return position


def slow_shares(total: int, lengths: Sequence[int]) -> list[int]:
    """By length: exact shares rounded down, none below 1; what is left over goes out one by one, to the part whose
    exact share has most behind the point; what is too much comes from the part that has most."""
    exact = [Fraction(total * length, sum(lengths)) for length in lengths]
    found = [max(1, int(share)) for share in exact]
    waiting = [i for i in range(len(lengths)) if exact[i] >= found[i]]
    waiting.sort(key=lambda i: (found[i] - exact[i], i))
    while sum(found) < total:
        found[waiting.pop(0)] += 1
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return found


def share_of(whole: Budget, count: int) -> Budget:
    """A budget of `count` tokens that divides as `whole` does."""
    sinks = min(whole.sinks, count - 1)
    recent = int(Fraction(whole.recent, max(1, whole.after_prompt - whole.sinks)) * (count - sinks))
    recent = min(count - sinks, max(recent, 1 if whole.recent else 0))
    if whole.prompt is None:
        return Budget(count, count - sinks - recent, recent, sinks, False, whole.burst)
    return Budget(count + whole.burst - 1, count - sinks - recent, recent, sinks, False, whole.burst, prompt=count)


@cache
def fair_to_spans(oracle: type[EvictionOracle]) -> type[EvictionOracle]:
    """`oracle` within every part of the prompt by itself; after it, what is left of the prompt stays."""
    base = ArrivalOracle if oracle in (StreamingOracle, LocalOracle) else oracle

    class Fair(base):  # type: ignore[misc, valid-type]
        def prompt(self, queries: Prompt, keys: Sequence[Vector], values: Sequence[Vector]) -> list[list[list[float]]]:
            self.given = queries, keys, values  # what is held may be rounded before the last head is through
            return super().prompt(queries, keys, values)

        def _evict(self) -> None:
            if self.prompted or self.budget.inside is None:
                super()._evict()
            elif self is self.siblings[-1]:
                for start, stop, count in self.counts():
                    self.evict_within(start, stop, count)
                for each in self.siblings:
                    for p in [p for p in each.keys if not each.visible(p, self.length)]:
                        del each.keys[p], each.values[p], each.scores[p]
                    each.prompted = True

        def counts(self) -> list[tuple[int, int, int]]:
            """Each part that the next query sees, and how many of it stay."""
            first = 0 if self.window is None else max(0, self.length + 1 - self.window)
            parts = [(max(a, first), b) for a, b in self.budget.spans if b > first]
            lengths = [b - a for a, b in parts]
            if sum(lengths) <= self.budget.after_prompt:
                return [(a, b, b - a) for a, b in parts]
            counts = slow_shares(self.budget.after_prompt, lengths)
            return [(a, b, count) for (a, b), count in zip(parts, counts, strict=True)]

        def evict_within(self, start: int, stop: int, count: int) -> None:
            """The part as a prompt of its own, for all heads of the layer."""
            size, length = stop - start, self.length
            if count == size:
                return

            def place(position: int) -> int:
                return position + (start if position < size else length - size)

            def turned(vector: Vector, position: int) -> Vector:
                return self.rotate(vector, place(position))

            apart = [
                base(
                    share_of(self.budget.inside, count),
                    scale=each.scale,
                    seed=each.seed,
                    layer=each.layer,
                    row_id=each.row_id,
                    head=each.head,
                    window=each.window,
                    rotate=turned,
                    rotated_by=each.rotated_by and (lambda x, p, way: self.rotated_by(x, place(p), way)),
                )
                for each in self.siblings
            ]
            for each, own in zip(self.siblings, apart, strict=True):
                own.siblings, own.sinks = apart, each.sinks
                own.prompt(*(part[start:stop] for part in each.given))
            for each, own in zip(self.siblings, apart, strict=True):
                each.closest = min(each.closest, own.closest)
                for p in range(start, stop):
                    if p - start not in own.keys:
                        del each.keys[p], each.values[p], each.scores[p]

    return Fair


def with_spans(oracle: type[EvictionOracle], rule: str) -> type[EvictionOracle]:
    """What `oracle` is under `--spans RULE`."""
    if rule == "fair":
        return fair_to_spans(oracle)
    return ArrivalOracle if oracle in (StreamingOracle, LocalOracle) else oracle
