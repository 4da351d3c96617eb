"""The KV cache of one layer for one GPU batch: filled once from the prompts, then one token in, one out, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.base import AttendedPrompts, EvictionPolicy, RankedPolicy
from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.cache.lengths import CacheLengths
from h2o_flexgen.cache.packing import Keeping
from h2o_flexgen.cache.recall import Recall
from h2o_flexgen.cache.ring_slots import CacheSlots, Queries, RingSlots, Rows, SlotChoice
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.cache.slots import ScoredSlots
from h2o_flexgen.cache.vectors import (
    beginning,
    ending,
    index_of,
    move_down,
    order_without,
    reordered,
    rolled,
    select,
    some_of,
)
from h2o_flexgen.config.budget import Budget, Range
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.decode import available
from h2o_flexgen.kernels.prompt import keep_prompts, keeps
from h2o_flexgen.kernels.torch_attention import decode_attention
from h2o_flexgen.kernels.types import DecodeAttention, KeysValues, Logits, PackedPrompts, PackedRow

PromptWatch = Callable[[int, int, Tensor], None]
"""Called for each prompt with its row id, layer, and its tokens' scores (kv_heads, length) float32."""


class KVCache:
    """K and V of the kept tokens, per row and KV head, and their record: positions, scores, free slots.

    The record stays on the device that attends. K and V are buffers of the caller, written in place; they are attached
    and detached when they move between tiers, and never grow. A cache belongs to one (layer, GPU batch) of a block and
    to one thread. There is no padding: each row has its own prompt length and budget, and its decisions never depend on
    its neighbours. When rows finish or come, the others go on in a new cache, see `joined`.

    If no row's budget leaves a choice, slots are taken in order of arrival, without scores, under every policy; full
    budgets give bit for bit the full cache.

    In a layer with a `window` each budget must be `within` it (else ValueError). Tokens that leave the window are
    evicted first; sinks that have left it are kept but not attended to.
    """

    chunk: int | None = None
    """Queries see only their own part of so many tokens; None: everything. See `ChunkedCache`."""

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
        self.shape, self._kept = shape, Keeping(shape, self.device)
        self.chooses = self._lengths.chooses  # by scores, in some row
        self.wants_column_sums = policy.column_sums and self.chooses
        """Whether `fill` must be given the column sums of the prompt's attention."""
        self._policy, self._layer, self.row_ids = policy, layer, list(row_ids)
        self._slots: CacheSlots
        if isinstance(policy, RankedPolicy) and self.chooses:
            self._slots = ScoredSlots(self._lengths, policy, shape.kv_heads, shape.capacity, layer, row_ids)
        else:
            self._slots = RingSlots(self._lengths, shape.kv_heads, shape.capacity)
        self._fused: FusedStep | None = None
        self._dropping: dict[int, tuple[Range, ...]] = {}
        self._last: int | Tensor | None = None
        self.rewritten = 0  # how often a step changed more of K and V than one token
        self._reads_occupied = False  # steps read nothing but occupied slots, unless positions roll
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.watch: PromptWatch | None = None
        self.recall: Recall | None = None
        self.choice: SlotChoice | None = None  # of steps, from the first on
        self._where: Tensor | None = None

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
            row_ids=[cache.row_ids[row] for cache, rows in parts for row in rows],
            device=first.device,
        )
        occupied = [cache.occupied for cache, _ in parts]
        for i, target in enumerate((k,) if first.shape.joint else (k, v)):
            start = 0
            for (cache, rows), used in zip(parts, occupied, strict=True):
                move_down(cache.buffers[i], rows, target[start : start + len(rows)], used)
                start += len(rows)
        joined.attach(k, v)
        joined.chunk = first.chunk
        joined._kept = Keeping.joined(joined.shape, [(cache._kept, rows) for cache, rows in parts])
        joined._slots.resume([(cache._slots, rows) for cache, rows in parts])
        joined.recall = Recall.joined([(cache.recall, rows) for cache, rows in parts])
        return joined

    @property
    def parts(self) -> tuple[KVCache, ...]:
        """The caches that have buffers of their own: itself."""
        return (self,)

    def settle_prompts(self, rows: Sequence[int], prompts: AttendedPrompts, length: int, raw: bool) -> None:
        """Before `fill`: see `KeyScales.settle_prompts`."""
        if self._kept.scales is not None:
            self._kept.scales.settle_prompts(rows, prompts, length, raw, self.device)

    def settle_packed(self, prompts: PackedPrompts, q: Tensor, k: Tensor) -> None:
        """Before `fill_packed`: see `KeyScales.settle_packed`."""
        if self._kept.scales is not None:
            self._kept.scales.settle_packed(prompts, q, k)

    def _tell(self, rows: Sequence[int], scores: Tensor | None) -> None:
        """Shows the scores (n, kv_heads, S) or (n, parts, kv_heads, S) of prompts to the watch."""
        if self.watch is not None and scores is not None:
            for index, row in enumerate(rows):
                self.watch(self.row_ids[row], self._layer, scores[index, 0] if scores.dim() == 4 else scores[index])

    def attach(self, k: Tensor, v: Tensor) -> None:
        """Use these contiguous buffers from now on. They hold the kept tokens; before `fill`, any finite numbers."""
        for name, buffer, size in zip("KV", (k, v), self.shape.sizes, strict=True):
            if buffer.shape != size or not buffer.is_contiguous() or buffer.device != self.device:
                found = f"{name} {tuple(buffer.shape)} on {buffer.device}"
                raise ValueError(f"{found}: needed contiguous {size} on {self.device}")
        self.k, self.v = k, v
        kind, dim = self.shape.computed(k.dtype), self.shape.head_dim
        self._reads_occupied = available(kind, dim, self.device, self._kept.packings is not None)
        self._flat_k, self._flat_v = k.view(-1, k.shape[-1]), v.view(-1, v.shape[-1])
        if self._fused is not None:
            self._fused.attach(k, v)

    def detach(self) -> None:
        """Let go of the buffers: they are about to be stored or reused."""
        self.k = self.v = None
        del self._flat_k, self._flat_v
        if self._fused is not None:
            self._fused.detach()

    def fill(
        self, rows: Sequence[int], k: Tensor, v: Tensor, scores: Tensor | None = None, past: KeysValues | None = None
    ) -> None:
        """Prompts of `rows`, all of one length P + S: k, v (n, kv_heads, S, head_dim), the last S tokens of each.

        past: K and V (kv_heads, P, head_dim) of earlier tokens that all these rows share; None: P = 0. scores: the
        result of `scores_of`, or column sums, float32 (n, kv_heads, P + S), where scores are just these.
        Keeps what each row's own budget allows, in time order from slot 0. Its other slots are zeroed where
        something may read them: torch reads all slots of a cache on a CPU.
        """
        self._tell(rows, scores)
        if self.recall is not None:
            self.recall.fill(rows, self._lengths.budgets, k, v, past)
        before = 0 if past is None else past.k.shape[1]
        length, same_budget = before + k.shape[2], dict[Budget, list[int]]()
        for index, row in enumerate(rows):
            self._lengths.fill(row, length)
            same_budget.setdefault(self._lengths.budgets[row], []).append(index)
        for budget, members in same_budget.items():
            source, target = (index_of(part, k.device) for part in (members, [rows[index] for index in members]))
            kept = self._slots.fill(target, length, budget, None if scores is None else scores[source])
            held = length if kept is None else kept.shape[-1]
            for i, (buffer, own) in enumerate(zip(self._distinct(), (k, v), strict=False)):
                shared = None if past is None else past[i]
                if kept is not None:
                    buffer[target, :, :held] = self._kept.stored(i, select(own[source], shared, kept), target)
                else:
                    buffer[target, :, before:held] = self._kept.stored(i, own[source], target)
                    if shared is not None:
                        shared = shared.expand(len(members), -1, -1, -1)
                        buffer[target, :, :before] = self._kept.stored(i, shared, target)
                if not self._reads_occupied:
                    buffer[target, :, held:] = 0
            if self.shape.mended:
                last = min(self.shape.newest, length if kept is None else budget.latest)
                ends = KeysValues(*(ending(x[source], past and past[i], last) for i, x in enumerate((k, v))))
                starts = KeysValues(*(beginning(x[source], past and past[i]) for i, x in enumerate((k, v))))
                there = torch.tensor(True) if kept is None else (kept[..., :1] == 0).any(-1)  # none may be kept
                self._kept.fill(target, held, ends, starts, torch.atleast_2d(there), self.buffers)

    def scores_of(self, rows: Sequence[int], prompts: AttendedPrompts) -> Tensor | None:
        """The scores by which `fill` chooses: float32, (n, parts, kv_heads, S); None if no score decides.

        prompts: of the rows, in this order, on any device.
        """
        slots = self._slots
        if slots.packs or not isinstance(slots, ScoredSlots):  # column sums are the scores
            return prompts.column_sums
        same_budget, found = dict[Budget, list[int]](), dict[int, tuple[Rows, Tensor]]()
        for index, row in enumerate(rows):
            same_budget.setdefault(self._lengths.budgets[row], []).append(index)
        for budget, members in same_budget.items():
            source = index_of(members, prompts.k.device)
            target = index_of([rows[index] for index in members], self.device)
            scores = slots.scores_of(target, prompts.of(source), budget)
            if scores is not None:
                found[members[0]] = source, scores
        if not found or len(same_budget) == 1:
            return next((scores for _, scores in found.values()), None)
        like = next(iter(found.values()))[1]
        joined = like.new_zeros(len(rows), *like.shape[1:])
        for source, scores in found.values():
            joined[source] = scores
        return joined

    def packing(self, spans: Sequence[tuple[int, int, int]]) -> PackedPrompts | None:
        """The argument of `fill_packed`, for prompts as (row, first token, length); None where no kernel does that."""
        if not (self._slots.packs and self._reads_occupied and keeps(*self.buffers)):
            return None
        budgets = [self._lengths.budgets[row] for row, _, _ in spans]
        return PackedPrompts.of(
            [
                PackedRow(first, length, row, budget.after_prompt, budget.heavy, budget.recent, budget.sinks)
                for (row, first, length), budget in zip(spans, budgets, strict=True)
            ]
        )

    def fill_packed(self, prompts: PackedPrompts, k: Tensor, v: Tensor, column_sums: Tensor | None = None) -> None:
        """As `fill`, of prompts of any lengths at once: k, v (T, kv_heads, head_dim) of packed tokens.

        column_sums: float32 (T kv_heads,), (kv_heads, length) of a prompt from its `first` x kv_heads on.
        """
        heads = self.shape.kv_heads
        for row in prompts.rows:
            self._lengths.fill(row.place, row.length)
            own = slice(row.first * heads, (row.first + row.length) * heads)
            self._tell([row.place], None if column_sums is None else column_sums[own].view(1, heads, -1))
        if self.recall is not None:
            self.recall.fill_packed(prompts, self._lengths.budgets, k, v)
        kept, scales = self._kept, self._kept.scales
        how = None if scales is None else (scales.of, scales.means)
        errors = kept.mending() if self.shape.mended else None
        window, table = self._lengths.window, self._slots.table
        keep_prompts(
            prompts,
            KeysValues(k, v),
            self.buffers,
            window,
            column_sums,
            table,
            kept.packings,
            scales=how,
            errors=errors,
        )

    @property
    def buffers(self) -> KeysValues:
        """K and V; RuntimeError where none are attached."""
        missing = "no K and V are attached"
        return KeysValues(required(self.k, missing), required(self.v, missing))

    def _distinct(self) -> tuple[Tensor, ...]:
        """K's buffer, and V's unless that is the same."""
        return self.buffers[: 1 if self.shape.joint else 2]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, table: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """One decode step: q (b, heads, head_dim) over everything kept and the new token itself; (b, heads, head_dim).

        k, v (b, kv_heads, head_dim) of the new token go into the free slots; rows over budget then let one token go.

        With a `table` positions roll: the cache holds keys that are not rotated, and the n tokens that a row and head
        hold in this step have the positions 0 to n - 1, in order of time; q has n - 1. The table is the cosines and the
        sines, both (capacity or more, dim), of those positions' angles; the second half of `dim` repeats the first.
        Either all steps have one or none.
        """
        buffers = self.buffers
        if self._dropping:
            self._drop()
        self._kept.advance()
        if not self._lengths.started:
            self._start(*buffers, q, table is not None, logits)
        asked, new = Queries(q, logits), KeysValues(k, v)
        if self.recall is not None:
            self.recall.step(asked, new, self._lengths, self._slots, buffers, self._kept)
        keys = None
        if self._slots.scores_keys:
            keys = k if self.shape.newest else self._kept.once(k)
        if self._fused is not None:
            if table is not None:
                raise RuntimeError("this cache was started without rolling positions")
            out = self._fused.attend(asked, new, keys, partial(self._held, q.dtype))
            self._last = self._fused.used
        else:
            out = self._attend(asked, new, table, keys)
        self._lengths.tick()
        moves = self._slots.moves()
        if moves is not None:
            self._close_gaps(*moves)
            self._start(*self.buffers, q, table is not None, logits)
        return out

    def again(self, qkv: tuple[Tensor, Tensor, Tensor], logits: Logits) -> Tensor:
        """Attention of other queries of the last step's tokens to the tokens that its own queries saw, (b, heads,
        head_dim) as `attend`. The kept tokens stay as they are. qkv: these queries, with k and v of that step."""
        asked = Queries(qkv[0], logits)
        self._lengths.tick(-1)
        try:
            if self._fused is not None and self._fused.rereads and self._lengths.step >= 0:
                return self._fused.again(asked, KeysValues(*qkv[1:]))
            return self._attend_all(asked, None).out
        finally:
            self._lengths.tick()

    def drop(self, row_id: int, ranges: Sequence[Range]) -> None:
        """Positions that the row of this id, a full one, has let go by its next step, all since its prompt in order."""
        if row_id in self.row_ids:
            row = self.row_ids.index(row_id)
            if later := tuple(ranges[len(self._lengths.dropped[row]) :]):
                self._dropping[row] = later

    def _drop(self) -> None:
        rows = sorted(self._dropping)
        ranges, self._dropping = [self._dropping[row] for row in rows], {}
        self._close_gaps(rows, order_without(self._slots.positions()[rows], ranges), ranges)

    def _close_gaps(self, rows: list[int], order: Tensor, ranges: Sequence[tuple[Range, ...]] = ()) -> None:
        """Several tokens of `rows` were evicted, `ranges` of each or a burst: the others move to the first slots, and
        steps start anew."""
        index = index_of(rows, self.device)
        self._lengths = self._lengths.thinned(rows, ranges)
        held = max(self._lengths.held[row] for row in rows)
        for buffer in self._distinct():
            buffer[index, :, :held] = reordered(buffer[index], order[..., :held])
        self._slots.go_on(self._lengths)
        self._kept.move(index, order[..., :held])
        self.rewritten += 1

    @property
    def repeats(self) -> bool:
        """Whether all further steps launch the same work with the same arguments: see `FusedStep.repeats`."""
        return self._fused is not None and self._fused.repeats and self.recall is None

    def repeat(self, steps: int = 1) -> None:
        """Steps that others launch, from a recording of one; -1: the last was only recorded, and is yet to be done."""
        self._lengths.tick(steps)

    def _start(self, k: Tensor, v: Tensor, q: Tensor, rolling: bool, logits: Logits) -> None:
        """All prompts are in: chooses kernel or torch for all further steps, from the first query among others."""
        self._lengths.start()
        self._slots.start(rolling)
        sinks = logits.sinks is not None
        torch_only = rolling or self.choice is not None or (sinks and self.device.type != "cpu")
        torch_only = torch_only or (self.shape.centred and (sinks or logits.soft_cap is not None))
        self._fused = None if torch_only else FusedStep.of(self._lengths, self._slots, k, q, self._kept)
        if self._fused is not None:
            self._fused.attach(k, v)
        elif self._reads_occupied:  # so that nothing was zeroed
            for row, held in enumerate(map(min, self._lengths.held, self._lengths.limits)):
                k[row, :, held:] = v[row, :, held:] = 0

    def _held(self, dtype: torch.dtype) -> KeysValues:
        """Keys and values in the slots that are occupied in this step, (b, kv_heads, length, d)."""
        k, v = (buffer.narrow(2, 0, self._lengths.length) for buffer in self.buffers)
        return self._kept.expanded(KeysValues(k, v), dtype)

    def _attend(
        self, asked: Queries, new: KeysValues, table: tuple[Tensor, Tensor] | None, keys: Tensor | None
    ) -> Tensor:
        """A step in torch operations, on any device."""
        where = None if self.choice is None else self.choice.positions(self._slots)
        slot = self._last = self._slots.allocate(keys)
        if where is not None:
            now = torch.tensor(self.next_pos, dtype=where.dtype, device=where.device)
            where.scatter_(-1, self.last_slots.unsqueeze(-1), now.view(-1, 1, 1))
        self._where = where
        stored = [self._kept.stored(i, x) for i, x in enumerate(new[: len(self._distinct())])]
        for buffer, flat, x in zip(self._distinct(), (self._flat_k, self._flat_v), stored, strict=False):
            if isinstance(slot, int):
                buffer.select(2, slot).copy_(x)
            else:
                flat.index_copy_(0, slot, x.reshape(len(slot), -1))
        if self.shape.mended:
            self._kept.take(self.last_slots, new, stored)
        out, row = self._attend_all(asked, table)
        length = self._lengths.occupied().length
        row = None if row is None else row[..., :length]
        self._slots.evict(row, length, partial(self._held, asked.q.dtype), asked)
        return out

    def _attend_all(self, asked: Queries, table: tuple[Tensor, Tensor] | None) -> DecodeAttention:
        """Attention of all rows over the slots of this step, as many rows at a time as may be expanded."""
        _, width, valid = self._lengths.occupied()
        seen = self._slots.seen(width)
        if valid is not None:
            valid = valid.expand(self.shape.batch, self.shape.kv_heads, -1)
            seen = valid if seen is None else valid & seen
        parts = [self._attend_rows(rows, asked, width, seen, table) for rows in self._kept.rows(width)]
        if len(parts) == 1:
            return parts[0]
        rows = [part.row for part in parts if part.row is not None]
        return DecodeAttention(torch.cat([part.out for part in parts]), torch.cat(rows) if rows else None)

    def _attend_rows(
        self, rows: slice | None, asked: Queries, width: int, valid: Tensor | None, table: tuple[Tensor, Tensor] | None
    ) -> DecodeAttention:
        """Attention of some rows (None: all) over the first `width` slots."""
        k, v = (some_of(buffer, rows).narrow(2, 0, width) for buffer in self.buffers)
        keys, values = self._kept.expanded(KeysValues(k, v), asked.q.dtype, rows)
        q, seen = some_of(asked.q, rows), None if valid is None else some_of(valid, rows)
        if self.choice is not None:
            seen = self.choice.of(rows, keys, seen, self._where)
        if table is not None:
            newest, ranks = some_of(self._lengths.newest_ranks, rows), some_of(self._slots.ranks(width), rows)
            q, keys = rolled(q, keys, table, newest.view(-1, 1), ranks)
        return decode_attention(q, keys, values, asked.logits, seen, self._slots.needs_rows)

    @property
    def next_pos(self) -> list[int]:
        """Absolute position of each row's next token."""
        return self._lengths.next_pos

    @property
    def occupied(self) -> int:
        """Slots, from the first on, that any row has ever used; a copy of the cache must contain them."""
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

    def kept_in(self, row: int, ranges: Sequence[tuple[int, int]]) -> list[float]:
        """How many positions of each range a row holds, the mean over KV heads."""
        pos = self.pos[row]
        counts = [((pos >= start) & (pos < stop)).sum() for start, stop in ranges]
        found: list[float] = (torch.stack(counts) / len(pos)).tolist()
        return found

    def kept(self, row: int, head: int) -> list[int]:
        """Positions held by one row and KV head, ascending."""
        return sorted(position for position in self.pos[row, head].tolist() if position >= 0)
