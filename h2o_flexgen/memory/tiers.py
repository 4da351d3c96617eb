"""The tiers: places with a capacity. `Tier` hands out memory, of the host or of a GPU, `DiskTier` regions of files;
`Tiers` is the run's set."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from h2o_flexgen.config.model.tensors import PAGE, page_ceil
from h2o_flexgen.errors import MemoryRefused, PlanError, required, storage_error
from h2o_flexgen.folders import Closing
from h2o_flexgen.huge import huge_pages
from h2o_flexgen.memory.cuda import Device, open_device
from h2o_flexgen.memory.disk import DirectFile
from h2o_flexgen.memory.pinned import PageLock, Pin, PinnedPool
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.units import format_bytes


class Allocation(NamedTuple):
    """Bytes (1-D uint8), and the call that gives them back to the system; None: their last reference frees them."""

    tensor: torch.Tensor
    release: Callable[[], object] | None = None
    lock: PageLock | None = None
    """The lock on the bytes, or the wish for one."""

    def free(self) -> None:
        if self.lock is not None:
            self.lock.undo()
        if self.release is not None:
            self.release()


class HostMemory:
    """Private anonymous pages: page-aligned, zeroed, huge where the kernel has huge pages, gone on release."""

    device = torch.device("cpu")

    def allocate(self, nbytes: int) -> Allocation:
        """MemoryRefused where the system has no more. A view that outlives the release reads zeros; it never faults."""
        if nbytes == 0:
            return Allocation(torch.empty(0, dtype=torch.uint8))
        try:
            pages = huge_pages(nbytes)
        except OSError as error:
            raise MemoryRefused(
                f"the system refused {format_bytes(nbytes)} of host memory ({error.strerror})",
                change="free memory, or lower --cpu-mem or --gpu-batch-size",
            ) from error
        # The release is at once, even if a view keeps the address range alive for a while.
        return Allocation(torch.frombuffer(pages, dtype=torch.uint8), lambda: pages.madvise(mmap.MADV_DONTNEED))


class DeviceMemory:
    def __init__(self, gpu: Device) -> None:
        self.device = gpu.torch_device
        self._gpu = gpu

    def allocate(self, nbytes: int) -> Allocation:
        """MemoryRefused where the GPU has no more."""
        try:
            return Allocation(self._gpu.allocate(nbytes))
        except torch.OutOfMemoryError as error:
            raise MemoryRefused(
                f"the GPU refused {format_bytes(nbytes)}", change="lower --gpu-mem or --gpu-batch-size"
            ) from error


class BufferPool:
    """Allocations waiting for a buffer of just their size: the system need not find and zero them, nor lock them for a
    GPU, anew.

    The first write to new memory may be slower than a disk: where a virtual machine gives free memory back to its host,
    0.8 GB/s were measured. Thread safe. No allocation waits until `open`, nor after `close`.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of the allocations that wait, in whole pages."""
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Allocation]] = {}
        self._open = False

    def open(self) -> None:
        """From now on `put` takes allocations."""
        self._open = True

    def close(self) -> None:
        """No allocation is taken any more, and the waiting ones go back to the system."""
        self._open = False
        self.shrink(0)

    def put(self, nbytes: int, allocation: Allocation) -> bool:
        """Keep `nbytes` whose views are used no more; False where they are not taken."""
        with self._lock:
            if not self._open or not nbytes:
                return False
            self._waiting.setdefault(nbytes, []).append(allocation)
            self.nbytes += page_ceil(nbytes)
        return True

    def take(self, nbytes: int) -> Allocation | None:
        """An allocation of just `nbytes`, zeroed; None where none waits."""
        with self._lock:
            allocation = self._pop(nbytes)
        if allocation is not None:
            allocation.tensor.zero_()
        return allocation

    def shrink(self, nbytes: int) -> bool:
        """Give allocations back until no more than `nbytes` wait; False where no more did."""
        shrunk = False
        while True:
            with self._lock:
                allocation = None if self.nbytes <= nbytes else self._pop(next(iter(self._waiting)))
            if allocation is None:
                return shrunk
            allocation.free()
            shrunk = True

    def _pop(self, nbytes: int) -> Allocation | None:
        waiting = self._waiting.get(nbytes)
        if not waiting:
            return None
        allocation = waiting.pop()
        if not waiting:
            del self._waiting[nbytes]
        self.nbytes -= page_ceil(nbytes)
        return allocation


class Ledger:
    """Counts bytes against a capacity (None: no limit), itemised by what they are for. Owns no memory. Thread safe."""

    def __init__(self, name: str, capacity: int | None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"the capacity of the {name} tier is negative: {capacity}")
        self.name, self.capacity = name, capacity
        self.used = self.peak = 0
        """Bytes in use now, and the most that were in use at once. Changed by `charge` and `refund` alone."""
        self._lock = threading.Lock()
        self.items: dict[str, int] = {}
        """Bytes in use by what they are for."""
        self._live: set[Closing] = set()

    def charge(self, nbytes: int, what: str) -> None:
        """Count `nbytes` made elsewhere. PlanError, and nothing counted, where they do not fit."""
        if nbytes < 0:
            raise ValueError(f"cannot charge {nbytes} bytes for {what}")
        with self._lock:
            if self.capacity is not None and self.used + nbytes > self.capacity:
                raise PlanError(
                    f"{what} needs {format_bytes(nbytes)} on the {self.name} tier, which has "
                    f"{format_bytes(self.capacity - self.used)} free of {format_bytes(self.capacity)}",
                    f"needed a cap of {format_bytes(self.used + nbytes)}",
                    f"raise --{self.name}-mem, or move a share of it to another tier",
                )
            self.items[what] = self.items.get(what, 0) + nbytes
            self.used += nbytes
            self.peak = max(self.peak, self.used)

    def refund(self, nbytes: int, what: str) -> None:
        """Give back what was charged for `what`; ValueError for more than that."""
        with self._lock:
            held = self.items.get(what, 0)
            if not 0 <= nbytes <= held:
                raise ValueError(f"cannot refund {nbytes} bytes of {what}: {held} are charged to the {self.name} tier")
            self.used -= nbytes
            self.items[what] = held - nbytes
            if held == nbytes:
                del self.items[what]

    @contextmanager
    def charged(self, nbytes: int, what: str) -> Iterator[None]:
        """Charges whole pages for what is made within, and refunds them where that fails."""
        self.charge(page_ceil(nbytes), what)
        try:
            yield
        except BaseException:
            self.refund(page_ceil(nbytes), what)
            raise

    def close(self) -> None:
        """Release whatever is still allocated."""
        for each in tuple(self._live):
            each.close()


class Buffer(Closing):
    """Memory of a tier: `tensor` is 1-D uint8 of `nbytes`, page-aligned on the host, zeroed there.

    `close` gives the memory back to the system at once, even if views of it live on; or to the tier, see
    `Tier.keeping`. A second call does nothing.
    """

    def __init__(self, tier: Tier, nbytes: int, what: str, allocation: Allocation) -> None:
        self.tier, self.nbytes, self.what = tier, nbytes, what
        self._allocation: Allocation | None = allocation

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes; RuntimeError after `close`."""
        return required(self._allocation, f"the buffer of {self.what} was released").tensor

    def close(self) -> None:
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            self.tier.give_back(self, allocation)


class Tier(Ledger):
    """Memory with a capacity: `gpu` (a CUDA device, or host memory emulating one) or `cpu`.

    Every allocation is counted in whole pages before it is made. `pins` page-locks what a GPU copies. Thread safe.
    """

    def __init__(
        self, name: str, capacity: int | None, memory: HostMemory | DeviceMemory, pins: PinnedPool | None = None
    ) -> None:
        super().__init__(name, capacity)
        self.device = memory.device
        self._memory, self._pins = memory, pins
        self._pool = BufferPool()

    def allocate(self, nbytes: int, what: str, pin: Pin = Pin.IF_ROOM) -> Buffer:
        """`nbytes` for `what`. PlanError naming tier, what, needed and free where they do not fit.

        `pin`: whether host memory beside a GPU is page-locked.
        """
        with self.charged(nbytes, what):
            allocation = self._pool.take(nbytes)
            if allocation is None:
                most = self.peak if self.capacity is None else min(self.peak, self.capacity)
                self._pool.shrink(most - self.used)
                allocation = self._memory.allocate(nbytes)
            buffer = Buffer(self, nbytes, what, self._locked(allocation, pin))
        self._live.add(buffer)
        return buffer

    def give_back(self, buffer: Buffer, allocation: Allocation) -> None:
        self._live.discard(buffer)
        if allocation.lock is not None and not allocation.lock.held:
            allocation.lock.undo()
            allocation = allocation._replace(lock=None)
        if not self._pool.put(buffer.nbytes, allocation):
            allocation.free()
        self.refund(page_ceil(buffer.nbytes), buffer.what)

    def _locked(self, allocation: Allocation, pin: Pin) -> Allocation:
        """The allocation, page-locked if `pin` asks for it and there is room; a lock of the same kind is kept."""
        if self._pins is None:
            return allocation
        if allocation.lock is not None:
            if allocation.lock.pin is pin:
                return allocation
            allocation.lock.undo()
        return allocation._replace(lock=self._pins.lock(allocation.tensor, pin, partial(self._pool.shrink, 0)))

    @property
    def held(self) -> int:
        """Bytes that the system has given: in use, or waiting for the next buffer of their size."""
        return self.used + self._pool.nbytes

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within, host memory that is given back waits for the next buffer of its size.

        Waiting memory is not counted as used. Used and waiting memory together never exceed the peak use, nor the
        capacity. Waiting memory stays page-locked, unless another buffer cannot be locked beside it.
        """
        # A GPU's memory is kept by torch, which also knows what its streams are still using.
        if self.device.type == "cpu":
            self._pool.open()
        try:
            yield
        finally:
            self._pool.close()

    def close(self) -> None:
        super().close()
        self._pool.close()


class Region(Closing):
    """A span of a preallocated file: bytes [offset, offset + nbytes), on pages that belong to it alone.

    `part` gives views that share the file; `close` of the whole region removes it.
    """

    def __init__(self, file: DirectFile, offset: int, nbytes: int, what: str, tier: DiskTier | None = None) -> None:
        self.file, self.offset, self.nbytes, self.what = file, offset, nbytes, what
        self._tier = tier
        self.written: tuple[int, bytes] | None = None
        """The number of first bytes that the last write through it was of, and their digest; of a part, its own."""

    def part(self, offset: int, nbytes: int) -> Region:
        """The sub-span [offset, offset + nbytes); `offset` is a multiple of PAGE. It owns nothing."""
        if offset % PAGE or not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} + {nbytes} are not part of the {self.nbytes} bytes of {self.what}")
        return Region(self.file, self.offset + offset, nbytes, self.what)

    def close(self) -> None:
        """Remove the file and give its bytes back. Does nothing for a part, or a second time."""
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.give_back(self)


class DiskTier(Ledger):
    """Regions in `folder` (None: a run without an offload folder), under a capacity. Owns the files it makes."""

    def __init__(self, capacity: int | None, folder: OffloadDir | None) -> None:
        super().__init__("disk", capacity)
        self._folder = folder

    def allocate(self, nbytes: int, what: str) -> Region:
        """A region of `nbytes` in a file of its own, its blocks reserved now.

        PlanError over the capacity or without an offload folder; StorageError where the file system has no room.
        """
        if self._folder is None:
            raise PlanError(f"{what} needs {format_bytes(nbytes)} on disk, and no offload folder is set",
                            change="name one with --offload-dir")  # fmt: skip
        size = page_ceil(nbytes)
        with self.charged(nbytes, what):
            self._folder.require_free(size, what)
            path, fd = self._folder.new_file("region")
            try:
                if size:
                    os.posix_fallocate(fd, 0, size)
                region = Region(DirectFile(path, fd, writable=True, ours=True), 0, nbytes, what, self)
            except OSError as error:
                os.close(fd)
                self._folder.remove_file(path)
                raise storage_error(f"{what} needs {format_bytes(size)} at {path}", error) from error
        self._live.add(region)
        return region

    def give_back(self, region: Region) -> None:
        self._live.discard(region)
        region.file.close()
        if self._folder is not None:
            self._folder.remove_file(region.file.path)
        self.refund(page_ceil(region.nbytes), region.what)


class Tiers(Closing):
    """The tiers of one run. `gpu` is None on a machine that computes on its CPU. A context manager; owns no folder.

    `pins` page-locks memory of the cpu tier for a real GPU.
    """

    def __init__(
        self, gpu: Tier | None, cpu: Tier, disk: DiskTier, emulated: bool = False, pins: PinnedPool | None = None
    ) -> None:
        self.gpu, self.cpu, self.disk, self.emulated, self.pins = gpu, cpu, disk, emulated, pins
        self.accelerator: Device | None = None if pins is None else pins.device
        """The GPU whose memory the gpu tier is; None where there is none, or it is emulated."""

    @property
    def compute(self) -> Tier:
        """The tier next to the compute device: gpu where there is one, else cpu."""
        return self.gpu or self.cpu

    @property
    def device(self) -> torch.device:
        """The torch device of the compute tier (the CPU when the GPU is emulated)."""
        return self.compute.device

    def memory(self, name: str) -> Tier:
        """The memory tier called `name` ("gpu" or "cpu"). PlanError where this run has none."""
        tier = {"gpu": self.gpu, "cpu": self.cpu}.get(name)
        if tier is None:
            change = "give --emulate-gpu, or run where there is a CUDA device" if name == "gpu" else ""
            raise PlanError(f"this run has no {name} memory tier", f"it has {', '.join(self.peaks())}", change)
        return tier

    def peaks(self) -> dict[str, int]:
        """Peak bytes per tier, fastest first."""
        tiers: tuple[Ledger | None, ...] = (self.gpu, self.cpu, self.disk)
        return {tier.name: tier.peak for tier in tiers if tier is not None}

    def close(self) -> None:
        """Release every buffer and region; a second call does nothing."""
        for tier in (self.gpu, self.cpu, self.disk):
            if tier is not None:
                tier.close()


def make_tiers(
    gpu_capacity: int | None,
    cpu_capacity: int | None,
    disk_capacity: int | None,
    emulate_gpu: bool,
    run_dir: OffloadDir | None,
    *,
    device: torch.device,
    pins: PinnedPool | None = None,
) -> Tiers:
    """The tiers of a run; capacities in bytes, None for no limit.

    `device` is the compute device; `emulate_gpu` adds a gpu tier in host memory beside it. `pins`: the GPU that the gpu
    tier is on, and what locks pages for it; made for `device` where it is not given. Without `run_dir` the disk tier
    refuses every allocation.
    """
    if pins is None and not emulate_gpu:
        opened = open_device(device)
        pins = None if opened is None else PinnedPool(opened)
    gpu: Tier | None = None
    if pins is not None:
        gpu = Tier("gpu", gpu_capacity, DeviceMemory(pins.device))
    elif emulate_gpu:
        gpu = Tier("gpu", gpu_capacity, HostMemory())
    cpu = Tier("cpu", cpu_capacity, HostMemory(), pins)
    return Tiers(gpu, cpu, DiskTier(disk_capacity, run_dir), emulated=emulate_gpu, pins=pins)


def another_gpu(first: Tiers, capacity: int | None, gpu: Device | None) -> Tiers:
    """The tiers of another GPU beside that of `first`: memory of its own, the same host memory and disk.

    `gpu`: None where it is emulated. To be closed before `first`.
    """
    tier = Tier("gpu", capacity, HostMemory() if gpu is None else DeviceMemory(gpu))
    tiers = Tiers(tier, first.cpu, first.disk, first.emulated, first.pins)
    tiers.accelerator = gpu
    return tiers
