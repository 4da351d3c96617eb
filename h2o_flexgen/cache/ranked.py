"""Slots ranked by score: the lowest score outside the sinks and the recent window gives its slot to the next token."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_flexgen.cache.clock import NEVER, RowClock
from h2o_flexgen.cache.eviction.base import RankedPolicy, Tokens
from h2o_flexgen.cache.slots import Rows, SlotBook
from h2o_flexgen.config.eviction import Budget

_LOW = 0xFFFFFFFF
_HIGHEST = (1 << 63) - 1
_EMPTY = 0x7F800000 << 32  # score +inf, position -1: never a victim
_HIGH_HALF = 1 if sys.byteorder == "little" else 0


def rank_keys(score: Tensor, positions: Tensor) -> Tensor:
    """(score, position) as one int64 that orders like them: higher is better, equal scores favour the lower position.

    The upper half holds the bits of the float32 score, which order like the scores because none is negative; the lower
    half the complement of the position. All keys of a (row, head) differ, so every choice by key is deterministic.
    """
    return (score.view(torch.int32).to(torch.int64) << 32) | (_LOW - positions)


class RankedSlots(SlotBook):
    """Keeps score and position of every slot in one int64 per slot, so that one minimum finds the token to evict.

    `score` and the positions are strided views into the keys: what updates a score moves its token's rank. Evicting
    changes nothing but the index of the free slot; the next token overwrites K, V and key there, in place.
    """

    def __init__(
        self, clock: RowClock, policy: RankedPolicy, kv_heads: int, capacity: int, layer: int, row_ids: Sequence[int]
    ) -> None:
        self._clock, self._policy, self._layer = clock, policy, layer
        self.needs_rows = policy.needs_rows
        device = clock.device
        rows = len(clock.budgets)
        self._shape = (rows, kv_heads, capacity)
        self._keys = torch.full(self._shape, _EMPTY, dtype=torch.int64, device=device)
        self._flat_keys = self._keys.view(-1)
        halves = (*self._shape, 2)
        self.score: Tensor = self._keys.view(torch.float32).view(halves)[..., _HIGH_HALF]
        self._complement = self._keys.view(torch.int32).view(halves)[..., 1 - _HIGH_HALF]
        self._row_ids = torch.tensor(row_ids, device=device).view(-1, 1, 1)
        self._heads = torch.arange(kv_heads, device=device).view(1, -1, 1)
        self._base = torch.arange(rows * kv_heads, device=device) * capacity
        self._highest = torch.tensor(_HIGHEST, device=device)

    def fill(self, rows: Rows, length: int, budget: Budget, column_sums: Tensor | None) -> Tensor | None:
        positions = torch.arange(length, device=self._clock.device)
        score = self._policy.prompt_scores(self._tokens(positions, self._row_ids[rows]), column_sums)
        if budget.sinks:
            score = score.clone()
            score[..., : budget.sinks] = torch.inf
        keys = rank_keys(score, positions)
        kept = None
        if length > budget.total:
            kept = _choose(keys, budget)
            keys = keys.gather(-1, kept)
        self._keys[rows, :, : keys.shape[-1]] = keys
        return kept

    def start(self) -> None:
        clock, kv_heads = self._clock, self._shape[1]

        def per_head(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, device=clock.device).repeat_interleave(kv_heads)

        last = [limit - 1 for limit in clock.limits]
        self._last = self._base + per_head(last)
        self._free = self._base + per_head([min(pair) for pair in zip(clock.held, last, strict=True)])
        self._evicts_at = per_head(
            [NEVER if b.full else b.total - held for b, held in zip(clock.budgets, clock.held, strict=True)]
        )
        self._positions = per_head(clock.next_pos).view(*self._shape[:2], 1)
        self._new_keys = _LOW - self._positions.view(-1)
        # A slot is protected where position > now - recent, that is ~position < recent - now - 1.
        recent = [b.recent - now - 1 for b, now in zip(clock.budgets, clock.next_pos, strict=True)]
        self._bound = torch.tensor(recent, dtype=torch.int32, device=clock.device).view(-1, 1, 1)
        self._protects = any(budget.recent for budget in clock.budgets)
        # New tokens below `sinks` come only after prompts shorter than that.
        self._sinks = torch.tensor([b.sinks for b in clock.budgets], device=clock.device).view(-1, 1, 1)
        self._sink_steps = max(b.sinks - now for b, now in zip(clock.budgets, clock.next_pos, strict=True))

    def take(self) -> Tensor:
        self._flat_keys.index_copy_(0, self._free, self._keys_of_new())
        return self._free

    def settle(self, row: Tensor | None, length: int) -> None:
        if row is not None:
            self._policy.accumulate(self.score[..., :length], row)
        self._free = self._next_free(length)
        self._positions += 1
        self._new_keys -= 1
        self._bound -= 1

    def positions(self) -> Tensor:
        table = ~self._complement
        if self._clock.started:
            rows, heads, _ = self._shape
            evicting = [not budget.full for budget in self._clock.budgets]
            free = (self._free - self._base).view(rows, heads, 1)[evicting]
            table[evicting] = table[evicting].scatter(-1, free, -1)
        return table

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes

    def _next_free(self, length: int) -> Tensor:
        step, clock = self._clock.step, self._clock
        if step >= clock.all_evict:
            return self._victims(length)
        following = torch.minimum(self._free + 1, self._last)
        if step < clock.first_eviction:
            return following
        return torch.where(self._evicts_at <= step, self._victims(length), following)

    def _victims(self, length: int) -> Tensor:
        keys = self._keys[..., :length]
        if self._protects:
            keys = torch.where(self._complement[..., :length] < self._bound, self._highest, keys)
        return keys.min(-1).indices.view(-1) + self._base

    def _keys_of_new(self) -> Tensor:
        score = self._policy.new_scores(self._tokens(self._positions, self._row_ids))
        if self._clock.step >= self._sink_steps:
            return self._new_keys if score is None else rank_keys(score, self._positions).view(-1)
        if score is None:
            score = torch.zeros(self._positions.shape, device=self._positions.device)
        return rank_keys(score.masked_fill(self._positions < self._sinks, torch.inf), self._positions).view(-1)

    def _tokens(self, positions: Tensor, row_ids: Tensor) -> Tokens:
        return Tokens(positions, row_ids, self._heads, self._layer)


def _choose(keys: Tensor, budget: Budget) -> Tensor:
    """Ascending positions (n, kv_heads, budget) kept of prompts with `keys` (n, kv_heads, S): sinks, heavy, recent."""
    length = keys.shape[-1]
    start = length - budget.recent
    heavy = keys[..., budget.sinks : start].topk(budget.heavy).indices + budget.sinks
    sinks = torch.arange(budget.sinks, device=keys.device).expand(*keys.shape[:2], -1)
    recent = torch.arange(start, length, device=keys.device).expand(*keys.shape[:2], -1)
    return torch.cat([sinks, heavy.sort(-1).values, recent], dim=-1)
