"""Decode steps by the kernel in C, for caches in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.cache.clock import NEVER, RowClock
from h2o_flexgen.cache.ranked import RankedSlots
from h2o_flexgen.cache.slots import SlotBook
from h2o_flexgen.kernels.native.attend import NativeAttend, SlotRule, available


class NativeStep:
    """The steps of one cache whose clock and book have started, without rolling positions.

    Where the rule is one that the kernel knows, it takes and frees slots itself, in the book's own tensors. A policy
    with another way to take probabilities into its scores does that here, after the kernel, as with torch's.
    """

    def __init__(self, clock: RowClock, book: SlotBook, kv_heads: int, dim: int) -> None:
        self._clock, self._book = clock, book
        self._ranked = book if isinstance(book, RankedSlots) else None
        adds = False if self._ranked is None else self._ranked.adds
        self._fused = adds is not None
        ranking = self._ranked.ranking if self._ranked is not None and self._fused else None
        self._size = (len(clock.budgets), kv_heads, clock.capacity, dim)
        self._kernel = NativeAttend(
            _rules(clock, ranked=self._ranked is not None),
            self._size,
            window=clock.window,
            ranking=ranking,
            adds=bool(adds),
        )
        self.used = self._kernel.used
        """Where the newest token was written, (b, kv_heads) int64; the next step changes it in place."""
        self.attach, self.detach = self._kernel.attach, self._kernel.detach

    @classmethod
    def of(cls, clock: RowClock, book: SlotBook, kv: Tensor) -> NativeStep | None:
        """For a cache with K or V `kv` (b, kv_heads, capacity, dim); None where the kernel cannot be had."""
        _, kv_heads, _, dim = kv.shape
        return cls(clock, book, kv_heads, dim) if available(kv.dtype, dim, kv.device) else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The step of the clock, which the caller moves on afterwards; see `KVCache.attend`."""
        step = self._clock.step
        if not self._fused:
            return self._with_rows(q, k, v, scale)
        fresh = None if self._ranked is None else self._ranked.fresh()
        return self._kernel.step(step, (q, k, v), scale, fresh=fresh)

    def _with_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        slots = self._book.take()
        if isinstance(slots, int):
            raise RuntimeError("slots in order of arrival have no scores")
        length = self._clock.length
        row = torch.empty(*self._size[:2], length)
        out = self._kernel.step(self._clock.step, (q, k, v), scale, slots=slots, probs=row)
        self._book.settle(row, length)
        return out


def _rules(clock: RowClock, ranked: bool) -> list[SlotRule]:
    """What the kernel has to know of each row; `clock.step` is 0."""
    rules = []
    for budget, held, limit, prompt in zip(clock.budgets, clock.held, clock.limits, clock.next_pos, strict=True):
        rules.append(
            SlotRule(
                held=held,
                limit=limit,
                prompt=prompt,
                ring=limit - 1 if budget.full else budget.sinks,
                sinks=budget.sinks,
                hides=0 if budget.full or clock.window is None else budget.sinks,
                recent=budget.recent,
                evicts=budget.total - held if ranked and not budget.full else NEVER,
            )
        )
    return rules
