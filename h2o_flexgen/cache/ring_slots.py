"""The interface of cache slots, slots taken in order of arrival, and the choice of slots that a step attends to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.lengths import CacheLengths
from h2o_flexgen.cache.vectors import some_of
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.kernels.types import Choice, KeysValues, Logits

Rows = slice | Tensor
Held = Callable[[], KeysValues]
"""Gives keys and values of the occupied slots, (b, kv_heads, length, d)."""


class Queries(NamedTuple):
    """Queries q (b, heads, d), and what their logits are."""

    q: Tensor
    logits: Logits


class CacheSlots(ABC):
    """Which token sits in which slot, and which slot the next one takes.

    One step: `allocate` names the slot of the new token, attention runs, `evict` frees the slot of the token that goes.
    """

    score: Tensor | None = None  # (b, kv_heads, capacity) float32
    needs_rows = scores_keys = False
    packs = True
    """Whether a kernel may fill K, V and `table` with prompts by itself, choosing by their column sums."""
    table: tuple[Tensor, Tensor] | None = None
    """Score and position of every slot, as `fill` leaves them, (b, kv_heads, capacity) float32 and int32; if kept."""

    @abstractmethod
    def fill(self, rows: Rows, length: int, budget: Budget, scores: Tensor | None) -> Tensor | None:
        """Choose what stays of prompts of one length and one budget; it goes into slots 0, 1, ... in time order.

        scores: of `ScoredSlots.scores_of`. Returns positions, ascending: (c,) for all alike, (n, kv_heads, c), or None
        where everything stays.
        """

    @abstractmethod
    def resume(self, parts: Sequence[tuple[CacheSlots, Sequence[int]]]) -> None:
        """Instead of `fill`: rows of other caches go on in this one, in this order, with K and V in the same slots.

        The lengths of this cache already count these rows.
        """

    @abstractmethod
    def free(self) -> Tensor:
        """The slot that the next token of each row and head takes, (b, kv_heads) int64, once all prompts are in."""

    @abstractmethod
    def start(self, rolling: bool) -> None:
        """All prompts are in. `rolling`: `ranks` will be asked for."""

    @abstractmethod
    def allocate(self, keys: Tensor | None = None) -> int | Tensor:
        """The new token's slot: one for all, or indices (b * kv_heads,) into the flattened (b, kv_heads, capacity).

        keys: (b, kv_heads, d), where they are `scored`.
        """

    @abstractmethod
    def ranks(self, width: int) -> Tensor:
        """The number of older tokens held, for each of the first `width` slots, from `allocate` to `evict`: integers
        that broadcast to (b, kv_heads, width), any from 0 to capacity - 1 for an empty slot."""

    @abstractmethod
    def evict(self, row: Tensor | None, length: int, held: Held, asked: Queries | None = None) -> None:
        """Adds `row` (b, kv_heads, length), attention over the first slots, to the scores; evicts a token per row."""

    def moves(self) -> tuple[list[int], Tensor] | None:
        """Moves that the last `evict` requires: (rows, order); slot i of a row takes the contents of slot order[.., i].

        order: (len(rows), kv_heads, capacity) int64. The slots of these rows have done so; K and V are to follow.
        """
        return None

    def restart(self, rows: list[int]) -> None:
        """Evicts all tokens of `rows`; `go_on` follows."""
        return None

    @abstractmethod
    def go_on(self, lengths: CacheLengths) -> None:
        """Several tokens were evicted; `lengths` are those of the remaining ones. `start` follows."""

    def seen(self, width: int) -> Tensor | None:
        """Whether the newest query sees each slot's token, (b, kv_heads, width) bool, from `allocate` to `evict`; None:
        the count of tokens decides."""
        return None

    @abstractmethod
    def positions(self) -> Tensor:
        """Absolute position in each slot, (b, kv_heads, capacity) int32, -1 where empty. For inspection: not fast."""


class RingSlots(CacheSlots):
    """The first `sinks` slots stay, the others are a ring of `recent` + 1 whose oldest goes. Next to no state.

    A full row is the same with a ring of one: slots in order, and only a row past its end comes back to its last slot.
    """

    def __init__(self, lengths: CacheLengths, kv_heads: int, capacity: int) -> None:
        scored = [budget for budget in lengths.budgets if budget.scored]
        if scored:
            raise ValueError(f"{scored[0]} has heavy tokens, which need a policy with scores")
        self._lengths, self._kv_heads, self._capacity = lengths, kv_heads, capacity
        rows = zip(lengths.budgets, lengths.limits, strict=True)
        self._first = [limit - 1 if budget.full else budget.sinks for budget, limit in rows]
        self._slot: int | None = None
        self._flat = torch.empty(0, dtype=torch.int64, device=lengths.device)

    def fill(self, rows: Rows, length: int, budget: Budget, scores: Tensor | None) -> Tensor | None:
        if length <= budget.total:
            return None
        kept = torch.arange(budget.total, device=self._lengths.device)
        kept[budget.sinks :] += length - budget.total
        return kept

    def resume(self, parts: Sequence[tuple[CacheSlots, Sequence[int]]]) -> None:
        """No state is taken over: where no score decides, every cache has a row's tokens in the same slots."""

    def free(self) -> Tensor:
        slots = torch.tensor(self._next_slots(), device=self._lengths.device)
        return slots.unsqueeze(1).expand(-1, self._kv_heads)

    def start(self, rolling: bool) -> None:
        lengths, slots = self._lengths, self._next_slots()
        if len(set(zip(slots, self._first, lengths.limits, strict=True))) == 1:
            self._slot = slots[0]
            return
        base = torch.arange(len(lengths.budgets) * self._kv_heads, device=lengths.device) * self._capacity
        columns = (torch.tensor(x, device=lengths.device) for x in (slots, self._first, lengths.limits))
        self._flat, self._wrap, self._end = (x.repeat_interleave(self._kv_heads) + base for x in columns)

    def allocate(self, keys: Tensor | None = None) -> int | Tensor:
        return self._flat if self._slot is None else self._slot

    def ranks(self, width: int) -> Tensor:
        return self._lengths.at_step(f"ranks of {width} slots", lambda: self._ranks(width))

    def _ranks(self, width: int) -> Tensor:
        lengths = self._lengths
        # Rows at the same slot need not be alike: one may fill its ring while another goes round.
        alike = self._slot is not None and len(set(lengths.held)) == 1
        rows = slice(1) if alike else slice(None)
        numbers = [lengths.held[rows], self._first[rows], lengths.limits[rows]]
        held, first, limit = lengths.once(
            "rings", lambda: torch.tensor(numbers, device=lengths.device).view(3, -1, 1, 1).unbind(0)
        )
        # Until a ring is full its slots are in order, as are those of sinks and of full rows.
        order = held + lengths.step
        newest = torch.where(order < limit, order, first + (order - first) % (limit - first))
        start = torch.where(order < limit, self._capacity, first)
        ring = torch.where(order < limit, 1, limit - first)
        slots = torch.arange(width, device=lengths.device)
        return torch.where(slots < start, slots, (slots - 1 - newest) % ring + start)

    def evict(self, row: Tensor | None, length: int, held: Held, asked: Queries | None = None) -> None:
        if self._slot is None:
            following = self._flat + 1
            self._flat = torch.where(following == self._end, self._wrap, following)
        else:
            self._slot += 1
            if self._slot == self._lengths.limits[0]:
                self._slot = self._first[0]

    def go_on(self, lengths: CacheLengths) -> None:
        self._lengths, self._slot = lengths, None

    def positions(self) -> Tensor:
        lengths = self._lengths
        table = []
        for row, (budget, now, arrived) in enumerate(zip(lengths.budgets, lengths.next_pos, lengths.held, strict=True)):
            if lengths.dropped[row]:  # of a full row: in the order of time
                left = [p for p in range(now) if not any(start <= p < stop for start, stop in lengths.dropped[row])]
                table.append(left + [-1] * (self._capacity - len(left)))
                continue
            steps = lengths.before[row] + lengths.step
            prompt, held = now - steps, arrived - lengths.before[row]
            lasting = range(min(max(self._first[row] - held, 0), steps))  # before the ring, where tokens stay
            recent = range(max(steps - self._capacity, 0), steps)
            slots = [slot if slot < budget.sinks else slot + prompt - held for slot in range(held)]
            slots += [-1] * (self._capacity - held)
            for arrival in (*lasting, *recent):
                slots[self._slot_of(row, held + arrival)] = prompt + arrival
            if not budget.full:
                slots[self._slot_of(row, held + steps)] = -1  # what the last step let go
            table.append(slots)
        positions = torch.tensor(table, dtype=torch.int32, device=lengths.device)
        return positions[:, None].expand(-1, self._kv_heads, -1)

    def _next_slots(self) -> list[int]:
        return [self._slot_of(row, held + self._lengths.step) for row, held in enumerate(self._lengths.held)]

    def _slot_of(self, row: int, order: int) -> int:
        first, limit = self._first[row], self._lengths.limits[row]
        return order if order < limit else first + (order - first) % (limit - first)


class SlotChoice(NamedTuple):
    """Which of the slots of a cache with one KV head its rows' new tokens, the first of a part, attend to. `own`: the
    keys have what is chosen by."""

    choice: Choice
    own: bool

    def within(self, slots: int) -> SlotChoice | None:
        """Of so many slots; None: all are attended to."""
        return self if slots > self.choice.most else None

    def positions(self, slots: CacheSlots) -> Tensor | None:
        """Of the tokens in all slots before the new ones come, (b, 1, capacity) int32; None where that is not asked."""
        return slots.positions().clone() if self.choice.by_position else None

    def of(self, rows: slice | None, keys: Tensor, seen: Tensor | None, positions: Tensor | None) -> Tensor:
        """Of some rows, None: of all, with keys (r, 1, N, d): bool (r, 1, N), of those that are `seen`, None: all."""
        there = torch.ones_like(keys[..., 0], dtype=torch.bool) if seen is None else seen
        first = 0 if rows is None else rows.start
        tokens = torch.arange(first, first + len(keys), device=keys.device).unsqueeze(1)
        where = None if positions is None else some_of(positions, rows)[:, 0, : keys.shape[2]]
        return self.choice.seen(tokens, keys[:, 0], there, where, self.own)
