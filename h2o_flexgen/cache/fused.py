"""Decode steps by one kernel: in C for caches in host memory, by Triton for those on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.cache.lengths import NEVER, CacheLengths
from h2o_flexgen.cache.packing import Keeping, parts_of
from h2o_flexgen.cache.ring_slots import CacheSlots, Held, Queries
from h2o_flexgen.cache.slots import ScoredSlots
from h2o_flexgen.errors import required
from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.decode import NativeAttend, available
from h2o_flexgen.kernels.pieces import hadamard
from h2o_flexgen.kernels.types import DecodeStep, KeysValues, SlotRule


class FusedStep:
    """The steps of one cache whose lengths and slots have started, without rolling positions.

    The kernel allocates and evicts slots itself, in the tensors of `slots`. If the policy updates scores in a way that
    the kernel does not know, `slots.evict` does so here after the kernel, as after a torch step.

    On a GPU a step neither waits for the device nor sends it anything but launches: its number is counted there.
    """

    def __init__(
        self,
        lengths: CacheLengths,
        slots: CacheSlots,
        size: tuple[int, int, int, int],
        triton: bool,
        kept: Keeping,
    ) -> None:
        """`size`: rows, kv_heads, capacity, dim; how keys and values are `kept`."""
        self._lengths, self._slots, self._size = lengths, slots, size
        scored, packings = slots if isinstance(slots, ScoredSlots) else None, kept.packings
        own = None if scored is None or triton else scored.rule(packings is not None)
        adds = False if scored is None else scored.needs_rows if own is not None else scored.adds
        self._by_rows = adds is None
        self._thins = scored is not None and scored.thins and not self._by_rows
        self._scored = scored
        ranked = scored is not None
        rules = lengths.once(f"rules, {ranked}", lambda: slot_rules(lengths, ranked=ranked))
        ranking = None if scored is None or (triton and self._by_rows) else scored.ranking
        how: dict[str, Any] = {"window": lengths.window, "ranking": ranking, "adds": bool(adds)}
        self._number: Tensor | None = None
        self._scales = kept.scales if triton else None  # C scales by itself
        self._block = packings[0].block if packings is not None and triton else 0  # C transforms by itself
        self._kernel: DecodeStep
        self.attach: Callable[[Tensor, Tensor], None]
        if triton:
            from h2o_flexgen.kernels.triton_decode import TritonAttend

            made = TritonAttend(rules, size, lengths.device, **how)
            self._kernel, self.attach = made, made.attach
            if packings is not None:
                packing = packings[0]
                self.attach = lambda k, v: made.attach_packed(parts_of(k, packing), parts_of(v, packing))
            self._number = torch.full(size[:2], lengths.step, device=lengths.device)
        else:
            table = lengths.once(f"table of rules, {ranked}", lambda: torch.tensor(rules))
            how["masks"] = scored.table[1] if lengths.hides and scored is not None else None
            native = self._kernel = NativeAttend(table, size, rule=own, packings=packings, errors=kept.errors, **how)
            self.attach = native.attach
            if kept.scales is not None:
                native.scale_keys(kept.scales.of, kept.scales.means)
            if self._by_rows and scored is not None:
                scored.pick = native.pick
        self.rereads = not triton
        """Whether `again` can be asked: not where steps are counted on the device."""
        self.used = self._kernel.used
        """Where the newest token was written, (b, kv_heads) int64; the next step changes it in place."""
        self.detach = self._kernel.detach

    @classmethod
    def of(
        cls,
        lengths: CacheLengths,
        slots: CacheSlots,
        kv: Tensor,
        q: Tensor,
        kept: Keeping,
    ) -> FusedStep | None:
        """For a cache with K or V `kv` (b, kv_heads, capacity, dim), or packed ones, asked by q (b, heads, dim).

        None where no kernel takes that.
        """
        packings = kept.packings
        (rows, kv_heads, capacity, _), heads, dim = kv.shape, q.shape[1], q.shape[2]
        dtype = kv.dtype if packings is None else q.dtype
        triton = triton_available.serves(kv.device)
        if triton and (lengths.hides or kept.errors is not None):
            return None  # its kernel can hide only sinks, and reads only packed tokens
        if triton:
            from h2o_flexgen.kernels import triton_decode  # imports Triton, which is not there on every machine

            fits = dtype in triton_decode.DTYPES and dim <= triton_decode.MAX_DIM
            if packings is not None:
                fits = fits and dim % triton_decode.PACKED_MULTIPLE == 0 and packings[0] == packings[1]
            fits = fits and heads // kv_heads <= triton_decode.MAX_GROUP
        else:
            fits = available(dtype, dim, kv.device, packings is not None)
        return cls(lengths, slots, (rows, kv_heads, capacity, dim), triton, kept) if fits else None

    @property
    def repeats(self) -> bool:
        """Whether every step launches the same work with the same arguments, so that a graph of one step is good for
        all. Not in C, and not for a policy with a score rule of its own, whose slots are found by torch operations that
        grow with the cache."""
        return self._number is not None and not self._by_rows and not self._thins

    def again(self, asked: Queries, new: KeysValues) -> Tensor:
        """The current step again with other queries; scores and slots are restored afterwards."""
        with nullcontext() if self._scored is None else self._scored.rewound(self.used) as slots:
            return self._step(self._lengths.step, asked, new, slots=slots if self._by_rows else None)

    def attend(self, asked: Queries, new: KeysValues, keys: Tensor | None, held: Held) -> Tensor:
        """The step of the lengths, which the caller moves on afterwards; see `KVCache.attend`.

        keys: the new ones as stored, if the policy scores keys.
        """
        number: int | Tensor = self._lengths.step if self._number is None else self._number
        if self._by_rows:
            return self._with_rows(number, asked, new, keys, held)
        scored = self._scored
        fresh = None if scored is None else scored.fresh(number, keys)
        out = self._step(number, asked, new, fresh=fresh)
        if scored is not None and self._thins:
            scored.between_bursts(self._lengths.length, held, asked)
        return out

    def _step(self, number: int | Tensor, asked: Queries, new: KeysValues, **how: Any) -> Tensor:
        (q, logits), (k, v) = asked, new
        if self._scales is not None:
            q, k = self._scales.asked(q), self._scales.kept(k)
        q, k, v = (hadamard(x, self._block) for x in (q, k, v))
        return hadamard(self._kernel.step(number, (q, k, v), logits, **how), self._block)

    def _with_rows(
        self, number: int | Tensor, asked: Queries, new: KeysValues, keys: Tensor | None, held: Held
    ) -> Tensor:
        scored = required(self._scored, "slots in order of arrival have no scores")
        slots, fresh = scored.take(keys) if self._number is None else (scored.allocate(keys), None)
        length, row = self._lengths.length, None
        if self._slots.needs_rows:
            # Where the kernel counts its steps, it does not know how few slots are occupied yet.
            width = length if self._number is None else self._size[2]
            row = torch.empty(*self._size[:2], width, device=self._lengths.device)
        out = self._step(number, asked, new, fresh=fresh, slots=slots, probs=row)
        row = None if row is None else row[..., :length]
        self._slots.evict(row, length, held, asked)
        return out


def slot_rules(lengths: CacheLengths, *, ranked: bool) -> list[SlotRule]:
    """The rules that a kernel needs of each row; `lengths.step` is 0."""
    return [
        SlotRule(
            held=held,
            limit=limit,
            prompt=prompt,
            ring=limit - 1 if budget.full else budget.sinks,
            sinks=budget.sinks,
            hides=0 if budget.full or lengths.window is None else budget.sinks,
            recent=budget.recent,
            evicts=budget.total - held if ranked and not budget.full else NEVER,
        )
        for budget, held, limit, prompt in zip(
            lengths.budgets, lengths.held, lengths.limits, lengths.next_pos, strict=True
        )
    ]
