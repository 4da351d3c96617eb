"""Each eviction policy for one sequence and one KV head, in double precision, one token after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul

from h2o_flexgen.config.eviction import Budget

Vector = Sequence[float]


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


class EvictionOracle:
    """Keeps everything. Subclasses say what stays.

    `window`: a query sees the tokens whose distance is less, itself included; what the next query will not see is
    dead, and ranks below everything else.

    `rotate`: turns a query or key as one at that position; positions are counted among what is held (and in the prompt,
    where everything is held, from its beginning).
    `prompt` takes whole prompts, `step` one token; both give the attention output of every query head of the group.
    `closest` is the smallest difference of two scores that a decision has hung on: below rounding error, two correct
    implementations may disagree from then on. `siblings`: the oracles of all KV heads of the layer, in order.
    `history`: what each query's attention was, by position, in the mean over the group; `queries`: they themselves.
    `prompted`: whether the prompt has been pruned.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        scale: float,
        seed: int = 0,
        layer: int = 0,
        row_id: int = 0,
        head: int = 0,
        window: int | None = None,
        rotate: Callable[[Vector, int], Vector] = lambda vector, position: vector,
        rotated_by: Callable[[Vector, int, int], Vector] | None = None,
    ) -> None:
        """rotated_by: (vector, position, 1 or -1) to the vector turned on or back, where queries and keys come turned
        already; only for what wants to know."""
        self.rotated_by, self.siblings, self.prompted = rotated_by, [self], False
        self.history: list[dict[int, float]] = []
        self.queries: list[Sequence[Vector]] = []
        self.budget, self.scale, self.window, self.rotate = budget, scale, window, rotate
        self.seed, self.layer, self.row_id, self.head = seed, layer, row_id, head
        self.keys: dict[int, Vector] = {}
        self.values: dict[int, Vector] = {}
        self._turned: dict[int, Vector] | None = None
        self.scores: dict[int, float] = {}
        self.length = 0
        self.closest = math.inf
        self.sinks: Sequence[float] = ()
        """Of each query head a logit that is no token's."""
        self.soft_cap: float | None = None
        """What no logit of attention reaches, up or down."""
        self.chosen: dict[int, set[int]] = {}
        """What an indexer has chosen, by the query that attends to this alone; to all where nothing of it is kept."""
        self.saw: dict[int, tuple[Vector, Vector]] = {}
        """Keys and values that the last query has seen, by position."""

    @property
    def kept(self) -> set[int]:
        return set(self.keys)

    def prompt(
        self, queries: Sequence[Sequence[Vector]], keys: Sequence[Vector], values: Sequence[Vector]
    ) -> list[list[list[float]]]:
        """`queries` is (S, group, d), `keys` and `values` (S, d). Nothing goes before the last token is in."""
        self._turned = {}  # where nothing goes, every key stays in its place
        outputs = [self._attend(*token) for token in zip(queries, keys, values, strict=True)]
        self._turned = None
        self._evict()
        return outputs

    def step(self, queries: Sequence[Vector], key: Vector, value: Vector) -> list[list[float]]:
        """One token: it attends to everything kept and to itself, then something may go."""
        output = self._attend(queries, key, value)
        self._evict()
        return output

    def staying(self, now: int) -> set[int]:
        """The positions that stay, of those in `keys`, when `now` is the newest."""
        return self.kept

    def visible(self, position: int, query: int) -> bool:
        """Whether the query at position `query` sees the token at `position`."""
        return self.window is None or query - position < self.window

    def first_score(self, position: int) -> float:
        return 0.0

    def attended(self, position: int, probability: float) -> None:
        """`position` has received `probability`, the mean over the group."""

    def capped(self, logits: list[float]) -> list[float]:
        """What logits count."""
        if self.soft_cap is None:
            return logits
        return [self.soft_cap * math.tanh(logit / self.soft_cap) for logit in logits]

    def _attend(self, queries: Sequence[Vector], key: Vector, value: Vector) -> list[list[float]]:
        position = self.length
        self.length += 1
        self.keys[position], self.values[position] = key, value
        self.scores[position] = self.first_score(position)
        outputs = []
        rank = {p: number for number, p in enumerate(sorted(self.keys))}
        positions = [p for p in rank if self.visible(p, position)]
        chosen = self.chosen.get(position, self.kept)
        positions = [p for p in positions if p in chosen] or positions
        received = dict.fromkeys(positions, 0.0)
        keys = [self._key(p, rank[p]) for p in positions]
        columns = list(zip(*(self.values[p] for p in positions), strict=True))
        for number, unrotated in enumerate(queries):
            query = self.rotate(unrotated, rank[position])
            logits = self.capped([self.scale * sum(map(mul, query, key)) for key in keys])
            probabilities = softmax([*logits, *self.sinks[number : number + 1]])[: len(keys)]
            for p, probability in zip(positions, probabilities, strict=True):
                received[p] += probability / len(queries)
            outputs.append([sum(map(mul, probabilities, column)) for column in columns])
        self.saw = {p: (self.keys[p], self.values[p]) for p in positions}
        self.history.append(received)
        self.queries.append(queries)
        for p, probability in received.items():
            self.attended(p, probability)
        return outputs

    def _key(self, position: int, place: int) -> Vector:
        """Turned as one at `place`."""
        if self._turned is None:
            return self.rotate(self.keys[position], place)
        if position not in self._turned:
            self._turned[position] = self.rotate(self.keys[position], place)
        return self._turned[position]

    def _evict(self) -> None:
        if self.budget.full:
            return
        for position in self.kept - self.staying(self.length - 1):
            del self.keys[position], self.values[position], self.scores[position]
        self.prompted = True


class FullOracle(EvictionOracle):
    """Everything stays."""


class LocalOracle(EvictionOracle):
    """The last `recent` tokens stay."""

    def staying(self, now: int) -> set[int]:
        return {p for p in self.keys if p > now - self.budget.recent}


class StreamingOracle(EvictionOracle):
    """The first `sinks` and the last `recent` tokens stay; while there is room, everything."""

    def staying(self, now: int) -> set[int]:
        return {p for p in self.keys if p < self.budget.sinks or p > now - self.budget.recent}


class RankedOracle(EvictionOracle):
    """Sinks, the last `recent`, and the `heavy` best of the rest; of two equal scores the lower position is better."""

    same_number_ties = False
    """Whether equal scores are one number that several tokens have, and equal in any arithmetic."""

    def staying(self, now: int) -> set[int]:
        return self.best(self.ranked(now), now, self.budget.total)

    def ranked(self, now: int) -> dict[int, float]:
        """What tokens are compared by."""
        return self.scores

    def protected(self, now: int) -> set[int]:
        return {p for p in self.keys if p < self.budget.sinks or p > now - self.budget.recent}

    def pinned(self, now: int) -> set[int]:
        """What spans of the prompt have kept, and the next query sees."""
        spans = self.budget.spans
        return {p for p in self.keys if self.visible(p, now + 1) and any(a <= p < b for a, b in spans)}

    def best(self, scores: dict[int, float], now: int, total: int) -> set[int]:
        """What is protected and, up to `total` tokens, those with the highest scores. In a step in which there are more
        than the budget as many go as go in a burst."""
        if self.prompted and self.budget.burst > 1:
            if len(self.keys) <= self.budget.total:
                return self.kept
            total = len(self.keys) - self.budget.burst
        protected = self.protected(now) | self.pinned(now)
        seen = {p: score if self.visible(p, now + 1) else -1.0 - p for p, score in scores.items()}
        rest = sorted(self.kept - protected, key=lambda p: (-seen[p], p))
        room = total - len(protected)
        if 0 < room < len(rest):
            gap = seen[rest[room - 1]] - seen[rest[room]]
            if gap == 0 and self.same_number_ties:
                gap = min(
                    (abs(seen[p] - seen[rest[room]]) for p in rest if seen[p] != seen[rest[room]]), default=math.inf
                )
            self.closest = min(self.closest, gap)
        return protected | set(rest[:room])


class H2OOracle(RankedOracle):
    """The score of a token is all the attention it has received."""

    def attended(self, position: int, probability: float) -> None:
        self.scores[position] += probability


class HeavyOracle(H2OOracle):
    """H2O with `recent` = 0."""


class RandomOracle(RankedOracle):
    """The score of a token is a hash of where it stands."""

    def first_score(self, position: int) -> float:
        return uniform(self, position)

    def staying(self, now: int) -> set[int]:
        staying = super().staying(now)
        self.closest = math.inf  # hashes are exact
        return staying


def uniform(oracle: EvictionOracle, position: int) -> float:
    """A hash of where a token stands, in [0, 1)."""
    state = 0
    for part in (oracle.seed, oracle.seed >> 32, oracle.layer, oracle.row_id, oracle.head, position):
        state = (state + part % 2**32 + 0x9E3779B9) % 2**32
        state ^= state >> 16
        state = state * 0x7FEB352D % 2**32
        state ^= state >> 15
        state = state * 0x045D9F3B % 2**32
        state ^= state >> 16
    return (state >> 8) / 2**24
