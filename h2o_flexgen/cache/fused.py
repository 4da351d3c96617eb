"""Decode steps by one kernel: in C for caches in host memory, by Triton for those on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.cache.clock import NEVER, RowClock
from h2o_flexgen.cache.ranked import RankedSlots
from h2o_flexgen.cache.slots import SlotBook
from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.native import attend as native
from h2o_flexgen.kernels.native.attend import NativeAttend
from h2o_flexgen.kernels.types import DecodeStep, SlotRule

Maker = Callable[..., DecodeStep]
"""Makes a kernel of (rules, size) and `window`, `ranking` and `adds` by name: see `DecodeStep`."""


class FusedStep:
    """The steps of one cache whose clock and book have started, without rolling positions.

    Where the rule is one that the kernel knows, it takes and frees slots itself, in the book's own tensors. A policy
    with another way to take probabilities into its scores does that here, after the kernel, as with torch's.

    On a GPU a step neither waits for the device nor sends it anything but launches: its number is counted there.
    """

    def __init__(self, clock: RowClock, book: SlotBook, size: tuple[int, int, int, int], make: Maker) -> None:
        """`size`: rows, kv_heads, capacity, dim."""
        self._clock, self._book, self._size = clock, book, size
        self._ranked = book if isinstance(book, RankedSlots) else None
        adds = False if self._ranked is None else self._ranked.adds
        self._knows = adds is not None
        ranking = self._ranked.ranking if self._ranked is not None and self._knows else None
        ranked = self._ranked is not None
        rules: list[SlotRule] | Tensor = clock.once(f"rules, {ranked}", lambda: slot_rules(clock, ranked=ranked))
        if make is NativeAttend:
            rules = clock.once(f"table, {ranked}", lambda: torch.tensor(rules))
        self._kernel = make(rules, size, window=clock.window, ranking=ranking, adds=bool(adds))
        self._number: Tensor | None = None
        if not isinstance(self._kernel, NativeAttend):
            self._number = torch.full(size[:2], clock.step, device=clock.device)
        self.used = self._kernel.used
        """Where the newest token was written, (b, kv_heads) int64; the next step changes it in place."""
        self.attach, self.detach = self._kernel.attach, self._kernel.detach

    @classmethod
    def of(cls, clock: RowClock, book: SlotBook, kv: Tensor, heads: int) -> FusedStep | None:
        """For a cache with K or V `kv` (b, kv_heads, capacity, dim), asked by `heads` query heads.

        None where there is no kernel for that.
        """
        rows, kv_heads, capacity, dim = kv.shape
        make = _maker(kv, heads // kv_heads)
        return None if make is None else cls(clock, book, (rows, kv_heads, capacity, dim), make)

    @property
    def repeats(self) -> bool:
        """Whether every step launches the same work with the same arguments, so that a graph of one step is good for
        all. Not in C, and not for a policy with a score rule of its own, whose slots are found by torch operations that
        grow with the cache."""
        return self._number is not None and self._knows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The step of the clock, which the caller moves on afterwards; see `KVCache.attend`."""
        number: int | Tensor = self._clock.step if self._number is None else self._number
        if not self._knows:
            return self._with_rows(number, q, k, v, scale)
        fresh = None if self._ranked is None else self._ranked.fresh(number)
        return self._kernel.step(number, (q, k, v), scale, fresh=fresh)

    def _with_rows(self, number: int | Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        slots = self._book.take()
        if isinstance(slots, int):
            raise RuntimeError("slots in order of arrival have no scores")
        length = self._clock.length
        # Where the kernel counts its steps, it does not know how few slots are occupied yet.
        width = length if self._number is None else self._size[2]
        row = torch.empty(*self._size[:2], width, device=self._clock.device)
        out = self._kernel.step(number, (q, k, v), scale, slots=slots, probs=row)
        self._book.settle(row[..., :length], length)
        return out


def slot_rules(clock: RowClock, *, ranked: bool) -> list[SlotRule]:
    """What a kernel has to know of each row; `clock.step` is 0."""
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


def _maker(kv: Tensor, group: int) -> Maker | None:
    """The kernel that serves the device of `kv`, if it takes K and V like this and so many query heads per KV head."""
    if triton_available.serves(kv.device):
        from h2o_flexgen.kernels import triton_decode  # imports Triton, which is not there on every machine

        fits = kv.dtype in triton_decode.DTYPES and kv.shape[3] <= triton_decode.MAX_DIM
        return (
            partial(triton_decode.TritonAttend, device=kv.device) if fits and group <= triton_decode.MAX_GROUP else None
        )
    return NativeAttend if native.available(kv.dtype, kv.shape[3], kv.device) else None
