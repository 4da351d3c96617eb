"""The lengths of a cache's rows, and everything that follows from them, the budgets and the step number alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from h2o_flexgen.config.budget import Budget, Range

NEVER = 1 << 62

_Made = TypeVar("_Made")


class Occupied(NamedTuple):
    """The slots that attention reads: the first `width`, of which the first `length` have been used by some row; valid:
    (b, 1, width) bool, which of them hold tokens that the query sees, None: all."""

    length: int
    width: int
    valid: Tensor | None


def slots_needed(budgets: Sequence[Budget]) -> int:
    """Slots per (row, head): the largest budget, plus one for the newest token unless that row is full."""
    return max(budget.slots for budget in budgets)


def chooses(budgets: Sequence[Budget]) -> bool:
    """Whether scores decide in any row what is kept."""
    return any(budget.scored for budget in budgets)


class _Milestones(NamedTuple):
    """Steps at which something changes for good, known once the prompts are in.

    first_alone     no row evicts a single token before
    all_evict       every row evicts from then on
    saturated       no row occupies another slot, and no sink leaves the window, from then on
    end             every row is beyond its length
    leaving         by row (sinks out of the window at step 0, may be negative; sinks); empty if none leave
    growth          by row (slots occupied before step 0, slots occupied at most)
    """

    first_alone: int
    all_evict: int
    saturated: int
    end: int
    leaving: list[tuple[int, int]]
    growth: list[tuple[int, int]]


@dataclass(eq=False)
class _SharedMetadata:
    """Metadata that the caches of the same rows share in all layers with one window: the last results of
    `CacheLengths.at_step` by name, with their steps, and the last change of rows by its key."""

    milestones: _Milestones | None = None
    made: dict[str, tuple[int, Any]] = field(default_factory=dict)
    joined: tuple[list[Any], CacheLengths] | None = None


class CacheLengths:
    """How many tokens each row of a cache has seen and holds, now and at every later step.

    A row starts with the kept tokens of its prompt and takes one more slot per step, in order, until it occupies
    `limit` slots. A full row never evicts; beyond its length (it has finished, its GPU batch goes on) it overwrites its
    last slot. Per-row numbers live on the host, so that nothing waits for a device.

    In a layer with a `window` the query at position p sees tokens after p - window. Budgets are within the window, so
    that only sinks are ever held unseen; they stay in the first slots, and are no longer valid then.
    """

    def __init__(
        self, budgets: Sequence[Budget], capacity: int, device: torch.device, window: int | None = None
    ) -> None:
        self.budgets = tuple(budgets)
        self.capacity, self.device, self.window = capacity, device, window
        wide = [budget for budget in budgets if budget != budget.within(window)] if window is not None else []
        if wide:
            raise ValueError(f"{wide[0]} is not within the window of {window} tokens")
        self.limits = [budget.slots for budget in budgets]
        self.chooses = chooses(budgets)
        self.bursts = any(budget.burst > 1 for budget in budgets)
        """Whether several tokens of a row may go at once."""
        self.hides = window is not None and any(b.burst > 1 or b.after_prompt < b.total for b in budgets)
        """Whether tokens that have left the window may be held, sinks apart: the cache must know positions to hide
        them."""
        self.prompts: list[int | None] = [None] * len(self.budgets)
        self.before = [0] * len(self.budgets)  # steps that a row has taken in other caches
        self.gone = [0] * len(self.budgets)  # tokens of it that have gone several at a time
        self.dropped: list[tuple[Range, ...]] = [()] * len(self.budgets)  # and where, if that was not left to scores
        self.starts = [0] * len(self.budgets)
        """The position in its text of a row's first token; earlier tokens are in other chunks."""
        self.step = 0
        self.started = self.resumed = False
        self._held: list[int] | None = None  # once all prompts are in
        self._shared = _SharedMetadata()

    @classmethod
    def joined(cls, parts: Sequence[tuple[CacheLengths, Sequence[int]]]) -> CacheLengths:
        """The given rows of these caches go on in one cache, in this order, each where it is.

        All have the same capacity, device and window.
        """
        others = [(lengths._shared, lengths.step, tuple(rows)) for lengths, rows in parts[1:]]
        key = [parts[0][0].step, tuple(parts[0][1]), *others]
        return parts[0][0]._going_on(key, [(lengths, row) for lengths, rows in parts for row in rows])

    def _going_on(
        self,
        key: list[Any],
        members: Sequence[tuple[CacheLengths, int]],
        change: Callable[[CacheLengths], None] = lambda made: None,
    ) -> CacheLengths:
        """The lengths of these rows of caches after their steps, once `change` was made; once for all layers in which
        the rows change by the same `key`."""
        if self._shared.joined is not None and self._shared.joined[0] == key:
            return self._shared.joined[1].for_another_layer()
        made = CacheLengths([each.budgets[row] for each, row in members], self.capacity, self.device, self.window)
        made.resumed = True
        for name in ("prompts", "before", "gone", "dropped", "starts"):
            setattr(made, name, [getattr(each, name)[row] for each, row in members])
        made.before = [before + each.step for before, (each, _) in zip(made.before, members, strict=True)]
        change(made)
        self._shared.joined = key, made
        return made

    @property
    def bursting(self) -> list[int]:
        """Rows of which several tokens go in this step."""
        if not self.bursts:
            return []
        rows = enumerate(zip(self.budgets, self.held, strict=True))
        return [row for row, (b, held) in rows if b.burst > 1 and b.total - held == self.step]

    def thinned(self, rows: Sequence[int], ranges: Sequence[tuple[Range, ...]] = ()) -> CacheLengths:
        """After a step several tokens of `rows` have gone, a burst or these ranges of each: all rows go on, in slots
        from the first on."""

        def change(made: CacheLengths) -> None:
            for i, row in enumerate(rows):
                own = ranges[i] if ranges else ()
                made.gone[row] += sum(stop - start for start, stop in own) if ranges else self.budgets[row].burst
                made.dropped[row] += own

        return self._going_on([self.step, tuple(rows), ranges], self._all(), change)

    def restarted(self, rows: Sequence[int]) -> CacheLengths:
        """Before a step `rows` begin anew, without a token: a chunk is over."""
        positions = self.next_pos

        def change(made: CacheLengths) -> None:
            for row in rows:
                made.starts[row] += positions[row]
                made.prompts[row] = made.before[row] = made.gone[row] = 0

        return self._going_on([self.step, tuple(rows), "restarted"], self._all(), change)

    def _all(self) -> list[tuple[CacheLengths, int]]:
        return [(self, row) for row in range(len(self.budgets))]

    def for_another_layer(self) -> CacheLengths:
        """For the same rows in another layer with the same window, as these were when they were made."""
        other = copy(self)
        other.step, other.started = 0, False
        if not self.resumed:
            other.prompts, other._held, other.starts = [None] * len(self.budgets), None, [0] * len(self.budgets)
        return other

    @property
    def next_pos(self) -> list[int]:
        """Position of each row's next token."""
        return [prompt + before + self.step for prompt, before in zip(self._filled(), self.before, strict=True)]

    @property
    def newest_ranks(self) -> Tensor:
        """How many older tokens each row holds beside the newest, once that has come in: (b,) int64 on the device."""

        def make() -> Tensor:
            held, limits = self.once("held, limits", lambda: torch.tensor([self.held, self.limits], device=self.device))
            return torch.minimum(held + self.step, limits - 1)

        return self.at_step("newest ranks", make)

    @property
    def held(self) -> list[int]:
        """Tokens of each row that came into its slots before the first step: the kept tokens of its prompt, and
        one for each step in another cache, less the tokens that were evicted in bursts."""
        if self._held is None:
            rows = zip(self._filled(), self.budgets, self.before, self.gone, strict=True)
            self._held = [min(prompt, budget.after_prompt) + before - gone for prompt, budget, before, gone in rows]
        return self._held

    def _filled(self) -> list[int]:
        missing = [row for row, prompt in enumerate(self.prompts) if prompt is None]
        if missing:
            raise RuntimeError(f"rows {missing} have no prompt yet")
        return [prompt for prompt in self.prompts if prompt is not None]

    def fill(self, row: int, length: int) -> None:
        """Row `row` has a prompt of `length` tokens. RuntimeError if it is its second, ValueError if too long."""
        if self.started or self.prompts[row] is not None:
            raise RuntimeError(f"row {row} has its prompt already: a cache serves one block")
        if self.budgets[row].full and length > self.limits[row]:
            raise ValueError(f"row {row}: a prompt of {length} tokens, needed at most {self.limits[row]}")
        self.prompts[row] = length

    def start(self) -> None:
        """All prompts are in: find out which steps grow, which evict, and whether all rows stay alike."""
        if self._shared.milestones is None:
            self._shared.milestones = self._find_milestones()
        self.milestones = self._shared.milestones
        self.started = True

    def _find_milestones(self) -> _Milestones:
        held = self.held
        growth = [limit - h for limit, h in zip(self.limits, held, strict=True)]
        evicting = [b.total - h for b, h in zip(self.budgets, held, strict=True) if not b.full]
        alone = [b.total - h for b, h in zip(self.budgets, held, strict=True) if not b.full and b.burst == 1]
        saturated, leaving = max(growth) - 1, list[tuple[int, int]]()
        if self.window is not None and any(b.sinks and not b.full for b in self.budgets):
            sinks = [0 if b.full else b.sinks for b in self.budgets]
            leaving = [(now - self.window + 1, s) for now, s in zip(self.next_pos, sinks, strict=True)]
            saturated = max(saturated, *(s - gone for gone, s in leaving))
        return _Milestones(
            first_alone=min(alone, default=NEVER),
            all_evict=NEVER if len(evicting) < len(held) else max(evicting),
            saturated=saturated,
            end=max(growth) if all(budget.full for budget in self.budgets) else NEVER,
            leaving=leaving,
            growth=list(zip(held, self.limits, strict=True)),
        )

    def once(self, name: str, make: Callable[[], _Made]) -> _Made:
        """The result of `make` for these lengths as they are before the first step; once for all layers."""
        return self.at_step(name, make, 0)

    def at_step(self, name: str, make: Callable[[], _Made], step: int | None = None) -> _Made:
        """The result of `make` for these lengths as they are now; once for all layers. `step`: an earlier one, since
        which it has not changed."""
        now = self.step if step is None else step
        known = self._shared.made.get(name)
        if known is None or known[0] != now:
            known = self._shared.made[name] = now, make()
        return cast(_Made, known[1])

    @property
    def length(self) -> int:
        """Slots from the first on that some row occupies at this step, the new token included."""
        return max(min(held + self.step + 1, limit) for held, limit in self.milestones.growth)

    def occupied(self) -> Occupied:
        """The slots that attention reads at this step, the new token included."""
        return self.at_step("occupied", self._occupied_now, min(self.step, self.milestones.saturated))

    def _occupied_now(self) -> Occupied:
        counts = [min(held + self.step + 1, limit) for held, limit in self.milestones.growth]
        length = max(counts)
        # On a CPU attention gets all slots: a prefix of every (row, head)'s slots is not contiguous, and GEMMs there
        # copy such operands before every use, which takes longer than reading some free slots.
        width = self.capacity if self.device.type == "cpu" else length
        slots = self.once("slots", lambda: torch.arange(self.capacity, device=self.device).view(1, 1, -1))[..., :width]
        valid, leaving = None, self.milestones.leaving
        if any(gone + self.step > 0 and sinks for gone, sinks in leaving):
            gone, sinks = self.once("leaving", lambda: torch.tensor(leaving, device=self.device).T[..., None, None])
            hidden = torch.minimum((gone + self.step).clamp(min=0), sinks)
            valid = (slots >= hidden) & (slots <= self.newest_ranks[:, None, None])
        elif min(counts) < width:
            valid = slots < counts[0] if len(set(counts)) == 1 else slots <= self.newest_ranks[:, None, None]
        return Occupied(length, width, valid)

    def tick(self, steps: int = 1) -> None:
        """A step is over; -1: it was not. Raises RuntimeError when every row was at its end before it."""
        if steps > 0 and self.step >= self.milestones.end:
            raise RuntimeError(f"step {self.step}: every row of this cache has reached its full length")
        self.step += steps
