"""What follows from prompt lengths, budgets and the step number alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from h2o_flexgen.config.eviction import Budget

NEVER = 1 << 62

_Made = TypeVar("_Made")


class Occupied(NamedTuple):
    """What attention reads: the first `width` slots, of which the first `length` have been used by some row.

    All of them hold tokens that the query sees unless `valid` (b, 1, width) says less.
    """

    length: int
    width: int
    valid: Tensor | None


def slots_needed(budgets: Sequence[Budget]) -> int:
    """Slots per (row, head): the largest budget, and one slot for the newest token unless that row is full."""
    return max(_limit(budget) for budget in budgets)


def chooses(budgets: Sequence[Budget]) -> bool:
    """Whether scores decide in any row what stays: else everything does, or the order of arrival says what goes."""
    return any(budget.heavy and not budget.full for budget in budgets)


def _limit(budget: Budget) -> int:
    return budget.total if budget.full else budget.total + 1


class _Settled(NamedTuple):
    """What is known of all steps once the prompts are in."""

    first_eviction: int
    """No row evicts before this step."""
    all_evict: int
    """Every row evicts from this step on."""
    saturated: int
    """From this step on no row occupies one more slot."""
    end: int
    """The step in which every row is beyond its length."""
    leaving: list[tuple[int, int]]
    """By row (sinks out of the window at step 0, or less; sinks); empty where none leave."""
    growth: list[tuple[int, int]]
    """By row (slots occupied before step 0, slots occupied at most)."""
    slots: Tensor
    """(1, 1, capacity) int64: 0, 1, ..."""
    made: dict[str, Any]
    """By name what `RowClock.once` was asked for."""


@dataclass(eq=False)
class _Kin:
    """What clocks of the same rows share: those of layers with the same window, see `RowClock.twin`."""

    settled: _Settled | None = None
    of_step: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """By name what `RowClock.at_step` was asked for last: in which state, and the answer."""
    joined: tuple[list[Any], RowClock] | None = None
    """The last that was joined of these and others: of which and in what state, and the outcome."""


def _state(clock: RowClock, rows: Sequence[int]) -> tuple[Any, ...]:
    return clock.step, tuple(clock.prompts), clock.before, tuple(rows)


class RowClock:
    """How many tokens each row has seen and holds, now and at every later step.

    A row starts with what it kept of its prompt and takes one more slot per step, in order, until it occupies `limit`
    slots: the occupied slots are always a prefix. A full row never evicts; one that is fed beyond its length (it has
    finished, its GPU batch goes on) keeps overwriting its last slot. Per-row numbers live on the host, so that nothing
    waits for a device. Rows of other clocks may go on in a new one, see `joined`.

    In a layer with a `window` the query at position p sees tokens after p - window. Budgets are within the window, so
    that only sinks are ever held unseen: everything else goes by the time it leaves the window. Sinks stay in the first
    slots, and those that have left are no longer valid.
    """

    def __init__(
        self, budgets: Sequence[Budget], capacity: int, device: torch.device, window: int | None = None
    ) -> None:
        self.budgets = tuple(budgets)
        self.capacity, self.device, self.window = capacity, device, window
        wide = [budget for budget in budgets if budget != budget.within(window)] if window is not None else []
        if wide:
            raise ValueError(f"{wide[0]} is not within the window of {window} tokens")
        self.limits = [_limit(budget) for budget in budgets]
        self.chooses = chooses(budgets)
        self.prompts: list[int | None] = [None] * len(self.budgets)
        self.before = [0] * len(self.budgets)  # steps that a row has taken in other caches
        self.step = 0
        self.started = False
        self._held: list[int] | None = None  # once all prompts are in, it is settled
        self._occupied: Occupied | None = None
        self.resumed = False
        self._kin = _Kin()

    @classmethod
    def joined(cls, parts: Sequence[tuple[RowClock, Sequence[int]]]) -> RowClock:
        """The given rows of these clocks go on in this one, in this order, each where it is.

        All have the same capacity, device and window. Where twins of these have been joined in the same way, it is a
        twin of what came of that: a lane's rows change in all layers alike, and there may be many.
        """
        kin = parts[0][0]._kin
        how = [(clock._kin, _state(clock, rows)) for clock, rows in parts[1:]]
        key = [_state(*parts[0]), *how]
        if kin.joined is not None and kin.joined[0] == key:
            return kin.joined[1].twin()
        first, members = parts[0][0], [(clock, row) for clock, rows in parts for row in rows]
        joined = cls([clock.budgets[row] for clock, row in members], first.capacity, first.device, first.window)
        joined.prompts = [clock.prompts[row] for clock, row in members]
        joined.before = [clock.before[row] + clock.step for clock, row in members]
        joined.resumed = True
        kin.joined = key, joined
        return joined

    def twin(self) -> RowClock:
        """A clock for the same rows in another layer with the same window, as this one was when it was made."""
        twin = copy(self)
        twin.step, twin.started, twin._occupied = 0, False, None
        if not self.resumed:
            twin.prompts, twin._held = [None] * len(self.budgets), None
        return twin

    @property
    def all_full(self) -> bool:
        return all(budget.full for budget in self.budgets)

    @property
    def next_pos(self) -> list[int]:
        """Position of each row's next token."""
        return [prompt + before + self.step for prompt, before in zip(self._lengths(), self.before, strict=True)]

    @property
    def counts(self) -> list[int]:
        """Tokens each row holds between steps."""
        return [min(held + self.step, budget.total) for held, budget in zip(self.held, self.budgets, strict=True)]

    @property
    def newest_ranks(self) -> Tensor:
        """How many older tokens each row holds beside the newest, once that has come in: (b,) int64 on the device."""

        def make() -> Tensor:
            held, limits = self.once("held, limits", lambda: torch.tensor([self.held, self.limits], device=self.device))
            return torch.minimum(held + self.step, limits - 1)

        return self.at_step("newest ranks", make)

    @property
    def held(self) -> list[int]:
        """Tokens of each row that came into its slots before the first step: those kept of its prompt, and one for
        each step in another cache."""
        if self._held is None:
            rows = zip(self._lengths(), self.budgets, self.before, strict=True)
            self._held = [min(prompt, budget.total) + before for prompt, budget, before in rows]
        return self._held

    def fill(self, row: int, length: int) -> None:
        """Row `row` has a prompt of `length` tokens. RuntimeError if it is its second, ValueError if too long."""
        if self.started or self.prompts[row] is not None:
            raise RuntimeError(f"row {row} has its prompt already: a cache serves one block")
        if self.budgets[row].full and length > self.limits[row]:
            raise ValueError(f"row {row}: a prompt of {length} tokens, needed at most {self.limits[row]}")
        self.prompts[row] = length

    def start(self) -> None:
        """All prompts are in: settle which steps grow, which evict, and whether all rows stay alike."""
        settled = self._kin.settled if self.resumed else None
        self._settled = self._settle() if settled is None else settled
        if self.resumed:
            self._kin.settled = self._settled
        self.first_eviction, self.all_evict = self._settled.first_eviction, self._settled.all_evict
        self.started = True

    def _settle(self) -> _Settled:
        held = self.held
        growth = [limit - h for limit, h in zip(self.limits, held, strict=True)]
        evicting = [b.total - h for b, h in zip(self.budgets, held, strict=True) if not b.full]
        saturated, leaving = max(growth) - 1, list[tuple[int, int]]()
        if self.window is not None and any(b.sinks and not b.full for b in self.budgets):
            sinks = [0 if b.full else b.sinks for b in self.budgets]
            leaving = [(now - self.window + 1, s) for now, s in zip(self.next_pos, sinks, strict=True)]
            saturated = max(saturated, *(s - gone for gone, s in leaving))
        return _Settled(
            first_eviction=min(evicting, default=NEVER),
            all_evict=NEVER if len(evicting) < len(held) else max(evicting),
            saturated=saturated,
            end=max(growth) if self.all_full else NEVER,
            leaving=leaving,
            growth=list(zip(held, self.limits, strict=True)),
            slots=torch.arange(self.capacity, device=self.device).view(1, 1, -1),
            made={},
        )

    def once(self, name: str, make: Callable[[], _Made]) -> _Made:
        """What `make` makes of this clock alone, as it is before its first step; of twins that go on, one is asked."""
        made = self._settled.made
        if name not in made:
            made[name] = make()
        return cast(_Made, made[name])

    def at_step(self, name: str, make: Callable[[], _Made]) -> _Made:
        """What `make` makes of this clock alone, as it is now; of twins in the same step one is asked."""
        now = _state(self, ())
        known = self._kin.of_step.get(name)
        if known is None or known[0] != now:
            known = self._kin.of_step[name] = now, make()
        return cast(_Made, known[1])

    @property
    def length(self) -> int:
        """Slots from the first on that some row occupies at this step, the new token included."""
        return max(min(held + self.step + 1, limit) for held, limit in self._settled.growth)

    def occupied(self) -> Occupied:
        """What attention reads at this step, the new token included."""
        if self._occupied is not None:
            return self._occupied
        occupied = self.at_step("occupied", self._now_occupied)
        if self.step >= self._settled.saturated:
            self._occupied = occupied
        return occupied

    def _now_occupied(self) -> Occupied:
        counts = [min(held + self.step + 1, limit) for held, limit in self._settled.growth]
        length = max(counts)
        width = self._width(length)
        slots, valid = self._settled.slots[:, :, :width], None
        leaving = self._settled.leaving
        if any(gone + self.step > 0 and sinks for gone, sinks in leaving):
            gone, sinks = self.once("leaving", lambda: torch.tensor(leaving, device=self.device).T[..., None, None])
            hidden = torch.minimum((gone + self.step).clamp(min=0), sinks)
            valid = (slots >= hidden) & (slots <= self.newest_ranks[:, None, None])
        elif min(counts) < width:
            valid = slots < counts[0] if len(set(counts)) == 1 else slots <= self.newest_ranks[:, None, None]
        return Occupied(length, width, valid)

    def _width(self, length: int) -> int:
        """How many slots to hand to attention: those in use, or on a CPU all of them.

        A prefix of every (row, head)'s slots is not contiguous, and GEMMs on a CPU copy such operands before every use,
        which takes longer than reading some free slots: K and V are never copied.
        """
        return self.capacity if self.device.type == "cpu" else length

    def tick(self, steps: int = 1) -> None:
        """A step is over; -1: it was not. Raises RuntimeError when every row was at its end before it."""
        if steps > 0 and self.step >= self._settled.end:
            raise RuntimeError(f"step {self.step}: every row of this cache has reached its full length")
        self.step += steps

    def _lengths(self) -> list[int]:
        missing = [row for row, prompt in enumerate(self.prompts) if prompt is None]
        if missing:
            raise RuntimeError(f"rows {missing} have no prompt yet")
        return [prompt for prompt in self.prompts if prompt is not None]
