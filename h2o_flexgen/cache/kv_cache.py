"""The KV cache of one layer for one GPU batch: filled once from the prompts, then one token in, one out, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.base import EvictionPolicy, RankedPolicy
from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.cache.lengths import CacheLengths, slots_needed
from h2o_flexgen.cache.slots import CacheSlots, RingSlots, ScoredSlots
from h2o_flexgen.cache.vectors import index_of, move_down, rolled, select
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.kernels import decode_attention
from h2o_flexgen.kernels.decode import available
from h2o_flexgen.kernels.prompt import keep_prompts, keeps
from h2o_flexgen.kernels.types import KeysValues, PackedPrompts, PackedRow


@dataclass(frozen=True)
class CacheShape:
    """Extent of K and of V: (batch, kv_heads, capacity, head_dim). `capacity` counts slots, see `slots_needed`."""

    batch: int
    kv_heads: int
    head_dim: int
    capacity: int

    @classmethod
    def of(cls, budgets: Sequence[Budget], kv_heads: int, head_dim: int) -> CacheShape:
        """The smallest cache for rows with these budgets."""
        return cls(len(budgets), kv_heads, head_dim, slots_needed(budgets))

    def buffers(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """A K and a V of this shape, zeros."""
        size = (self.batch, self.kv_heads, self.capacity, self.head_dim)
        return torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device)


class KVCache:
    """K and V of the tokens kept, per row and KV head, and the record of which tokens those are.

    Owns the record (positions, scores, free slots); K and V are buffers of the caller, attached and detached as they
    move between tiers, written in place. Nothing grows. A cache belongs to one (layer, GPU batch) of one block and is
    used by one thread; it is thrown away with the block, so that no state survives. There is no padding: rows have
    their own prompt lengths and budgets, and a row's decisions never depend on its neighbours. Rows start together;
    when some are done, or others have come, the rows that go on do so in a new cache, see `joined`.

    A batch whose budgets leave nothing to choose is kept in order of arrival, without scores, whatever the policy. If
    all are full, that is bit for bit the full cache.

    In a layer with a `window` the budgets are `within` it, ValueError otherwise. What leaves it goes before all else,
    and sinks that have left it are kept but not attended to.
    """

    def __init__(
        self,
        shape: CacheShape,
        budgets: Sequence[Budget] | CacheLengths,
        policy: EvictionPolicy,
        *,
        layer: int,
        row_ids: Sequence[int],
        device: torch.device | str = "cpu",
        window: int | None = None,
    ) -> None:
        """`budgets`: or the lengths of these rows, which no other cache uses. ValueError if sizes do not fit."""
        self.device = torch.empty(0, device=device).device  # by its full name, as tensors have it
        if not isinstance(budgets, CacheLengths):
            budgets = CacheLengths(budgets, shape.capacity, self.device, window)
        self._lengths, limits = budgets, budgets.limits
        if not len(limits) == len(row_ids) == shape.batch:
            raise ValueError(f"{len(limits)} budgets and {len(row_ids)} row ids for {shape.batch} rows")
        if shape.capacity < max(limits):
            raise ValueError(f"{shape.capacity} slots are too few, these budgets need {max(limits)}")
        self.shape = shape
        self.statistic = policy.statistic if self._lengths.chooses else "none"
        self._policy, self._layer, self._row_ids = policy, layer, list(row_ids)
        self._slots: CacheSlots
        if isinstance(policy, RankedPolicy) and self._lengths.chooses:
            self._slots = ScoredSlots(self._lengths, policy, shape.kv_heads, shape.capacity, layer, row_ids)
        else:
            self._slots = RingSlots(self._lengths, shape.kv_heads, shape.capacity)
        self._fused: FusedStep | None = None
        self._last: int | Tensor | None = None
        self._reads_occupied = False  # steps read nothing but occupied slots, unless positions roll
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[tuple[KVCache, Sequence[int]]], k: Tensor, v: Tensor) -> KVCache:
        """The given rows of these caches go on in one cache on the buffers `k` and `v`, in this order.

        All are of one layer and have the same capacity, and all their prompts are in. The buffers may lie where those
        of the parts are: every row may stay or move down, none up. The parts must not be used afterwards.
        """
        first = parts[0][0]
        lengths = CacheLengths.joined([(cache._lengths, rows) for cache, rows in parts])
        joined = cls(
            replace(first.shape, batch=len(lengths.budgets)),
            lengths,
            first._policy,
            layer=first._layer,
            row_ids=[cache._row_ids[row] for cache, rows in parts for row in rows],
            device=first.device,
        )
        occupied = [cache.occupied for cache, _ in parts]
        for i, target in enumerate((k, v)):
            start = 0
            for (cache, rows), used in zip(parts, occupied, strict=True):
                move_down(cache._buffers()[i], rows, target[start : start + len(rows)], used)
                start += len(rows)
        joined.attach(k, v)
        joined._slots.resume([(cache._slots, rows) for cache, rows in parts])
        return joined

    def lengths_for_another_layer(self) -> CacheLengths:
        """For a cache of the same rows in another layer with the same window and capacity: what follows from budgets
        and lengths alone is then worked out once."""
        return self._lengths.for_another_layer()

    @property
    def wants_column_sums(self) -> bool:
        """Whether `fill` must be given the column sums of the prompt's attention."""
        return self.statistic == "column_sums"

    def attach(self, k: Tensor, v: Tensor) -> None:
        """Work on these contiguous buffers from now on: what the cache holds, or anything finite before `fill`."""
        size = (self.shape.batch, self.shape.kv_heads, self.shape.capacity, self.shape.head_dim)
        for name, buffer in (("K", k), ("V", v)):
            if buffer.shape != size or not buffer.is_contiguous() or buffer.device != self.device:
                found = f"{name} {tuple(buffer.shape)} on {buffer.device}"
                raise ValueError(f"{found}: needed contiguous {size} on {self.device}")
        self.k, self.v = k, v
        self._reads_occupied = available(k.dtype, self.shape.head_dim, self.device)
        self._flat_k, self._flat_v = k.view(-1, self.shape.head_dim), v.view(-1, self.shape.head_dim)
        if self._fused is not None:
            self._fused.attach(k, v)

    def detach(self) -> None:
        """Let go of the buffers: they are about to be stored or reused."""
        self.k = self.v = None
        del self._flat_k, self._flat_v
        if self._fused is not None:
            self._fused.detach()

    def fill(
        self,
        rows: Sequence[int],
        k: Tensor,
        v: Tensor,
        column_sums: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Prompts of `rows`, all of one length P + S: k, v (n, kv_heads, S, head_dim), the last S tokens of each.

        past: K and V (kv_heads, P, head_dim) of earlier tokens that all these rows share; None: P = 0. column_sums:
        float32 (n, kv_heads, P + S). Keeps what each row's own budget allows, in time order from slot 0. Its other
        slots are zeroed where something may read them: torch reads all slots of a cache on a CPU.
        """
        before = 0 if past is None else past[0].shape[1]
        length, same_budget = before + k.shape[2], dict[Budget, list[int]]()
        for index, row in enumerate(rows):
            self._lengths.fill(row, length)
            same_budget.setdefault(self._lengths.budgets[row], []).append(index)
        for budget, members in same_budget.items():
            source, target = (index_of(part, k.device) for part in (members, [rows[index] for index in members]))
            kept = self._slots.fill(target, length, budget, None if column_sums is None else column_sums[source])
            held = length if kept is None else kept.shape[-1]
            for i, (buffer, own) in enumerate(zip(self._buffers(), (k, v), strict=True)):
                shared = None if past is None else past[i]
                if kept is not None:
                    buffer[target, :, :held] = select(own[source], shared, kept)
                else:
                    buffer[target, :, before:held] = own[source]
                    if shared is not None:
                        buffer[target, :, :before] = shared
                if not self._reads_occupied:
                    buffer[target, :, held:] = 0

    def packing(self, spans: Sequence[tuple[int, int, int]]) -> PackedPrompts | None:
        """What `fill_packed` takes, for prompts as (row, first token, length); None where no kernel does that."""
        if not (self._slots.packs and self._reads_occupied and keeps(*self._buffers())):
            return None
        budgets = [self._lengths.budgets[row] for row, _, _ in spans]
        return PackedPrompts.of(
            [
                PackedRow(first, length, row, budget.total, budget.heavy, budget.recent, budget.sinks)
                for (row, first, length), budget in zip(spans, budgets, strict=True)
            ]
        )

    def fill_packed(self, prompts: PackedPrompts, k: Tensor, v: Tensor, column_sums: Tensor | None = None) -> None:
        """As `fill`, of prompts of any lengths at once: k, v (T, kv_heads, head_dim) of packed tokens.

        column_sums: float32 (T kv_heads,), (kv_heads, length) of a prompt from its `first` x kv_heads on.
        """
        for row in prompts.rows:
            self._lengths.fill(row.place, row.length)
        keep_prompts(prompts, KeysValues(k, v), self._buffers(), self._lengths.window, column_sums, self._slots.table)

    def _buffers(self) -> KeysValues:
        if self.k is None or self.v is None:
            raise RuntimeError("no K and V are attached")
        return KeysValues(self.k, self.v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, table: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """One decode step: q (b, heads, head_dim) over everything kept and the new token itself; (b, heads, head_dim).

        k, v (b, kv_heads, head_dim) of the new token go into the free slots; rows over budget then let one token go.

        With a `table` positions roll: the cache holds keys that are not rotated, and the n tokens that a row and head
        hold in this step have the positions 0 to n - 1, in order of time; q has n - 1. The table is the cosines and the
        sines, both (capacity or more, dim), of those positions' angles; the second half of `dim` repeats the first.
        Either all steps have one or none.
        """
        buffers = self._buffers()
        if not self._lengths.started:
            self._start(*buffers, q.shape[1], table is not None)
        if self._fused is not None:
            if table is not None:
                raise RuntimeError("this cache was started without rolling positions")
            out = self._fused.attend(q, k, v, scale)
            self._last = self._fused.used
        else:
            out = self._attend(q, k, v, scale, table)
        self._lengths.tick()
        return out

    @property
    def repeats(self) -> bool:
        """Whether all further steps launch the same work with the same arguments: see `FusedStep.repeats`."""
        return self._fused is not None and self._fused.repeats

    def repeat(self, steps: int = 1) -> None:
        """Steps that others launch, from a recording of one; -1: the last was only recorded, and is yet to be done."""
        self._lengths.tick(steps)

    def _start(self, k: Tensor, v: Tensor, heads: int, rolling: bool) -> None:
        """All prompts are in: which way the steps go is settled for good."""
        self._lengths.start()
        self._slots.start(rolling)
        self._fused = None if rolling else FusedStep.of(self._lengths, self._slots, k, heads)
        if self._fused is not None:
            self._fused.attach(k, v)
        elif self._reads_occupied:  # so that nothing was zeroed
            for row, held in enumerate(map(min, self._lengths.held, self._lengths.limits)):
                k[row, :, held:] = v[row, :, held:] = 0

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, table: tuple[Tensor, Tensor] | None) -> Tensor:
        """A step in torch operations, on any device."""
        buffers = self._buffers()
        slot = self._last = self._slots.allocate()
        if isinstance(slot, int):
            buffers.k.select(2, slot).copy_(k)
            buffers.v.select(2, slot).copy_(v)
        else:
            self._flat_k.index_copy_(0, slot, k.reshape(self._flat_k.shape[0] // self.shape.capacity, -1))
            self._flat_v.index_copy_(0, slot, v.reshape(self._flat_v.shape[0] // self.shape.capacity, -1))
        length, width, valid = self._lengths.occupied()
        if valid is not None:
            valid = valid.expand(self.shape.batch, self.shape.kv_heads, -1)
        keys = buffers.k.narrow(2, 0, width)
        if table is not None:
            q, keys = rolled(q, keys, table, self._lengths.newest_ranks.view(-1, 1), self._slots.ranks(width))
        out, row = decode_attention(q, keys, buffers.v.narrow(2, 0, width), scale, valid, self._slots.needs_rows)
        self._slots.evict(None if row is None else row[..., :length], length)
        return out

    @property
    def counts(self) -> list[int]:
        """Tokens held by each row, the same for all its heads."""
        return self._lengths.counts

    @property
    def next_pos(self) -> list[int]:
        """Absolute position of each row's next token."""
        return self._lengths.next_pos

    @property
    def occupied(self) -> int:
        """Slots from the first on that any row has ever used: what a copy of the cache must contain."""
        lengths = self._lengths
        return max(min(held + lengths.step, limit) for held, limit in zip(lengths.held, lengths.limits, strict=True))

    @property
    def last_slots(self) -> Tensor:
        """Where the newest token was written, (b, kv_heads) int64: all that one step changed in K and V."""
        size = (self.shape.batch, self.shape.kv_heads)
        if self._last is None:
            raise RuntimeError("no token has been written yet")
        if isinstance(self._last, int):
            return torch.full(size, self._last, device=self.device)
        return (self._last % self.shape.capacity).view(size)

    @property
    def pos(self) -> Tensor:
        """Absolute position of the token in each slot, (b, kv_heads, capacity) int32, -1 where empty. A copy."""
        return self._slots.positions()

    @property
    def score(self) -> Tensor | None:
        """Scores, (b, kv_heads, capacity) float32, +inf for sinks and unused slots; None for policies without."""
        return self._slots.score

    def kept(self, row: int, head: int) -> list[int]:
        """Positions held by one row and KV head, ascending."""
        return sorted(position for position in self.pos[row, head].tolist() if position >= 0)
