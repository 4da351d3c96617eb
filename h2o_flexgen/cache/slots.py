"""Slots of a cache whose tokens are ranked by score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import spans
from h2o_flexgen.cache.eviction.base import AttendedPrompts, AttendedStep, PromptRows, RankedPolicy, Tokens
from h2o_flexgen.cache.eviction.choice import choose, rank_keys
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.lengths import NEVER, CacheLengths
from h2o_flexgen.cache.ring_slots import CacheSlots, Held, Queries, Rows
from h2o_flexgen.cache.vectors import index_of, lowest
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.types import Logits, Ranking, RankRule

_BEST = 0x7FFFFFFF  # as score bits: above every number
_WORST = -1  # and below


class _StepPlan(NamedTuple):
    """Numbers that torch steps count from, the same in all layers. Numbers per row are (b, 1, 1) int32."""

    first: Tensor
    """Positions of the first step's tokens, for each head: (b * kv_heads,) int32."""
    last: Tensor
    """The last slot of each row and head, (b * kv_heads,) int64."""
    evicts_at: Tensor
    """The first step that evicts, (b * kv_heads,) int64."""
    bound: Tensor
    """At the first step: positions above this are protected."""
    leaving: Tensor
    """At the first step: the position that has just left the window."""
    sinks: Tensor
    protects: bool
    """Whether any row has recent tokens."""
    leaves_from: int
    """No token has left the window before this step."""
    sink_steps: int
    """New tokens can be sinks only before this step (after prompts shorter than `sinks`)."""


class ScoredSlots(CacheSlots):
    """Stores score and position of every slot, 8 bytes; with rolling positions also its rank in time, 12 bytes.

    Eviction only changes the index of the free slot; the next token overwrites K, V, score and position there. Sinks,
    tokens kept in spans and empty slots have the score +inf, which additions do not change: they are never the lowest.
    """

    score: Tensor

    def __init__(
        self,
        lengths: CacheLengths,
        policy: RankedPolicy,
        kv_heads: int,
        capacity: int,
        layer: int,
        row_ids: Sequence[int],
    ) -> None:
        self._lengths, self._policy, self._layer = lengths, policy, layer
        self.needs_rows, self.scores_keys = policy.needs_rows, policy.scores_keys
        device = lengths.device
        rows = len(lengths.budgets)
        self._shape = (rows, kv_heads, capacity)
        self.score = torch.empty(self._shape, device=device)
        self._pos = torch.empty(self._shape, dtype=torch.int32, device=device)
        if not lengths.resumed:
            self.score.fill_(torch.inf)
            self._pos.fill_(-1)
        self._extra = torch.zeros(self._shape, device=device) if policy.keeps_two else None
        self.table: tuple[Tensor, Tensor] = self.score, self._pos
        self._pins = any(budget.spans for budget in lengths.budgets)
        self.packs = type(policy).prompt_scores is H2OPolicy.prompt_scores and not self._pins
        kind = type(policy)
        self.pick: Callable[[int, Tensor, Tensor, Tensor], None] | None = None
        """A kernel's way to find the next free slots, see `NativeAttend.pick`; None: torch's."""
        self._moves: tuple[list[int], Tensor] | None = None
        self._queries: Tensor | None = None  # (b, m, heads, d), each at its position modulo m
        self.thins = lengths.bursts and all(b.full or b.burst > 1 for b in lengths.budgets)
        """Whether all tokens go in bursts, so that nothing is chosen in between: see `between_bursts`."""
        self._plain = not lengths.bursts and kind.update is RankedPolicy.update and kind.ranks is RankedPolicy.ranks
        self._flat_score, self._flat_pos = self.score.view(-1), self._pos.view(-1)
        self._rows = row_ids
        self._base = torch.arange(rows * kv_heads, device=device) * capacity
        self._rank: Tensor | None = None
        self._resumed: Tensor | None = None  # free slots (b, kv_heads) of rows that come from other caches

    def scores_of(self, rows: Rows, prompts: AttendedPrompts, budget: Budget) -> Tensor | None:
        """Scores for `fill`, of prompts of one budget: (n, parts, kv_heads, S) float32; None: no score decides.

        Part 0 ranks the prompt's tokens; part 1 holds the scores that decode steps start from, unless they are part 0;
        part 2 the second numbers of a policy that `keeps_two`.
        """
        if not budget.scored:
            return None
        places = torch.arange(prompts.length, device=prompts.k.device)
        row_ids, heads = (x.to(prompts.k.device) for x in (self._row_ids[rows], self._heads))
        asked = PromptRows(Tokens(places, row_ids, heads, self._layer), budget, self._lengths.window)
        rank, state, extra = spans.prompt_scores(self._policy, prompts, asked)
        state = rank if state is None else state
        parts = [rank] if state is rank and extra is None else [rank, state] if extra is None else [rank, state, extra]
        return torch.stack(parts, dim=1)

    def fill(self, rows: Rows, length: int, budget: Budget, scores: Tensor | None) -> Tensor | None:
        if scores is None and not budget.scored:
            scores = torch.zeros((), device=self._lengths.device).expand(1, *self._shape[1:2], length)
        if scores is None:
            raise ValueError(f"{self._policy.name} needs scores of the prompt's tokens")
        rank, *others = scores.unbind(1) if scores.dim() == 4 else (scores,)
        positions = torch.arange(length, device=self._lengths.device)
        kept, state = None, others[:1] or [rank]
        if length > budget.after_prompt:
            kept = positions = choose(rank, positions, budget, self._lengths.window)
        for held, part in zip((self.score, self._extra), (*state, *others[1:]), strict=False):
            if held is not None:
                held[rows, :, : positions.shape[-1]] = part if kept is None else part.gather(-1, kept)
        count = positions.shape[-1]
        self.score[rows, :, : min(budget.sinks, count)] = torch.inf
        self._pos[rows, :, :count] = positions.to(torch.int32)
        return kept

    def resume(self, parts: Sequence[tuple[CacheSlots, Sequence[int]]]) -> None:
        pos, score, free, extra = [], [], [], []
        self._queries = _last_queries(parts)
        for slots, rows in parts:
            index = index_of(rows, self._lengths.device)
            free.append(slots.free()[index])
            if isinstance(slots, ScoredSlots):
                pos.append(slots._pos[index])
                score.append(slots.score[index])
                extra += [] if slots._extra is None else [slots._extra[index]]
            else:
                # No score decides in these rows: only what must not go has to stand out.
                pos.append(slots.positions()[index])
                sinks = torch.tensor([b.sinks for b in self._lengths.budgets], device=self._lengths.device)
                first = sum(map(len, free)) - len(rows)
                lasting = pos[-1] < sinks[first : first + len(rows)].view(-1, 1, 1)
                score.append(torch.zeros_like(pos[-1], dtype=torch.float32).masked_fill_(lasting, torch.inf))
                extra.append(torch.zeros_like(score[-1]))
        torch.cat(pos, out=self._pos)
        torch.cat(score, out=self.score)
        if self._extra is not None:
            torch.cat(extra, out=self._extra)
        self._resumed = torch.cat(free)
        freed = self._freed((self._resumed.view(-1) + self._base).view(self._shape[:2]))
        self._flat_pos.index_fill_(0, freed, -1)
        self._flat_score.index_fill_(0, freed, torch.inf)

    def free(self) -> Tensor:
        if self._lengths.started:
            return (self._free - self._base).view(self._shape[:2])
        return self._first_free()

    def start(self, rolling: bool) -> None:
        self._free = self._base + self._first_free().reshape(-1)
        if rolling:  # ranks in time before the first step, of which free slots have the last
            order = self._pos.masked_fill(self._pos < 0, torch.iinfo(torch.int32).max).argsort(-1).argsort(-1)
            self._rank = order.masked_fill_(self._pos < 0, self._shape[2] - 1).to(torch.int32)

    @property
    def _plan(self) -> _StepPlan:
        return self._lengths.once("plan of scored slots", self._make_plan)

    def _make_plan(self) -> _StepPlan:
        lengths, window, now = self._lengths, self._lengths.window, self._now
        budgets = list(zip(lengths.budgets, now, lengths.held, strict=True))
        width = 1 << 32 if window is None else window
        # Without a window, or with a very wide one, this position would lie below int32.
        numbers = [(n - b.recent, max(n + 1 - width, -(1 << 31)), b.sinks) for b, n, _ in budgets]
        bound, leaving, sinks = torch.tensor(numbers, dtype=torch.int32, device=lengths.device).T[..., None, None]
        return _StepPlan(
            first=self._per_head(now).to(torch.int32),
            last=self._base + self._per_head([limit - 1 for limit in lengths.limits]),
            evicts_at=self._per_head([NEVER if b.full else b.total - held for b, _, held in budgets]),
            bound=bound,
            leaving=leaving,
            sinks=sinks,
            protects=any(budget.recent for budget in lengths.budgets),
            leaves_from=NEVER if window is None else window - 1 - max(now),
            sink_steps=max(b.sinks - n for b, n, _ in budgets),
        )

    @property
    def _now(self) -> list[int]:
        """Positions of the first step's tokens, by row."""
        return [now - self._lengths.step for now in self._lengths.next_pos]

    @cached_property
    def _row_ids(self) -> Tensor:
        return torch.tensor(self._rows, device=self._lengths.device).view(-1, 1, 1)

    @cached_property
    def _heads(self) -> Tensor:
        return torch.arange(self._shape[1], device=self._lengths.device).view(1, -1, 1)

    @cached_property
    def _first_new(self) -> Tensor:
        """Positions of the first step's tokens, (b, 1, 1)."""
        return torch.tensor(self._now, device=self._lengths.device).view(-1, 1, 1)

    @contextmanager
    def rewound(self, used: Tensor) -> Iterator[Tensor]:
        """Within, the slots `used` (b, kv_heads) by the last step are free again; its end restores the tables."""
        state = [self.score, self._pos, self._free, *([] if self._extra is None else [self._extra])]
        saved = [each.clone() for each in state]
        yield self._free.copy_(used.view(-1) + self._base)
        for table, copy in zip(state, saved, strict=True):
            table.copy_(copy)

    @property
    def ranking(self) -> Ranking:
        """The state that a kernel changes which does the work of `allocate` and `evict` itself; after `start`."""
        return Ranking(self.score, self._pos, self._free)

    def rule(self, packed: bool) -> RankRule | None:
        """The policy's ranking rule, if the C kernel knows it for keys that are `packed` or plain; else None."""
        by, budgets = self._policy.by, self._lengths.budgets
        if by is None or self._pins or self.thins != (by == "rare") or (packed and by == "difference"):
            return None  # the kernel counts for bursts, and chooses nothing by what it has counted
        scopes = self._lengths.once("scopes", lambda: torch.tensor([self._policy.scope(budget) for budget in budgets]))
        return RankRule(by, self._extra, scopes)

    @property
    def adds(self) -> bool | None:
        """Whether every step adds its probabilities to the scores; None: the policy has its own `update` or `ranks`."""
        return self.needs_rows if self._plain or (self.thins and self._policy.looks_back) else None

    def fresh(self, step: int | Tensor, keys: Tensor | None = None) -> Tensor | None:
        """Scores of the tokens of `step`, (b, kv_heads, 1) float32; None: zero.

        On a device the number may be counted there, as (b, kv_heads). keys: as `allocate` has them.
        """
        if type(self._policy).new_scores is RankedPolicy.new_scores:
            return None
        past = step.unsqueeze(-1) if isinstance(step, Tensor) else step
        return self._policy.new_scores(self._tokens(self._first_new + past, self._row_ids), keys)

    def take(self, keys: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """As `allocate`, where a kernel writes position and score itself: the slots, and the latter as `fresh` says."""
        if self._extra is not None:
            self._extra.view(-1).index_fill_(0, self._free, 0.0)
        return self._free, self.fresh(self._lengths.step, keys)

    def allocate(self, keys: Tensor | None = None) -> Tensor:
        plan, step = self._plan, self._lengths.step
        new = self._lengths.at_step("new positions by head", lambda: plan.first + step)
        free, score = self.take(keys)
        if step < plan.sink_steps:
            # By a mask, not by an index of those that are sinks: how many there are only the device knows.
            first = torch.zeros(self._shape[:2], device=free.device) if score is None else score.squeeze(-1)
            first = first.masked_fill(new.view(self._shape[:2]) < plan.sinks.squeeze(-1), torch.inf)
            self._flat_score.index_copy_(0, free, first.view(-1))
        elif score is None:
            self._flat_score.index_fill_(0, free, 0.0)
        else:
            self._flat_score.index_copy_(0, free, score.view(-1))
        self._flat_pos.index_copy_(0, free, new)
        if self._rank is not None:
            self._rank.view(-1).index_copy_(0, free, self._lengths.at_step("newest ranks by head", self._newest))
        return free

    def _newest(self) -> Tensor:
        """The rank of each row's newest token, for each of its heads: (b * kv_heads,) int32."""
        return self._lengths.newest_ranks.to(torch.int32).repeat_interleave(self._shape[1])

    def ranks(self, width: int) -> Tensor:
        return required(self._rank, "this cache was started without rolling positions")[..., :width]

    def evict(self, row: Tensor | None, length: int, held: Held, asked: Queries | None = None) -> None:
        """See CacheSlots. Runs where torch computes the step, or a kernel leaves scores to the policy.

        Otherwise the kernel of the step evicts by itself, on the tensors of `ranking`: `victim` in
        kernels/native/victims.h, `evict` in kernels/triton_decode_kernels.py. `FusedStep` chooses.
        """
        ranks, lengths, self._moves = self.score[..., :length], self._lengths, None
        if not self._plain:
            step = self._attended(row, length, held, asked)
            if self.needs_rows:
                self._policy.update(step)
            if bursting := lengths.bursting:
                self._moves = bursting, self._thinning(step, bursting)
            if lengths.step >= lengths.milestones.first_alone:
                masked = self.pick is None or self._pins  # else kernels do not look at sinks
                ranks = self._ranked(step, slice(None)) if masked else self._policy.ranks(step)
        elif row is not None:
            ranks.add_(row)
        if self.pick is None:
            self._free = self._next_free(ranks, length)
        else:
            self.pick(lengths.step, ranks, self._pos, self._free)
        if self._moves is not None:
            self._thin(*self._moves)
        if self._rank is not None:
            # Tokens newer than the evicted one lose one rank: the shift gives -1 where the difference is negative. A
            # free slot has the highest rank until it is taken.
            gone = self._rank.view(-1).index_select(0, self._free).view(*self._shape[:2], 1)
            self._rank += (gone - self._rank).bitwise_right_shift_(31)

    def between_bursts(self, length: int, held: Held, asked: Queries) -> None:
        """In place of `evict` where all tokens go in bursts and a kernel does the rest; arguments as there."""
        self._moves = None
        if self._policy.looks_back:
            self._keep_queries(asked.q)
        if bursting := self._lengths.bursting:
            self._moves = bursting, self._thinning(self._attended(None, length, held, asked, kept=True), bursting)
            self._thin(*self._moves)

    def _ranked(self, step: AttendedStep, rows: Rows) -> Tensor:
        """The policy's ranks, with +inf for sinks, pinned spans and empty slots, whatever the policy made of them."""
        fixed = step.pos < self._plan.sinks[rows]
        if step.pinned is not None:
            fixed |= step.pinned
        return self._policy.ranks(step).masked_fill(fixed, torch.inf)

    def _thinning(self, step: AttendedStep, rows: list[int]) -> Tensor:
        """Chooses the tokens of `rows` that a burst evicts; returns the order that closes the gaps, `moves`."""
        device, capacity = self._lengths.device, self._shape[2]
        index = index_of(rows, device)
        some = step.of(index, rows)
        keys = self._keys(self._ranked(some, index), some.pos, index, several=True)
        keys = keys.masked_fill_(some.pos < 0, torch.iinfo(torch.int64).max)
        goes = lowest(keys, [budget.burst for budget in some.budgets])
        order = torch.arange(capacity, device=device).repeat(len(rows), self._shape[1], 1)
        # Staying tokens in order, then leaving ones: a count of the tokens before gives each its place, without a sort.
        stays = ~goes
        before = stays.cumsum(-1)
        behind = goes.cumsum(-1).add_(before[..., -1:])
        places = torch.where(stays, before, behind).sub_(1)
        order[..., : keys.shape[-1]].scatter_(-1, places, order[..., : keys.shape[-1]].clone())
        return order

    def _thin(self, rows: list[int], order: Tensor) -> None:
        device, index = self._lengths.device, index_of(rows, self._lengths.device)
        budgets = (self._lengths.budgets[row] for row in rows)
        held = torch.tensor([b.total + 1 - b.burst for b in budgets], device=device).view(-1, 1, 1)
        empty = torch.arange(self._shape[2], device=device) >= held
        for table, none in ((self.score, torch.inf), (self._pos, -1), (self._extra, 0.0)):
            if table is not None:
                table[index] = table[index].gather(-1, order).masked_fill_(empty, none)
        free = self._free.view(self._shape[:2])
        free[index] = held.squeeze(-1) + self._base.view(self._shape[:2])[index]

    def moves(self) -> tuple[list[int], Tensor] | None:
        return self._moves

    def restart(self, rows: list[int]) -> None:
        index = index_of(rows, self._lengths.device)
        for table, none in ((self.score, torch.inf), (self._pos, -1), (self._extra, 0.0)):
            if table is not None:
                table[index] = none
        self._free.view(self._shape[:2])[index] = self._base.view(self._shape[:2])[index]

    def go_on(self, lengths: CacheLengths) -> None:
        self._lengths, self._moves = lengths, None
        self._resumed = (self._free - self._base).view(self._shape[:2])
        self.__dict__.pop("_first_new", None)

    def _attended(
        self, row: Tensor | None, length: int, held: Held, asked: Queries | None, kept: bool = False
    ) -> AttendedStep:
        """kept: whether the queries of the step are remembered already."""
        now = self._lengths.at_step("newest positions", lambda: self._first_new + self._lengths.step)
        step = AttendedStep(
            self.score[..., :length],
            None if self._extra is None else self._extra[..., :length],
            row,
            self._pos[..., :length],
            now,
            self._tokens(now, self._row_ids),
            self._lengths.budgets,
            held,
            self._lengths.once,
            Logits(1.0) if asked is None else asked.logits,
            window=self._lengths.window,
            pinned=self.score[..., :length].isinf() if self._pins else None,
        )
        count = self._policy.looks_back
        if not count or asked is None:
            return step
        queries = self._queries if kept and self._queries is not None else self._keep_queries(asked.q)
        ring = torch.arange(count, device=queries.device)
        asked_at = now.view(-1, 1) - (now.view(-1, 1) - ring) % count
        return replace(step, queries=queries.transpose(1, 2), asked_at=asked_at)

    def _keep_queries(self, queries: Tensor) -> Tensor:
        """The newest (b, heads, d) in place of the oldest; returns all of them."""
        count, step = self._policy.looks_back, self._lengths.step
        if self._queries is None:
            self._queries = queries.new_zeros(len(queries), count, *queries.shape[1:])
        # By one index for all of a row's heads: `scatter_` has one for each number, and took as long as the layer.
        first = self._first_new.view(-1)
        rows = self._lengths.once("rows of queries", lambda: torch.arange(len(first), device=first.device) * count)
        places = self._lengths.at_step("places of queries", lambda: (first + step) % count + rows)
        self._queries.view(-1, *queries.shape[1:]).index_copy_(0, places, queries)
        return self._queries

    def seen(self, width: int) -> Tensor | None:
        if not self._lengths.hides:
            return None
        leaving = self._plan.leaving + self._lengths.step
        return self._pos[..., :width] >= leaving

    def positions(self) -> Tensor:
        table = self._pos.clone()
        if self._lengths.started:
            table.view(-1).index_fill_(0, self._freed(self._free.view(self._shape[:2])), -1)
        return table

    def _freed(self, free: Tensor) -> Tensor:
        """The empty slots in `free` (b, kv_heads), flat. Full rows are left out: theirs may hold the last token."""
        full = [budget.full for budget in self._lengths.budgets]
        if any(full):
            free = free[[row for row, held in enumerate(full) if not held]]
        return free.reshape(-1)

    def _first_free(self) -> Tensor:
        if self._resumed is not None:
            return self._resumed
        slots = [min(held, limit - 1) for held, limit in zip(self._lengths.held, self._lengths.limits, strict=True)]
        return self._per_head(slots).view(self._shape[:2])

    def _next_free(self, ranks: Tensor, length: int) -> Tensor:
        step, lengths = self._lengths.step, self._lengths
        if step >= lengths.milestones.all_evict and not lengths.bursts:
            return self._victims(ranks, length)
        following = torch.minimum(self._free + 1, self._plan.last)
        if step < lengths.milestones.first_alone:
            return following
        return torch.where(self._plan.evicts_at <= step, self._victims(ranks, length), following)

    def _victims(self, ranks: Tensor, length: int) -> Tensor:
        return self._keys(ranks, self._pos[..., :length], slice(None)).min(-1).indices.view(-1).add_(self._base)

    def _keys(self, ranks: Tensor, pos: Tensor, rows: Rows, several: bool = False) -> Tensor:
        """Sort keys, int64, of the tokens of `rows` at the end of a step: the lowest is evicted first. `several`: more
        than one token may have left the window since the last eviction, for example while the cache filled up."""
        plan, step = self._plan, self._lengths.step
        bits = ranks.view(torch.int32)
        if step >= plan.leaves_from:
            # The budget is smaller than the window: a token is evicted as soon as it leaves that, unless it is a sink.
            leaving, sinks = plan.leaving[rows] + step, plan.sinks[rows]
            several |= self._lengths.hides
            gone = (pos <= leaving) & (pos >= sinks) if several else (pos == leaving) & (leaving >= sinks)
            bits = bits.masked_fill(gone, _WORST)
        if plan.protects:
            # All ones where protected, by arithmetic: `where` branches on every slot and mispredicts half of them.
            protected = torch.sub(plan.bound[rows] + step, pos).bitwise_right_shift_(31)
            bits = protected.bitwise_and_(_BEST).bitwise_or_(bits)
        return rank_keys(bits, pos)

    def _per_head(self, values: Sequence[int]) -> Tensor:
        """One number per row, for each of its heads: (b * kv_heads,) int64."""
        return torch.tensor(values, device=self._lengths.device).repeat_interleave(self._shape[1])

    def _tokens(self, positions: Tensor, row_ids: Tensor) -> Tokens:
        return Tokens(positions, row_ids, self._heads, self._layer)


def _last_queries(parts: Sequence[tuple[CacheSlots, Sequence[int]]]) -> Tensor | None:
    """The last queries of the given rows, joined; zeros for rows that have had no decode step."""
    found = [(slots._queries if isinstance(slots, ScoredSlots) else None, rows) for slots, rows in parts]
    like = next((queries for queries, _ in found if queries is not None), None)
    if like is None:
        return None
    each = (like.new_zeros(len(rows), *like.shape[1:]) if own is None else own[list(rows)] for own, rows in found)
    return torch.cat(list(each))
