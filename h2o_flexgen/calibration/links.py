"""The links of a machine, each with transfers of one size that can be queued without end, through the copy engine."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.calibration.bench import Spreads, touch
from h2o_flexgen.calibration.timing import Sample, Timer
from h2o_flexgen.config.hardware.rates import LinkRate
from h2o_flexgen.config.model.tensors import PAGE
from h2o_flexgen.errors import StorageError
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.cuda import open_device
from h2o_flexgen.memory.handle import Extent
from h2o_flexgen.memory.pages import DeviceMemory, HostMemory
from h2o_flexgen.memory.pinned import PinnedPool, lockable_memory
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import DiskTier, Region, Tier
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.units import GIB, KIB, MIB, format_bytes

LARGEST = 64 * MIB
"""Of one transfer: larger units are cut into pieces long before that, and only take more time."""
SMALL = 64 * KIB
FILE = 4 * GIB
"""Bytes of the file that is read: as much of it as there is time to write."""
_LEAST_FILE = 16 * MIB
_FREE_SHARE = 4  # of the file system's free bytes, a quarter is used
_QUEUED = 4  # transfers that are timed together
_BUFFERS = 2  # that transfers go to in turns, as weights do
_REWRITTEN = 8  # transfers of the region that is written again and again


class Link(NamedTuple):
    """A link in one direction. `submit` queues one more transfer of `nbytes`."""

    name: str
    nbytes: int
    submit: Callable[[], Ticket]

    def queue(self, count: int = _QUEUED) -> None:
        """So many transfers, one behind the other; returns when all are done."""
        for ticket in [self.submit() for _ in range(count)]:
            ticket.wait()


class Turns:
    """Buffers of a size that transfers take in turns; one that is still in use is waited for by the copy threads."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers, self._next = buffers, 0
        self._last: list[Ticket | None] = [None] * len(buffers)

    def submit(self, transfer: Callable[[Tensor, Ticket | None], Ticket]) -> Ticket:
        """`transfer(buffer, after)` with the next buffer."""
        turn, self._next = self._next, (self._next + 1) % len(self._buffers)
        ticket = self._last[turn] = transfer(self._buffers[turn], self._last[turn])
        return ticket


class Disk:
    """A file that is written once and read in random order, and a smaller one that is rewritten.

    Owns the offload folder's run, the files, buffers and copy threads; a context manager. StorageError where the file
    system has no room for the smallest file that says anything.
    """

    def __init__(self, folder: str | Path, unit_bytes: int, file_bytes: int = FILE) -> None:
        with ExitStack() as stack:
            offload = stack.enter_context(OffloadDir(folder))
            size = min(file_bytes, offload.free_bytes() // _FREE_SHARE) // PAGE * PAGE
            if size < min(file_bytes, _LEAST_FILE):
                raise StorageError(
                    f"{offload.path} is on a file system with {format_bytes(offload.free_bytes())} free",
                    f"calibration writes a file of {format_bytes(_LEAST_FILE)} at least, a quarter of that",
                    "free some space, or name another folder with --offload-dir",
                )
            # Room for warming up and for a few samples.
            self.unit = max(PAGE, min(unit_bytes, LARGEST, size // (4 * _QUEUED)) // PAGE * PAGE)
            tier = stack.enter_context(closing(DiskTier(None, offload)))
            self._read = tier.allocate(size, "a file to be read")
            self._rewritten = tier.allocate(_REWRITTEN * self.unit, "a file to be written")
            self.copies = stack.enter_context(CopyEngine())
            memory = Tier("cpu", None, HostMemory())
            stack.enter_context(closing(memory))
            self._buffers = [touch(memory.allocate(self.unit, "buffers").tensor) for _ in range(2 * _BUFFERS)]
            self.free_bytes = offload.free_bytes()
            self.written = 0
            self._resources = stack.pop_all()

    @property
    def direct(self) -> bool:
        """Whether the file system lets transfers pass around the page cache."""
        return self._read.file.direct

    @property
    def blocks(self) -> int:
        """Transfers that the file takes."""
        return self._read.nbytes // self.unit

    def fresh_writes(self) -> Link:
        """Writes that go through the file once."""
        parts = cycle(_parts(self._read, self.unit))

        def write(buffer: Tensor, after: Ticket | None) -> Ticket:
            self.written = min(self.written + self.unit, self.blocks * self.unit)
            return self.copies.write(next(parts), buffer, after=after)

        turns = Turns(self._buffers[:_BUFFERS])
        return Link("cpu->disk", self.unit, lambda: turns.submit(write))

    def rewrites(self, nbytes: int) -> Link:
        """Writes over what was written before."""
        parts = cycle(_parts(self._rewritten, nbytes))
        turns = Turns([buffer[:nbytes] for buffer in self._buffers[:_BUFFERS]])
        return Link(
            "cpu->disk",
            nbytes,
            lambda: turns.submit(lambda buffer, after: self.copies.write(next(parts), buffer, after=after)),
        )

    def settle(self) -> None:
        """Have all that was written on the disk, and none of it in the page cache."""
        for region in (self._read, self._rewritten):
            os.fsync(region.file.fd)
            os.posix_fadvise(region.file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.copies.watch([self._read.file.path], ours=True)

    def reads(self, nbytes: int) -> Link:
        """Reads of what `fresh_writes` wrote, as weights are read, in random order."""
        places = cycle(_shuffled(self.written // nbytes))
        path = self._read.file.path

        def read(buffer: Tensor, after: Ticket | None) -> Ticket:
            extent = Extent(path, next(places) * nbytes, nbytes, 0, "calibration")
            return self.copies.read_extents((extent,), buffer, after=after)

        turns = Turns([buffer[:nbytes] for buffer in self._buffers[_BUFFERS:]])
        return Link("disk->cpu", nbytes, lambda: turns.submit(read))

    def close(self) -> None:
        """Stop the threads, remove the files."""
        self._resources.close()

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parts(region: Region, nbytes: int) -> list[Region]:
    return [region.part(start, nbytes) for start in range(0, region.nbytes - nbytes + 1, nbytes)]


def _shuffled(count: int) -> list[int]:
    order = list(range(count))
    random.Random(0).shuffle(order)
    return order


class HostGpu:
    """The links between host and GPU, or between two parts of host memory where the GPU is emulated.

    Host memory as the engine has it: page-locked beside a real GPU, unless `pinned` is False. Owns memory and copy
    threads; a context manager.
    """

    def __init__(self, device: torch.device, unit_bytes: int, host_bytes: int, *, pinned: bool = True) -> None:
        with ExitStack() as stack:
            real = open_device(device)
            pins = PinnedPool(real, lockable_memory()) if real is not None and pinned else None
            gpu = stack.enter_context(closing(Tier("gpu", None, HostMemory() if real is None else DeviceMemory(real))))
            cpu = stack.enter_context(closing(Tier("cpu", None, HostMemory(), pins)))
            self.unit = max(PAGE, min(unit_bytes, LARGEST, host_bytes // _BUFFERS) // PAGE * PAGE)
            self._host = touch(cpu.allocate(host_bytes, "host memory").tensor)
            self._gpu = [touch(gpu.allocate(self.unit, "buffers").tensor) for _ in range(_BUFFERS)]
            self.copies = stack.enter_context(CopyEngine(device=real))
            self._resources = stack.pop_all()

    def inward(self, nbytes: int) -> Link:
        """cpu->gpu, from one place of host memory after the other."""
        places, turns = self._places(nbytes), Turns([buffer[:nbytes] for buffer in self._gpu])

        def copy(buffer: Tensor, after: Ticket | None) -> Ticket:
            return self.copies.copy(buffer, next(places), "cpu->gpu", after=after)

        return Link("cpu->gpu", nbytes, lambda: turns.submit(copy))

    def outward(self, nbytes: int) -> Link:
        """gpu->cpu, to one place of host memory after the other."""
        places, turns = self._places(nbytes), Turns([buffer[:nbytes] for buffer in self._gpu])

        def copy(buffer: Tensor, after: Ticket | None) -> Ticket:
            return self.copies.copy(next(places), buffer, "gpu->cpu", after=after)

        return Link("gpu->cpu", nbytes, lambda: turns.submit(copy))

    def _places(self, nbytes: int) -> Iterator[Tensor]:
        return cycle(part for part in self._host.split(nbytes) if len(part) == nbytes)

    def close(self) -> None:
        """Stop the threads, give the memory back."""
        self._resources.close()

    def __enter__(self) -> HostGpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def queued_sample(timer: Timer, link: Link, seconds: float, most: int | None = None) -> Sample:
    """Seconds of one transfer among others that are queued. `most`: transfers, those that warm up included."""
    samples = None if most is None else max(1, most // _QUEUED - 1)
    return timer.measure(link.queue, seconds, per=_QUEUED, most=samples)


def link_rate(large: tuple[int, float], small: tuple[int, float]) -> LinkRate:
    """Latency and bandwidth from (bytes, seconds) of large and of small transfers."""
    (many, long), (few, short) = large, small
    if many <= few or long <= short:
        return LinkRate(many / long)
    rate = (many - few) / (long - short)
    return LinkRate(rate, max(0.0, short - few / rate))


def measured_rate(
    timer: Timer, large: Link, small: Link, seconds: float, spreads: Spreads, most: int | None = None
) -> LinkRate:
    """The rate of one link, by transfers of two sizes; `most`: of the large ones."""
    unit = spreads.note(large.name, queued_sample(timer, large, seconds * 0.8, most))
    little = queued_sample(timer, small, seconds * 0.2)
    return link_rate((large.nbytes, unit.seconds), (small.nbytes, little.seconds))
