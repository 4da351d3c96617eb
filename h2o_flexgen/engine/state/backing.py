"""Backing stores of caches and hidden states off the compute tier, and transfer buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

import torch
from torch import Tensor

from h2o_flexgen.config.model.tensors import page_ceil
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.folders import Closing
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.pinned import Pin
from h2o_flexgen.memory.tiers import Buffer, Region, Tier, Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.schedule.footprint import STAGING_BUFFERS, STATE_BUFFERS


def typed(buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The first bytes of a flat uint8 `buffer` as a tensor."""
    return buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


class BufferCycle(Closing):
    """Sets of buffers, one on each of `tiers`, that transfers use in turn."""

    def __init__(self, tiers: Sequence[Tier], nbytes: int, count: int, what: str) -> None:
        self.nbytes = nbytes
        with ExitStack() as stack:
            self._sets = deque[tuple[list[Tensor], Ticket | None]]()
            for _ in range(count):
                buffers = [stack.enter_context(tier.allocate(nbytes, what, Pin.FIRST)).tensor for tier in tiers]
                self._sets.append((buffers, None))
            self._resources = stack.pop_all()

    def take(self) -> tuple[list[Tensor], Ticket | None]:
        """The next set, and the transfer that must end before it is written to."""
        self._sets.rotate(-1)
        return self._sets[-1]

    def until(self, ticket: Ticket) -> None:
        """The set taken last is in use until `ticket` is done."""
        self._sets[-1] = self._sets[-1][0], ticket

    def close(self) -> None:
        self._sets.clear()
        self._resources.close()


class Backing:
    """Bytes off the compute tier: in a memory tier, or in a region of a preallocated file.

    `save` and `fetch` move 1-D uint8 tensors, page-aligned on the host, in the order of the calls. The ticket of `save`
    is done once the source may change; `fetch` writes to its target after `after` and all earlier computes. A read from
    disk is checked against the digest of the last write; after a failed write every later call fails with its error,
    which a caller sees when it waits for the next load. staging: host buffers between a GPU and the disk.
    """

    def __init__(
        self, place: Buffer | Region, compute: Tier, copies: CopyEngine, staging: BufferCycle | None = None
    ) -> None:
        self._place, self._copies, self._staging, self._compute = place, copies, staging, compute.name
        self._last: Ticket | None = None  # that touched the place

    def save(self, source: Tensor) -> Ticket:
        if self._staging is None:
            self._last = self._write(source, self._last)
            return self._last
        (buffer,), before = self._staging.take()
        staged = buffer[: source.numel()]
        down = self._copies.copy(staged, source, f"{self._compute}->cpu", after=before)
        self._last = self._write(staged, down, self._last)
        self._staging.until(self._last)
        return down

    def fetch(self, target: Tensor, after: Ticket | None = None) -> Ticket:
        if self._staging is None:
            self._last = self._read(target, self._last, after)
            return self._last
        (buffer,), before = self._staging.take()
        staged = buffer[: target.numel()]
        self._last = self._read(staged, self._last, before)
        up = self._copies.copy(target, staged, f"cpu->{self._compute}", after=(self._last, after))
        self._staging.until(up)
        return up

    def _write(self, source: Tensor, *after: Ticket | None) -> Ticket:
        if isinstance(self._place, Region):
            return self._copies.write(self._place, source, after=after)
        link = f"{self._compute}->{self._place.tier.name}"
        return self._copies.copy(self._place.tensor[: source.numel()], source, link, after=after)

    def _read(self, target: Tensor, *after: Ticket | None) -> Ticket:
        if isinstance(self._place, Region):
            return self._copies.read_region(self._place, target, after=after)
        link = f"{self._place.tier.name}->{self._compute}"
        return self._copies.copy(target, self._place.tensor[: target.numel()], link, after=after)


K = TypeVar("K", bound=Hashable)


class Parking(Closing, Generic[K]):
    """Backing stores of things off the compute tier, `stores`, and transfer buffers on the compute tier."""

    def __init__(
        self, tiers: Tiers, copies: CopyEngine, places: Mapping[K, tuple[str, int]], what: str, buffers: str
    ) -> None:
        """`places`: tier and bytes of each thing. `what`, `buffers`: names of the stores and of the buffers."""
        largest = max((nbytes for _, nbytes in places.values()), default=0)
        self.stores: dict[K, Backing] = {}
        self._saving: list[tuple[Tensor, Ticket]] = []
        with ExitStack() as stack:
            count = STATE_BUFFERS if places else 0
            self._free = [stack.enter_context(tiers.compute.allocate(largest, buffers)).tensor for _ in range(count)]
            staging = None
            if tiers.gpu is not None and any(tier == "disk" for tier, _ in places.values()):
                staging = stack.enter_context(BufferCycle((tiers.cpu,), largest, STAGING_BUFFERS, "staging buffers"))
            for key, (tier, nbytes) in places.items():
                on_disk = tier == "disk"
                place: Buffer | Region = (tiers.disk if on_disk else tiers.memory(tier)).allocate(nbytes, what)
                stack.enter_context(place)
                self.stores[key] = Backing(place, tiers.compute, copies, staging if on_disk else None)
            self._resources = stack.pop_all()

    def take(self) -> tuple[Tensor, Ticket | None]:
        """A transfer buffer, a free one or that of the oldest save, and the copy that must end before it is written
        to."""
        if self._free:
            return self._free.pop(), None
        if not self._saving:
            raise RuntimeError("every transfer buffer is in use: the schedule holds more copies than it states")
        buffer, ticket = self._saving.pop(0)
        ticket.wait_issued()
        return buffer, ticket

    def take_now(self) -> Tensor:
        """A transfer buffer that may be computed on at once."""
        buffer, ticket = self.take()
        if ticket is not None:
            ticket.wait_on_device()
        return buffer

    def give_back(self, buffer: Tensor, after: Ticket | None = None) -> None:
        """Frees the buffer at once, or after `after`."""
        if after is None:
            self._free.append(buffer)
        else:
            self._saving.append((buffer, after))

    def close(self) -> None:
        """Releases all memory and files. No copy may be under way."""
        self.stores.clear()
        self._free.clear()
        self._saving.clear()
        self._resources.close()


class HiddenStore(Closing):
    """The hidden states of a block's GPU batches that are parked off the compute tier between two units."""

    def __init__(
        self, tiers: Tiers, copies: CopyEngine, places: Mapping[int, tuple[str, int]], nbytes: int, dtype: torch.dtype
    ) -> None:
        """places: per GPU batch the tier and a place there, which GPU batches that are never parked at one time may
        share. nbytes: of the largest hidden states."""
        self._places = {index: place for index, place in places.items() if place[0] != tiers.compute.name}
        self.moves = frozenset(self._places)
        self._dtype, size = dtype, page_ceil(nbytes)
        sizes = {place: (place[0], size) for place in sorted(set(self._places.values()))}
        self._parking = Parking(tiers, copies, sizes, "hidden states", "hidden buffers")
        self._shapes: dict[int, torch.Size] = {}
        self._loading: dict[int, tuple[Tensor, Ticket]] = {}

    def store(self, gpu_batch: GpuBatch) -> None:
        """Parks the hidden states; the compute tier's copy is dropped."""
        hidden, buffer = gpu_batch.take_hidden(), self._parking.take_now()
        typed(buffer, hidden.shape, self._dtype).copy_(hidden)
        self._shapes[gpu_batch.index] = hidden.shape
        self._parking.give_back(buffer, self._store(gpu_batch).save(self._used(gpu_batch, buffer)))
        gpu_batch.hidden = None

    def load(self, gpu_batch: GpuBatch) -> None:
        buffer, ready = self._parking.take()
        self._loading[gpu_batch.index] = buffer, self._store(gpu_batch).fetch(self._used(gpu_batch, buffer), ready)

    def wait(self, gpu_batch: GpuBatch) -> None:
        """Makes `gpu_batch.hidden` valid if a load is on its way."""
        loading = self._loading.pop(gpu_batch.index, None)
        if loading is not None:
            buffer, ticket = loading
            ticket.wait_on_device()
            gpu_batch.hidden = typed(buffer, self._shapes[gpu_batch.index], self._dtype).clone()
            self._parking.give_back(buffer)

    def _store(self, gpu_batch: GpuBatch) -> Backing:
        return self._parking.stores[self._places[gpu_batch.index]]

    def _used(self, gpu_batch: GpuBatch, buffer: Tensor) -> Tensor:
        """The pages of a transfer buffer that a GPU batch's hidden states take."""
        return buffer[: page_ceil(self._shapes[gpu_batch.index].numel() * self._dtype.itemsize)]

    def close(self) -> None:
        """Releases all memory and files. No copy may be under way."""
        self._loading.clear()
        self._parking.close()
