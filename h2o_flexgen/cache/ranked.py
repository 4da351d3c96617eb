"""Slots ranked by score: the lowest score outside the sinks and the recent window gives its slot to the next token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from h2o_flexgen.cache.clock import NEVER, RowClock
from h2o_flexgen.cache.eviction.base import RankedPolicy, Tokens
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.slots import Rows, SlotBook
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.kernels.types import Ranking

_BEST = 0x7FFFFFFF  # as score bits: above every number
_WORST = -1  # and below


def rank_keys(score_bits: Tensor, positions: Tensor) -> Tensor:
    """(score, position) as one int64 that orders like them: higher is better, equal scores favour the lower position.

    `score_bits` are float32 scores viewed as int32; no score is negative, so they order like the scores. All keys of a
    (row, head) differ: what is chosen by key is exact, and the same on every device.
    """
    return score_bits.to(torch.int64).bitwise_left_shift_(32).sub_(positions.to(torch.int64))


class RankedSlots(SlotBook):
    """Keeps score and position of every slot: 8 bytes; with rolling positions its rank in time, too: 12.

    Evicting changes nothing but the index of the free slot; the next token overwrites K, V, score and position there.
    Sinks and empty slots have the score +inf, whatever is added to it, so that they are never the lowest.
    """

    score: Tensor

    def __init__(
        self, clock: RowClock, policy: RankedPolicy, kv_heads: int, capacity: int, layer: int, row_ids: Sequence[int]
    ) -> None:
        self._clock, self._policy, self._layer = clock, policy, layer
        self.needs_rows = policy.needs_rows
        device = clock.device
        rows = len(clock.budgets)
        self._shape = (rows, kv_heads, capacity)
        self.score = torch.empty(self._shape, device=device)
        self._pos = torch.empty(self._shape, dtype=torch.int32, device=device)
        if not clock.resumed:
            self.score.fill_(torch.inf)
            self._pos.fill_(-1)
        self.table = self.score, self._pos
        self.packs = type(policy).prompt_scores is H2OPolicy.prompt_scores
        self._flat_score, self._flat_pos = self.score.view(-1), self._pos.view(-1)
        self._rows = row_ids
        self._base = torch.arange(rows * kv_heads, device=device) * capacity
        self._rank: Tensor | None = None
        self._resumed: Tensor | None = None  # free slots (b, kv_heads) of rows that come from other books

    def fill(self, rows: Rows, length: int, budget: Budget, column_sums: Tensor | None) -> Tensor | None:
        positions = torch.arange(length, device=self._clock.device)
        score = self._policy.prompt_scores(self._tokens(positions, self._row_ids[rows]), column_sums)
        kept = None
        if length > budget.total:
            kept = _choose(score, positions, budget, self._clock.window)
            score, positions = score.gather(-1, kept), kept
        held = score.shape[-1]
        self.score[rows, :, :held] = score
        self.score[rows, :, : min(budget.sinks, held)] = torch.inf
        self._pos[rows, :, :held] = positions.to(torch.int32)
        return kept

    def resume(self, parts: Sequence[tuple[SlotBook, Sequence[int]]]) -> None:
        pos, score, free = [], [], []
        for book, rows in parts:
            index = _index_of(rows, len(book.free()), self._clock.device)
            free.append(_rows_of(book.free(), index))
            if isinstance(book, RankedSlots):
                pos.append(_rows_of(book._pos, index))
                score.append(_rows_of(book.score, index))
            else:
                # No score decides in these rows: only what must not go has to stand out.
                pos.append(_rows_of(book.positions(), index))
                sinks = torch.tensor([b.sinks for b in self._clock.budgets], device=self._clock.device)
                first = sum(map(len, free)) - len(rows)
                lasting = pos[-1] < sinks[first : first + len(rows)].view(-1, 1, 1)
                score.append(torch.zeros_like(pos[-1], dtype=torch.float32).masked_fill_(lasting, torch.inf))
        torch.cat(pos, out=self._pos)
        torch.cat(score, out=self.score)
        self._resumed = torch.cat(free)
        freed = self._freed((self._resumed.view(-1) + self._base).view(self._shape[:2]))
        self._flat_pos.index_fill_(0, freed, -1)
        self._flat_score.index_fill_(0, freed, torch.inf)

    def free(self) -> Tensor:
        if self._clock.started:
            return (self._free - self._base).view(self._shape[:2])
        return self._first_free()

    def start(self, rolling: bool) -> None:
        self._free = self._base + self._first_free().reshape(-1)
        self._prepared = False
        self._rank = self._ranks_in_time() if rolling else None

    def _prepare(self) -> None:
        """What `take` and `settle` count by; a kernel that does their work has no use for it."""
        clock, now, held = self._clock, self._now, self._clock.held
        self._last = self._base + self._per_head([limit - 1 for limit in clock.limits])
        self._evicts_at = self._per_head(
            [NEVER if b.full else b.total - h for b, h in zip(clock.budgets, held, strict=True)]
        )
        self._new = self._per_head(now).to(torch.int32)
        # A slot is protected where position > now - recent.
        bound = [n - b.recent for b, n in zip(clock.budgets, now, strict=True)]
        self._bound = torch.tensor(bound, dtype=torch.int32, device=clock.device).view(-1, 1, 1)
        self._protects = any(budget.recent for budget in clock.budgets)
        window = clock.window
        self._first_leaving = NEVER if window is None else window - 1 - max(now)  # no token has left before this step
        if window is not None:
            first = [max(n + 1 - window, -(1 << 31)) for n in now]  # of a window that nothing ever leaves, too
            leaving = torch.tensor(first, dtype=torch.int32, device=clock.device)
            self._leaving = leaving.view(-1, 1, 1)
            sinks = torch.tensor([b.sinks for b in clock.budgets], dtype=torch.int32, device=clock.device)
            self._kept_sinks = sinks.view(-1, 1, 1)
        # New tokens below `sinks` come only after prompts shorter than that.
        self._sinks = self._per_head([b.sinks for b in clock.budgets])
        self._sink_steps = max(b.sinks - n for b, n in zip(clock.budgets, now, strict=True))
        self._prepared = True

    @property
    def _now(self) -> list[int]:
        """Positions of the first step's tokens, by row."""
        return [now - self._clock.step for now in self._clock.next_pos]

    @cached_property
    def _row_ids(self) -> Tensor:
        return torch.tensor(self._rows, device=self._clock.device).view(-1, 1, 1)

    @cached_property
    def _heads(self) -> Tensor:
        return torch.arange(self._shape[1], device=self._clock.device).view(1, -1, 1)

    @cached_property
    def _first_new(self) -> Tensor:
        """Positions of the first step's tokens, (b, 1, 1)."""
        return torch.tensor(self._now, device=self._clock.device).view(-1, 1, 1)

    @property
    def ranking(self) -> Ranking:
        """The state that a kernel changes which does the work of `take` and `settle` itself; after `start`."""
        return Ranking(self.score, self._pos, self._free)

    @property
    def adds(self) -> bool | None:
        """Whether scores grow by the probabilities of every step; None: the policy has something else in mind."""
        if not self.needs_rows:
            return False
        return True if type(self._policy).accumulate is RankedPolicy.accumulate else None

    def fresh(self, step: int | Tensor) -> Tensor | None:
        """Scores of the tokens of `step`, (b, kv_heads, 1) float32; None: zero.

        On a device the number may be counted there, as (b, kv_heads).
        """
        if type(self._policy).new_scores is RankedPolicy.new_scores:
            return None
        past = step.unsqueeze(-1) if isinstance(step, Tensor) else step
        return self._policy.new_scores(self._tokens(self._first_new + past, self._row_ids))

    def take(self) -> Tensor:
        if not self._prepared:
            self._prepare()
        free, new = self._free, self._new
        score = self.fresh(self._clock.step)
        if self._clock.step < self._sink_steps:
            # By a mask, not by an index of those that are sinks: how many there are only the device knows.
            first = torch.zeros_like(self._flat_score[: len(free)]) if score is None else score.view(-1)
            self._flat_score.index_copy_(0, free, first.masked_fill(new < self._sinks, torch.inf))
        elif score is None:
            self._flat_score.index_fill_(0, free, 0.0)
        else:
            self._flat_score.index_copy_(0, free, score.view(-1))
        self._flat_pos.index_copy_(0, free, new)
        if self._rank is not None:
            self._rank.view(-1).index_copy_(0, free, self._clock.at_step("newest ranks by head", self._newest))
        return free

    def _newest(self) -> Tensor:
        """The rank of each row's newest token, for each of its heads: (b * kv_heads,) int32."""
        return self._clock.newest_ranks.to(torch.int32).repeat_interleave(self._shape[1])

    def ranks(self, width: int) -> Tensor:
        if self._rank is None:
            raise RuntimeError("this cache was started without rolling positions")
        return self._rank[..., :width]

    def settle(self, row: Tensor | None, length: int) -> None:
        if row is not None:
            self._policy.accumulate(self.score[..., :length], row)
        self._free = self._next_free(length)
        if self._rank is not None:
            # What is newer than the token that goes moves up by one: minus one where the difference is negative. A free
            # slot has the highest rank of all until it is taken.
            gone = self._rank.view(-1).index_select(0, self._free).view(*self._shape[:2], 1)
            self._rank += (gone - self._rank).bitwise_right_shift_(31)
        self._new += 1
        self._bound += 1
        if self._clock.window is not None:
            self._leaving += 1

    def positions(self) -> Tensor:
        table = self._pos.clone()
        if self._clock.started:
            table.view(-1).index_fill_(0, self._freed(self._free.view(self._shape[:2])), -1)
        return table

    def _freed(self, free: Tensor) -> Tensor:
        """Of the slots (b, kv_heads) that the next tokens take, those that are empty: a full row's may be its last."""
        full = [budget.full for budget in self._clock.budgets]
        if any(full):
            free = free[[row for row, held in enumerate(full) if not held]]
        return free.reshape(-1)

    @property
    def nbytes(self) -> int:
        return self.score.nbytes + self._pos.nbytes + (0 if self._rank is None else self._rank.nbytes)

    def _first_free(self) -> Tensor:
        if self._resumed is not None:
            return self._resumed
        slots = [min(held, limit - 1) for held, limit in zip(self._clock.held, self._clock.limits, strict=True)]
        return self._per_head(slots).view(self._shape[:2])

    def _ranks_in_time(self) -> Tensor:
        """Ranks (b, kv_heads, capacity) int32 before the first step; free slots come last."""
        last = self._shape[2] - 1
        order = self._pos.masked_fill(self._pos < 0, torch.iinfo(torch.int32).max).argsort(-1).argsort(-1)
        return order.masked_fill_(self._pos < 0, last).to(torch.int32)

    def _next_free(self, length: int) -> Tensor:
        step, clock = self._clock.step, self._clock
        if step >= clock.all_evict:
            return self._victims(length)
        following = torch.minimum(self._free + 1, self._last)
        if step < clock.first_eviction:
            return following
        return torch.where(self._evicts_at <= step, self._victims(length), following)

    def _victims(self, length: int) -> Tensor:
        bits, pos = self.score.view(torch.int32)[..., :length], self._pos[..., :length]
        if self._clock.step >= self._first_leaving:
            # The budget is smaller than the window: what leaves it goes at once, one token at a time, unless a sink.
            bits = bits.masked_fill((pos == self._leaving) & (self._leaving >= self._kept_sinks), _WORST)
        if self._protects:
            # All ones where protected, by arithmetic: `where` branches on every slot and mispredicts half of them.
            protected = torch.sub(self._bound, pos).bitwise_right_shift_(31)
            bits = protected.bitwise_and_(_BEST).bitwise_or_(bits)
        return rank_keys(bits, pos).min(-1).indices.view(-1).add_(self._base)

    def _per_head(self, values: Sequence[int]) -> Tensor:
        """One number per row, for each of its heads: (b * kv_heads,) int64."""
        return torch.tensor(values, device=self._clock.device).repeat_interleave(self._shape[1])

    def _tokens(self, positions: Tensor, row_ids: Tensor) -> Tokens:
        return Tokens(positions, row_ids, self._heads, self._layer)


def _index_of(rows: Sequence[int], count: int, device: torch.device) -> Tensor | None:
    """What selects these of `count` rows; None where they are all, in order."""
    return None if list(rows) == list(range(count)) else torch.tensor(rows, device=device)


def _rows_of(table: Tensor, index: Tensor | None) -> Tensor:
    return table if index is None else table.index_select(0, index)


def _choose(score: Tensor, positions: Tensor, budget: Budget, window: int | None) -> Tensor:
    """Ascending positions (n, kv_heads, budget) kept of prompts with `score` (n, kv_heads, S): sinks, heavy, recent.

    Heavy tokens are those that the next query sees: a budget within the window always finds enough of them.
    """
    length = score.shape[-1]
    first = budget.sinks if window is None else max(budget.sinks, length - window + 1)
    start = length - budget.recent
    keys = rank_keys(score[..., first:start].view(torch.int32), positions[first:start])
    heavy = keys.topk(budget.heavy, sorted=False).indices + first  # in order of position below
    sinks, recent = (part.expand(*score.shape[:2], -1) for part in (positions[: budget.sinks], positions[start:]))
    return torch.cat([sinks, heavy.sort(-1).values, recent], dim=-1)
