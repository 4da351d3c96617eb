"""The links of a machine, each with transfers of one size that can be queued without end, through the copy engine.

How fast each is alone, and how much links and computing slow each other down: each works alone, then every two at once.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import combinations, cycle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.calibration.timing import Sample, Timer
from h2o_flexgen.config.hardware.rates import LinkRate
from h2o_flexgen.config.model.tensors import PAGE
from h2o_flexgen.errors import StorageError
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.cuda import open_device
from h2o_flexgen.memory.handle import Extent
from h2o_flexgen.memory.pinned import PinnedPool, lockable_memory
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import DeviceMemory, DiskTier, HostMemory, Region, Tier
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

COMPUTE = "compute"
NOTICED = 1.05
"""A factor of slowing down below this is no more than the noise of measuring it."""
_ROUNDS = 2
_DEPTH = 3  # transfers that are queued at any time
_FEWEST = 3  # times that each resource is seen to be done with something
_NAP = 1e-3

Factors = dict[str, dict[str, float]]


class Link(NamedTuple):
    """A link in one direction. `submit` queues one more transfer of `nbytes`."""

    name: str
    nbytes: int
    submit: Callable[[], Ticket]

    def queue(self, count: int = _QUEUED) -> None:
        """So many transfers, one behind the other; returns when all are done."""
        for ticket in [self.submit() for _ in range(count)]:
            ticket.wait()


def _in_turns(name: str, buffers: list[Tensor], transfer: Callable[[Tensor, Ticket | None], Ticket]) -> Link:
    """Transfers that take `buffers`, all of a size, in turns; the copy threads wait for one that is still in use.

    `transfer(buffer, after)` queues one.
    """
    turns: deque[tuple[Tensor, Ticket | None]] = deque((buffer, None) for buffer in buffers)

    def submit() -> Ticket:
        buffer, after = turns.popleft()
        ticket = transfer(buffer, after)
        turns.append((buffer, ticket))
        return ticket

    return Link(name, len(buffers[0]), submit)


def _touch(buffer: Tensor) -> Tensor:
    """`buffer` (uint8), written all over with bytes that do not compress: the first touch of memory is slow."""
    tile = torch.randint(0, 256, (MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for part in buffer.split(MIB):
        part.copy_(tile[: part.numel()])
    return buffer


class Disk(ExitStack):
    """A file that is written once and read in random order, and a smaller one that is rewritten.

    Owns the offload folder's run, the files, buffers and copy threads; a context manager. StorageError where the file
    system has no room for the smallest file that says anything.
    """

    def __init__(self, folder: str | Path, unit_bytes: int, file_bytes: int = FILE) -> None:
        super().__init__()
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
            self._buffers = [_touch(memory.allocate(self.unit, "buffers").tensor) for _ in range(2 * _BUFFERS)]
            self.free_bytes = offload.free_bytes()
            self.written = 0
            self.enter_context(stack.pop_all())

    @property
    def direct(self) -> bool:
        """Whether the file system lets transfers pass around the page cache."""
        return self._read.file.direct

    @property
    def blocks(self) -> int:
        return self._read.nbytes // self.unit

    def fresh_writes(self) -> Link:
        """Writes that go through the file once."""

        def count() -> None:
            self.written = min(self.written + self.unit, self.blocks * self.unit)

        return self._writes(self._read, self.unit, count)

    def rewrites(self, nbytes: int) -> Link:
        return self._writes(self._rewritten, nbytes)

    def _writes(self, region: Region, nbytes: int, count: Callable[[], None] = lambda: None) -> Link:
        parts = cycle([region.part(start, nbytes) for start in range(0, region.nbytes - nbytes + 1, nbytes)])

        def write(buffer: Tensor, after: Ticket | None) -> Ticket:
            count()
            return self.copies.write(next(parts), buffer, after=after)

        return _in_turns("cpu->disk", [buffer[:nbytes] for buffer in self._buffers[:_BUFFERS]], write)

    def settle(self) -> None:
        """Have all that was written on the disk, and none of it in the page cache."""
        for region in (self._read, self._rewritten):
            os.fsync(region.file.fd)
            os.posix_fadvise(region.file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.copies.watch([self._read.file.path], ours=True)

    def reads(self, nbytes: int) -> Link:
        """Reads of what `fresh_writes` wrote, as weights are read, in random order."""
        places = list(range(0, self.written // nbytes * nbytes, nbytes))
        random.Random(0).shuffle(places)
        following = cycle(places)

        def read(buffer: Tensor, after: Ticket | None) -> Ticket:
            extent = Extent(self._read.file.path, next(following), nbytes, 0, "calibration")
            return self.copies.read_extents((extent,), buffer, after=after)

        return _in_turns("disk->cpu", [buffer[:nbytes] for buffer in self._buffers[_BUFFERS:]], read)


class HostGpu(ExitStack):
    """The links between host and GPU, or between two parts of host memory where the GPU is emulated.

    Host memory as the engine has it: page-locked beside a real GPU, unless `pinned` is False. Owns memory and copy
    threads; a context manager.
    """

    def __init__(self, device: torch.device, unit_bytes: int, host_bytes: int, *, pinned: bool = True) -> None:
        super().__init__()
        with ExitStack() as stack:
            real = open_device(device)
            pins = PinnedPool(real, lockable_memory()) if real is not None and pinned else None
            gpu = stack.enter_context(closing(Tier("gpu", None, HostMemory() if real is None else DeviceMemory(real))))
            cpu = stack.enter_context(closing(Tier("cpu", None, HostMemory(), pins)))
            self.unit = max(PAGE, min(unit_bytes, LARGEST, host_bytes // _BUFFERS) // PAGE * PAGE)
            self._host = _touch(cpu.allocate(host_bytes, "host memory").tensor)
            self._gpu = [_touch(gpu.allocate(self.unit, "buffers").tensor) for _ in range(_BUFFERS)]
            self.copies = stack.enter_context(CopyEngine(device=real))
            self.enter_context(stack.pop_all())

    def link(self, name: str, nbytes: int) -> Link:
        """ "cpu->gpu" from one place of host memory after the other, "gpu->cpu" to them."""
        places = cycle(part for part in self._host.split(nbytes) if len(part) == nbytes)

        def copy(buffer: Tensor, after: Ticket | None) -> Ticket:
            place = next(places)
            dst, src = (buffer, place) if name == "cpu->gpu" else (place, buffer)
            return self.copies.copy(dst, src, name, after=after)

        return _in_turns(name, [buffer[:nbytes] for buffer in self._gpu], copy)


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


def _feed(link: Link, ends: list[float], stop: threading.Event) -> None:
    """Keeps one link busy until `stop`, and notes when each transfer ended. For a thread of its own."""
    queued: deque[Ticket] = deque()
    while not stop.is_set() and threading.main_thread().is_alive():
        while len(queued) < _DEPTH:
            queued.append(link.submit())
        queued.popleft().wait()
        ends.append(time.perf_counter())
    for ticket in queued:
        ticket.wait()


class Contest:
    """Resources that can be kept busy: links by feeders, "compute" by calling `compute` on this thread.

    `compute` returns only when its work is done.
    """

    def __init__(self, links: Mapping[str, Link], compute: Callable[[], object]) -> None:
        self._links, self._compute = dict(links), compute

    def slowdown(self, seconds: float) -> Factors:
        """`slowdown` of a HardwareProfile: factors below NOTICED are left out."""
        names = (COMPUTE, *self._links)
        sets = [*((name,) for name in names), *combinations(names, 2)]
        window = seconds / _ROUNDS / len(sets)
        seen: defaultdict[tuple[str, ...], list[dict[str, float]]] = defaultdict(list)
        for _ in range(_ROUNDS):  # alone and together in turns: other load on the machine falls on both alike
            for busy in sets:
                seen[busy].append(self.rates(busy, window))
        rate = {
            (busy, name): statistics.median(each[name] for each in found)
            for busy, found in seen.items()
            for name in busy
        }
        factors: Factors = {}
        for pair in combinations(names, 2):
            for name, beside in (pair, pair[::-1]):
                factor = rate[(name,), name] / rate[pair, name]
                if factor >= NOTICED:
                    factors.setdefault(name, {})[beside] = factor
        return factors

    def rates(self, names: tuple[str, ...], seconds: float) -> dict[str, float]:
        """Calls or transfers per second of each of `names` while all of them are busy."""
        done: dict[str, list[float]] = {name: [] for name in names}
        stop = threading.Event()
        with ThreadPoolExecutor(len(names), thread_name_prefix="h2o-calibrate") as threads:
            links = [name for name in names if name != COMPUTE]
            feeding = [threads.submit(_feed, self._links[name], done[name], stop) for name in links]
            start = time.perf_counter()
            try:
                while time.perf_counter() - start < seconds or min(map(len, done.values())) < _FEWEST:
                    if COMPUTE in names:
                        self._compute()
                        done[COMPUTE].append(time.perf_counter())
                    else:
                        time.sleep(_NAP)
                    if any(each.done() for each in feeding):  # it failed
                        break
                rates = {name: _rate(ends[:]) for name, ends in done.items()}
            finally:
                stop.set()
        for each in feeding:
            each.result()
        return rates


def _rate(ends: list[float]) -> float:
    """How many per second, from the end of the first to that of the last."""
    return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 and ends[-1] > ends[0] else 1.0
