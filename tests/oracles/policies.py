"""The oracles of the policies that were published after H2O: one sequence, one KV head, loops and sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import mul

from tests.oracles.eviction import EvictionOracle, H2OOracle, RankedOracle, Vector, softmax, uniform
from tests.oracles.packed import rounded


def dot(a: Vector, b: Vector) -> float:
    return sum(map(mul, a, b))


class TovaOracle(RankedOracle):
    """The newest row, in the mean over all heads of the layer, decides for all of them at once."""

    def _evict(self) -> None:
        if self is not self.siblings[-1]:
            return
        rows = [each.history[-1] for each in self.siblings]
        mean = {p: sum(row.get(p, 0.0) for row in rows) / len(rows) for p in self.keys}
        for each in self.siblings:
            each.scores = dict(mean)
            EvictionOracle._evict(each)


class KnormOracle(RankedOracle):
    """Keys of small norm stay."""

    def first_score(self, position: int) -> float:
        return 1 / math.sqrt(dot(self.keys[position], self.keys[position]))


class KeyDiffOracle(RankedOracle):
    """Keys stay that are least like the mean direction of all."""

    def ranked(self, now: int) -> dict[int, float]:
        directions = {p: [x / math.sqrt(dot(key, key)) for x in key] for p, key in self.keys.items()}
        anchor = [sum(column) for column in zip(*directions.values(), strict=True)]
        length = math.sqrt(dot(anchor, anchor))
        return {p: 1 - dot(direction, anchor) / length for p, direction in directions.items()}


class H2OMeanOracle(H2OOracle):
    """All the attention that a token has received, by the number of queries that it was there for."""

    def ranked(self, now: int) -> dict[int, float]:
        return {p: score / (now - p + 1) for p, score in self.scores.items()}


class InertiaOracle(RankedOracle):
    """A running mean of what tokens receive; the prompt is pruned by the sums."""

    def attended(self, position: int, probability: float) -> None:
        self.scores[position] = 0.8 * self.scores[position] + 0.2 * probability

    def ranked(self, now: int) -> dict[int, float]:
        if self.prompted:
            return self.scores
        return {p: sum(row.get(p, 0.0) for row in self.history) for p in self.keys}


class RoCoOracle(RankedOracle):
    """The lowest mean goes among those whose attention varies least."""

    def staying(self, now: int) -> set[int]:
        leaving = len(self.keys) - self.budget.total
        if leaving <= 0:
            return self.kept
        mean, deviation = {}, {}
        for p in self.keys:
            received = [row.get(p, 0.0) for row in self.history[p:]]
            mean[p] = sum(received) / len(received)
            deviation[p] = max(0.0, sum(x * x for x in received) / len(received) - mean[p] ** 2)
        fixed = self.protected(now) | self.pinned(now)
        others = sorted(self.kept - fixed, key=lambda p: (deviation[p], -p))
        size = max(self.budget.total - 3 * self.budget.total // 10 - self.budget.sinks, leaving)
        scope, immune = others[:size], others[size:]
        gone = {p for p in self.keys if not self.visible(p, now + 1)} - self.protected(now)
        if len(gone) < leaving:
            if immune:
                self.closest = min(self.closest, 10 * (deviation[immune[0]] - deviation[scope[-1]]))
            order = sorted(set(scope) - gone, key=lambda p: (mean[p], -p))
            some = leaving - len(gone)
            if some < len(order):
                self.closest = min(self.closest, mean[order[some]] - mean[order[some - 1]])
            gone |= set(order[:some])
        return self.kept - set(sorted(gone)[: len(gone)])


class ScissorhandsOracle(RankedOracle):
    """Those go that most queries paid less than an even share."""

    same_number_ties = True

    def counted(self, now: int) -> list[int]:
        """The queries that count; `start` is the prompt's last."""
        self.start = getattr(self, "start", now)
        return [i for i in range(now + 1) if i > self.start - 400]

    def ranked(self, now: int) -> dict[int, float]:
        counts = dict.fromkeys(self.keys, 0)
        for i in self.counted(now):
            for p in self.keys:
                if p <= i:
                    paid = self.history[i].get(p, 0.0)
                    counts[p] += paid < 1 / (i + 1)
                    if abs(paid - 1 / (i + 1)) < 1e-6 and i > 0:
                        self.closest = 0.0
        return {p: 1e6 - count for p, count in counts.items()}


class BurstOracle(RankedOracle):
    """Prunes the prompt, and again whenever the budget is full, by what the last queries say."""

    looks_back = 0

    def staying(self, now: int) -> set[int]:
        if len(self.keys) <= (self.budget.total if self.prompted else self.budget.after_prompt):
            return self.kept
        return self.best(self.ranked(now), now, self.budget.after_prompt)

    def candidates(self, now: int) -> list[int]:
        fixed = self.protected(now) | self.pinned(now)
        return [p for p in sorted(self.keys) if p not in fixed and self.visible(p, now + 1)]

    def last(self, now: int) -> list[int]:
        count = max(1, min(self.looks_back, self.budget.burst))
        return list(range(max(0, now + 1 - count), now + 1))

    def logits(self, query: Vector, keys: Sequence[int]) -> list[float]:
        return self.capped([self.scale * dot(query, self.keys[p]) for p in keys])

    def near(self, values: dict[int, float], now: int, size: int) -> dict[int, list[float]]:
        """Of each candidate its value and those of neighbours, as far as they are candidates, too."""
        order, half = sorted(self.keys), size // 2
        return {
            p: [values[q] for q in order[max(0, i - half) : i + half + 1] if q in values]
            for i, p in enumerate(order)
            if p in values
        }


class RKVOracle(BurstOracle):
    """A little importance, less a lot of likeness."""

    looks_back = 8

    def ranked(self, now: int) -> dict[int, float]:
        chosen, asked = self.candidates(now), self.last(now)
        paid = dict.fromkeys(chosen, 0.0)
        for i in asked:
            heads = [self.logits(query, chosen) for query in self.queries[i]]
            for p, share in zip(chosen, softmax([max(column) for column in zip(*heads, strict=True)]), strict=True):
                paid[p] += share / len(asked)
        important = {p: max(values) for p, values in self.near(paid, now, 7).items()}
        size = {p: math.sqrt(dot(self.keys[p], self.keys[p])) for p in chosen}
        total = dict.fromkeys(chosen, 0.0)
        for i in chosen:
            row = {j: dot(self.keys[i], self.keys[j]) / size[i] / size[j] if i != j else 0.0 for j in chosen}
            self.closest = min([self.closest, *(abs(x - 0.5) for x in row.values())])
            row[max([j for j in chosen if row[j] > 0.5], default=chosen[0])] = 0.0
            for j, cosine in row.items():
                total[j] += cosine / len(chosen)
        alike = dict(zip(chosen, softmax([total[p] for p in chosen]), strict=True))
        return {p: 0.1 * important[p] - 0.9 * alike[p] if p in paid else -2.0 for p in self.keys}


class VaseOracle(BurstOracle):
    """The widest values, and a draw."""

    looks_back = 64

    def ranked(self, now: int) -> dict[int, float]:
        chosen, asked = self.candidates(now), self.last(now)
        kept = self.budget.total + 1 - self.budget.burst
        widest = min(kept // 4, max(0, kept - self.budget.sinks - self.budget.recent))
        spread = {p: math.inf if p < 4 else max(self.values[p]) - min(self.values[p]) for p in chosen}
        order = sorted(chosen, key=lambda p: (-spread[p], p))
        paid = dict.fromkeys(chosen, 0.0)
        for i in asked:
            for query in self.queries[i]:
                shares = softmax(self.logits(query, chosen))
                for p, share in zip(chosen, shares, strict=True):
                    paid[p] += share / len(asked) / len(self.queries[i])
        mean = {p: sum(values) / len(values) for p, values in self.near(paid, now, 5).items()}
        draw = {p: max(uniform(self, p + (now + 1) * 0x10001), 2**-25) for p in chosen}
        rings = {p: -math.log(draw[p]) / max(mean[p], 1e-30) for p in chosen}
        room = max(0, kept - self.budget.sinks - self.budget.recent) - widest
        late = sorted((p for p in chosen if p not in order[:widest]), key=lambda p: rings[p])
        if 0 < room < len(late):
            self.closest = min(self.closest, (rings[late[room]] - rings[late[room - 1]]) / rings[late[room]])
        if 0 < widest < len(order) and spread[order[widest - 1]] < math.inf:
            self.closest = min(self.closest, spread[order[widest - 1]] - spread[order[widest]])
        ranks = {p: 1.0 - late.index(p) / len(chosen) if p in late else 2.0 for p in chosen}
        return {p: ranks.get(p, -2.0) for p in self.keys}


class SnapKVDecodeOracle(BurstOracle):
    """What the last queries pay, and its neighbours."""

    looks_back, same_number_ties = 32, True

    def ranked(self, now: int) -> dict[int, float]:
        chosen, asked = self.candidates(now), self.last(now)
        paid = dict.fromkeys(chosen, 0.0)
        for i in asked:
            seen = [p for p in sorted(self.keys) if p <= i and self.visible(p, i)]
            for query in self.queries[i]:
                for p, share in zip(seen, softmax(self.logits(query, seen)), strict=True):
                    if p in paid:
                        paid[p] += share / len(asked) / len(self.queries[i])
        near = self.near(paid, now, 7)
        return {p: max(near[p]) if p in near else -2.0 for p in self.keys}


class PromptOracle(RankedOracle):
    """Ranks the prompt by `votes`; what comes after it is kept, too."""

    def staying(self, now: int) -> set[int]:
        if not self.prompted:
            return self.best(self.votes(now), now, self.budget.after_prompt)
        # Of a budget as wide as the window what leaves it goes.
        return self.kept if self.budget.prompt else self.best(self.scores, now, self.budget.total)

    def votes(self, now: int) -> dict[int, float]:
        """What the tokens of the prompt are ranked by."""
        raise NotImplementedError

    def sums(self, now: int) -> dict[int, float]:
        """What a policy that goes on starts from."""
        return dict.fromkeys(self.keys, 0.0)

    def received(self, now: int, count: int) -> dict[int, float]:
        """From the last `count` queries."""
        rows = self.history[max(0, now + 1 - count) : now + 1]
        return {p: sum(row.get(p, 0.0) for row in rows) for p in self.keys}


class SnapKVOracle(PromptOracle):
    """The votes of the last tokens, the largest among seven neighbours before them."""

    same_number_ties = True

    def sums(self, now: int) -> dict[int, float]:
        return self.received(now, self.budget.recent)

    def votes(self, now: int) -> dict[int, float]:
        sums, end = self.sums(now), now + 1 - self.budget.recent
        return {p: max(sums[i] for i in range(p - 3, p + 4) if 0 <= i < end) if p < end else 0.0 for p in self.keys}


class PyramidKVOracle(SnapKVOracle):
    """SnapKV; what a layer may keep is another matter."""


class NaclOracle(PromptOracle):
    """The votes of the last tenth, and a draw."""

    def proxies(self, now: int) -> int:
        kept = self.budget.after_prompt
        return self.budget.recent if self.budget.prompt else max(1, min(math.ceil((now + 1) / 10), kept // 2))

    def sums(self, now: int) -> dict[int, float]:
        return self.received(now, self.proxies(now))

    def votes(self, now: int) -> dict[int, float]:
        sums = self.sums(now)
        rest = [p for p in self.keys if p not in self.protected(now) and self.visible(p, now + 1)]
        chosen = self.budget.heavy - math.floor(0.35 * self.budget.heavy)
        order = sorted(rest, key=lambda p: (-sums[p], p))
        if not 0 < self.budget.heavy < len(order):
            return sums
        self.closest = min(self.closest, sums[order[chosen - 1]] - sums[order[chosen]])
        # A race of exponential clocks at the rates exp(score): the first to ring are drawn.
        rings = {p: -math.log(max(uniform(self, p), 2**-25)) / math.exp(sums[p]) for p in order[chosen:]}
        return {p: 3.0 if p in order[:chosen] else math.exp(-rings[p]) if p in rings else 0.0 for p in self.keys}


class DefensiveOracle(PromptOracle):
    """The most that any query of any head paid, smoothed; not below the mean; times the value's L1 norm."""

    def sums(self, now: int) -> dict[int, float]:
        return self.received(now, self.budget.recent)

    def votes(self, now: int) -> dict[int, float]:
        end = now + 1 - self.budget.recent
        worst = dict.fromkeys(range(end), 0.0)
        for query in range(max(0, end), now + 1):
            for asked in self.queries[query]:
                seen = [p for p in range(query + 1) if self.visible(p, query)]
                turned = self.rotate(asked, query)
                logits = self.capped([self.scale * dot(turned, self.rotate(self.keys[p], p)) for p in seen])
                row = dict(zip(seen, softmax(logits), strict=True))
                own = [row.get(p, 0.0) for p in range(end)]
                smooth = [sum(near) / len(near) for near in (own[max(0, p - 2) : p + 3] for p in range(end))]
                factor = sum(own) / sum(smooth) if sum(smooth) else 0.0
                worst = {p: max(worst[p], factor * smooth[p]) for p in range(end)}
        least = sum(worst.values()) / max(1, end)
        norms = {p: sum(map(abs, value)) for p, value in self.values.items()}
        return {p: max(worst[p], least) * norms[p] if p < end else 0.0 for p in self.keys}


class KVzipOracle(PromptOracle):
    """The prompt comes twice; the most that any query of the second pays a token of the first."""

    replays = True
    chunk = 2048

    def prompt(
        self, queries: Sequence[Sequence[Vector]], keys: Sequence[Vector], values: Sequence[Vector]
    ) -> list[list[list[float]]]:
        outputs = [self._attend(*token) for token in zip(queries, keys, values, strict=True)]
        self.own = self.length // 2
        self.rows = [self.replayed(i) for i in range(self.own, self.length)]
        for position in range(self.own, self.length):
            del self.keys[position], self.values[position], self.scores[position]
        self.length = self.own
        del self.history[self.own :]
        self._evict()
        return outputs

    def replayed(self, query: int) -> list[dict[int, float]]:
        """What each head's query there pays, of the chunk that it repeats, the first four and the replay."""
        part = (query - self.own) // self.chunk
        seen = [p for p in range(query + 1) if self.visible(p, query)]
        if self.window is None:
            seen = [p for p in seen if p < 4 or p % self.own // self.chunk == part]
        heads = []
        for asked in self.queries[query]:
            turned = self.rotate(asked, query)
            logits = self.capped([self.scale * dot(turned, self.rotate(self.keys[p], p)) for p in seen])
            heads.append(dict(zip(seen, softmax(logits), strict=True)))
        return heads

    def votes(self, now: int) -> dict[int, float]:
        return {p: max(row.get(p, 0.0) for heads in self.rows for row in heads) for p in self.keys}

    def sums(self, now: int) -> dict[int, float]:
        return {p: sum(row.get(p, 0.0) for heads in self.rows for row in heads) / len(self.rows[0]) for p in self.keys}


class ExpectedAttentionOracle(PromptOracle):
    """The attention that normally distributed queries are expected to pay, times the norm of the value."""

    def votes(self, now: int) -> dict[int, float]:
        length, d = now + 1, len(self.keys[0])
        keys = {p: self.rotate(key, p) for p, key in self.keys.items()}
        first = [p for p in sorted(self.keys) if p >= self.budget.sinks and self.visible(p, length)]
        total = dict.fromkeys(self.keys, 0.0)
        group = len(self.queries[0])
        turning = self.mean_turn(length, d)
        for head in range(group):
            raw = [self.unturned(token[head], p) for p, token in enumerate(self.queries)][min(self.budget.sinks, now) :]
            mean = [sum(column) / len(raw) for column in zip(*raw, strict=True)]
            # The variance of q . k over queries turned by the mean rotation is that of q over k turned back by it.
            logits = []
            for p in first:
                back = [dot(column, keys[p]) for column in zip(*turning, strict=True)]
                spread = sum((dot(query, back) - dot(mean, back)) ** 2 for query in raw) / len(raw)
                logits.append(self.scale * dot(mean, back) + self.scale**2 * spread / 2)
            for p, share in zip(first, softmax(logits), strict=True):
                total[p] += share / group * math.sqrt(dot(self.values[p], self.values[p]))
        return total

    def unturned(self, query: Vector, position: int) -> Vector:
        return query if self.rotated_by is None else self.rotated_by(query, position, -1)

    def mean_turn(self, length: int, d: int) -> list[list[float]]:
        """The mean of the matrices that queries at the next 512 positions are turned by, row by row."""

        def turned(axis: list[float], position: int) -> Vector:
            return self.rotate(axis, position) if self.rotated_by is None else self.rotated_by(axis, position, 1)

        axes = [[float(i == j) for i in range(d)] for j in range(d)]
        columns = [
            [sum(column) / 512 for column in zip(*(turned(axis, length + i) for i in range(512)), strict=True)]
            for axis in axes
        ]
        return [list(row) for row in zip(*columns, strict=True)]


@cache
def then_h2o(oracle: type[PromptOracle]) -> type[EvictionOracle]:
    """`oracle` for the prompt, H2O after it."""

    class Then(oracle):  # type: ignore[misc, valid-type]
        def staying(self, now: int) -> set[int]:
            if self.prompted:
                return self.best(self.scores, now, self.budget.total)
            asked = self.budget
            self.budget = replace(asked, recent=max(1, min(32, asked.recent)))
            votes, self.scores = self.votes(now), self.sums(now)
            self.budget = asked
            return self.best(votes, now, asked.total)

        def attended(self, position: int, probability: float) -> None:
            self.scores[position] += probability

    return Then


class RecallOracle(H2OOracle):
    """H2O, from which nothing is lost: in each of 16 steps, then in every fourth, what the new query would pay most by
    keys of 4 bits comes back, at most a quarter as many as are heavy, in place of what it would pay least."""

    same_number_ties = True
    every = 4
    raw: tuple[Vector, Vector] | None = None
    """The step's key and value, where a cache of few bits holds others."""

    def prompt(
        self, queries: Sequence[Sequence[Vector]], keys: Sequence[Vector], values: Sequence[Vector]
    ) -> list[list[list[float]]]:
        self.shelf = {p: token for p, token in enumerate(zip(keys, rounded(keys, 4), values, strict=True))}
        self.taken = 0
        self.looked: list[tuple[int, float, float]] = []
        return super().prompt(queries, keys, values)

    def step(self, queries: Sequence[Vector], key: Vector, value: Vector) -> list[list[float]]:
        own, its = self.raw or (key, value)
        self.shelf[self.length] = own, rounded([own], 4)[0], its
        if (self.taken < 16 or self.taken % self.every == 0) and self.budget.scored:
            self.look(queries, self.length)
        self.taken += 1
        return super().step(queries, key, value)

    def look(self, queries: Sequence[Vector], now: int) -> None:
        seen = [p for p in sorted(self.shelf) if self.visible(p, now)]
        paid = []
        for query in queries:
            logits = [self.scale * sum(map(mul, query, self.shelf[p][1])) for p in seen]
            paid.append(dict(zip(seen, softmax(self.capped(logits)), strict=True)))
        worth = {p: max(each[p] for each in paid) for p in seen}
        near = {p: max(worth[other] for other in range(p - 3, p + 4) if other in worth) for p in seen}
        # The newest token is here all the same.
        away = sorted((p for p in seen if p != now and p not in self.keys), key=lambda p: (-near[p], p))
        stay = self.protected(now) | self.pinned(now)
        leaves = sorted((p for p in seen if p in self.keys and p not in stay), key=lambda p: (near[p], -p))
        most = min(64, max(1, self.budget.heavy // 4))
        pairs = list(zip(away[:most], leaves[:most], strict=False))
        swaps = [(back, gone) for back, gone in pairs if near[back] > near[gone]]
        self._close(near, swaps, away, leaves, pairs)
        best = max((self.scores[gone] for _, gone in swaps), default=0.0)
        for back, gone in swaps:
            del self.keys[gone], self.values[gone], self.scores[gone]
            self.keys[back], self.values[back], self.scores[back] = self.shelf[back][0], self.shelf[back][2], best
        self.round([back for back, _ in swaps])
        mean = {p: sum(each[p] for each in paid) / len(paid) for p in seen}
        held = [mean[p] for p in seen if p in self.keys or p == now]
        self.looked.append((len(swaps), sum(held), sum(sorted(mean.values())[-len(held) :])))

    def round(self, positions: Sequence[int]) -> None:
        """What comes back is kept as it came, but in a cache of few bits."""

    def _close(
        self,
        near: dict[int, float],
        swaps: list[tuple[int, int]],
        away: list[int],
        leaves: list[int],
        pairs: list[tuple[int, int]],
    ) -> None:
        """Notes what the choice has hung on, but for ties, which are of one number."""
        gaps = [abs(near[back] - near[gone]) for back, gone in pairs]
        for order in (away, leaves):
            if 0 < len(swaps) < len(order):
                gaps.append(abs(near[order[len(swaps) - 1]] - near[order[len(swaps)]]))
        self.closest = min([self.closest, *(gap for gap in gaps if gap)])
