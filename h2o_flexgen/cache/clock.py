"""What follows from prompt lengths, budgets and the step number alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.config.eviction import Budget

NEVER = 1 << 62


class Occupied(NamedTuple):
    """The prefix of slots that attention reads: `length` of them, tokens but where `valid` (b, 1, length) denies it."""

    length: int
    valid: Tensor | None


def slots_needed(budgets: Sequence[Budget]) -> int:
    """Slots per (row, head): the largest budget, and one slot for the newest token unless that row is full."""
    return max(_limit(budget) for budget in budgets)


def _limit(budget: Budget) -> int:
    return budget.total if budget.full else budget.total + 1


class RowClock:
    """How many tokens each row has seen and holds, now and at every later step.

    A row starts with what it kept of its prompt and takes one more slot per step, in order, until it occupies `limit`
    slots: the occupied slots are always a prefix. A full row never evicts; one that is fed beyond its length (it has
    finished, its GPU batch goes on) keeps overwriting its last slot. Per-row numbers live on the host, so that nothing
    waits for a device.
    """

    def __init__(self, budgets: Sequence[Budget], device: torch.device) -> None:
        self.budgets = tuple(budgets)
        self.device = device
        self.limits = [_limit(budget) for budget in budgets]
        self.prompts: list[int | None] = [None] * len(self.budgets)
        self.step = 0
        self.started = False
        self._occupied: Occupied | None = None

    @property
    def all_full(self) -> bool:
        return all(budget.full for budget in self.budgets)

    @property
    def next_pos(self) -> list[int]:
        """Position of each row's next token."""
        return [prompt + self.step for prompt in self._lengths()]

    @property
    def counts(self) -> list[int]:
        """Tokens each row holds between steps."""
        return [min(held + self.step, budget.total) for held, budget in zip(self.held, self.budgets, strict=True)]

    @property
    def held(self) -> list[int]:
        """Tokens each row kept of its prompt."""
        return [min(prompt, budget.total) for prompt, budget in zip(self._lengths(), self.budgets, strict=True)]

    def fill(self, row: int, length: int) -> None:
        """Row `row` has a prompt of `length` tokens. RuntimeError if it is its second, ValueError if too long."""
        if self.started or self.prompts[row] is not None:
            raise RuntimeError(f"row {row} has its prompt already: a cache serves one block")
        if self.budgets[row].full and length > self.limits[row]:
            raise ValueError(f"row {row}: a prompt of {length} tokens, needed at most {self.limits[row]}")
        self.prompts[row] = length

    def start(self) -> None:
        """All prompts are in: settle which steps grow, which evict, and whether all rows stay alike."""
        held = self.held
        growth = [limit - h for limit, h in zip(self.limits, held, strict=True)]
        evicting = [b.total - h for b, h in zip(self.budgets, held, strict=True) if not b.full]
        self.started = True
        self.first_eviction = min(evicting, default=NEVER)  # no row evicts before this step
        self.all_evict = NEVER if len(evicting) < len(held) else max(evicting)  # every row evicts from this step on
        self._alike = len(set(zip(held, self.limits, strict=True))) == 1
        self._saturated = max(growth) - 1  # from this step on no row occupies one more slot
        self._end = max(growth) if self.all_full else NEVER
        self._held, self._limits = torch.tensor(held), torch.tensor(self.limits)

    def occupied(self) -> Occupied:
        """What attention reads at this step, the new token included."""
        if self._occupied is not None:
            return self._occupied
        if self._alike:
            occupied = Occupied(min(int(self._held[0]) + self.step + 1, self.limits[0]), None)
        else:
            counts = torch.minimum(self._held + self.step + 1, self._limits)
            length = int(counts.max())
            ragged = int(counts.min()) < length
            occupied = Occupied(
                length, (torch.arange(length) < counts[:, None, None]).to(self.device) if ragged else None
            )
        if self.step >= self._saturated:
            self._occupied = occupied
        return occupied

    def tick(self) -> None:
        """A step is over. Raises RuntimeError when every row was at its end before it."""
        if self.step >= self._end:
            raise RuntimeError(f"step {self.step}: every row of this cache has reached its full length")
        self.step += 1

    def _lengths(self) -> list[int]:
        missing = [row for row, prompt in enumerate(self.prompts) if prompt is None]
        if missing:
            raise RuntimeError(f"rows {missing} have no prompt yet")
        return [prompt for prompt in self.prompts if prompt is not None]
