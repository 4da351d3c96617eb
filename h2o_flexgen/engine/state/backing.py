"""Where a cache or hidden states rest while off the compute tier: memory of another tier, or a region on disk."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import NamedTuple, Protocol

from torch import Tensor

from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.pinned import Pin
from h2o_flexgen.memory.tiers import Buffer, Tier, Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.schedule.footprint import STAGING_BUFFERS


class BackingStore(Protocol):
    """A resting place of a fixed size. `save` and `fetch` move 1-D uint8 tensors of `nbytes`, page-aligned on the host.

    Operations on one store happen in the order in which they were asked for. What `save` returns is done once the
    source may change; `fetch` writes to its target after `after`, and after what was computed so far.
    """

    tier: str

    def save(self, source: Tensor) -> Ticket: ...
    def fetch(self, target: Tensor, after: Ticket | None = None) -> Ticket: ...
    def close(self) -> None: ...


class MemoryBacking:
    """Bytes in a memory tier that is not the compute tier."""

    def __init__(self, tier: Tier, nbytes: int, what: str, compute: Tier, copies: CopyEngine) -> None:
        self.tier = tier.name
        self._buffer = tier.allocate(nbytes, what)
        self._copies = copies
        self._down, self._up = f"{compute.name}->{tier.name}", f"{tier.name}->{compute.name}"
        self._last: Ticket | None = None

    def save(self, source: Tensor) -> Ticket:
        target = self._buffer.tensor[: source.numel()]
        self._last = self._copies.copy(target, source, self._down, after=self._last)
        return self._last

    def fetch(self, target: Tensor, after: Ticket | None = None) -> Ticket:
        source = self._buffer.tensor[: target.numel()]
        self._last = self._copies.copy(target, source, self._up, after=(self._last, after))
        return self._last

    def close(self) -> None:
        self._buffer.release()


class StagingSlot(NamedTuple):
    """A staging buffer's turn: `bytes` are free once `before` is done, the buffer's last transfer."""

    turn: int
    bytes: Tensor
    before: Ticket | None


class StagingPool:
    """Host buffers between a GPU and the disk, taken in turns. Nobody waits for one but the transfers through it."""

    def __init__(self, tier: Tier, nbytes: int, count: int = STAGING_BUFFERS) -> None:
        self._buffers = [tier.allocate(nbytes, "staging buffers", Pin.FIRST) for _ in range(count)]
        self._busy: list[Ticket | None] = [None] * count
        self._turn = 0

    def take(self, nbytes: int) -> StagingSlot:
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        return StagingSlot(turn, self._buffers[turn].tensor[:nbytes], self._busy[turn])

    def until(self, stage: StagingSlot, ticket: Ticket) -> None:
        self._busy[stage.turn] = ticket

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.release()


class DiskBacking:
    """A region of a preallocated file in the run directory. What is read back is checked against what was written."""

    tier = "disk"

    def __init__(self, tiers: Tiers, nbytes: int, what: str, copies: CopyEngine, staging: StagingPool | None) -> None:
        self._region = tiers.disk.allocate(nbytes, what)
        self._copies, self._staging = copies, staging
        self._compute = tiers.compute.name
        self._last: Ticket | None = None  # that touched the region

    def save(self, source: Tensor) -> Ticket:
        if self._staging is None:
            self._last = self._copies.write(self._region, source, after=self._last)
            return self._last
        stage = self._staging.take(source.numel())
        down = self._copies.copy(stage.bytes, source, f"{self._compute}->cpu", after=stage.before)
        self._last = self._copies.write(self._region, stage.bytes, after=(down, self._last))
        self._staging.until(stage, self._last)
        return down

    def fetch(self, target: Tensor, after: Ticket | None = None) -> Ticket:
        if self._staging is None:
            self._last = self._copies.read_region(self._region, target, after=(self._last, after))
            return self._last
        stage = self._staging.take(target.numel())
        self._last = self._copies.read_region(self._region, stage.bytes, after=(self._last, stage.before))
        up = self._copies.copy(target, stage.bytes, f"cpu->{self._compute}", after=(self._last, after))
        self._staging.until(stage, up)
        return up

    def close(self) -> None:
        self._region.release()


class BackingFactory:
    """Makes stores of one kind of thing; `stack` closes them, and the staging buffers that those on disk share."""

    def __init__(
        self, tiers: Tiers, copies: CopyEngine, what: str, largest: int, used: set[str], stack: ExitStack
    ) -> None:
        """`largest`: bytes of the largest thing; `used`: the tiers that stores will be asked for."""
        self._tiers, self._copies, self._what, self._stack = tiers, copies, what, stack
        staged = "disk" in used and tiers.gpu is not None
        self._staging = stack.enter_context(closing(StagingPool(tiers.cpu, largest))) if staged else None

    def __call__(self, tier: str, nbytes: int) -> BackingStore:
        backing: DiskBacking | MemoryBacking
        if tier == "disk":
            backing = DiskBacking(self._tiers, nbytes, self._what, self._copies, self._staging)
        else:
            backing = MemoryBacking(self._tiers.memory(tier), nbytes, self._what, self._tiers.compute, self._copies)
        return self._stack.enter_context(closing(backing))


class BufferRing:
    """Transfer buffers on the compute tier. `take` prefers a free one, else waits for the oldest being saved."""

    def __init__(self, tier: Tier, nbytes: int, count: int, what: str) -> None:
        self.buffers: list[Buffer] = [tier.allocate(nbytes, what) for _ in range(count)]
        self._free = list(range(count))
        self._saving: list[tuple[int, Ticket]] = []

    def take(self) -> tuple[int, Ticket | None]:
        """A buffer, and what has to be done before it is written to: a copy that a GPU has been given."""
        if self._free:
            return self._free.pop(), None
        if not self._saving:
            raise RuntimeError("every transfer buffer is in use: the schedule holds more copies than it states")
        slot, ticket = self._saving.pop(0)
        ticket.wait_issued()
        return slot, ticket

    def take_now(self) -> int:
        """A buffer that may be computed on at once."""
        slot, ticket = self.take()
        if ticket is not None:
            ticket.wait_on_device()
        return slot

    def give_back(self, slot: int, after: Ticket | None = None) -> None:
        """The buffer is free at once, or once `after` is done."""
        if after is None:
            self._free.append(slot)
        else:
            self._saving.append((slot, after))

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.release()
        self.buffers = []
