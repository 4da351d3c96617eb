"""The tiers: places with a capacity. `Tier` hands out memory, `DiskTier` regions of files; `Tiers` is the run's set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from h2o_flexgen.errors import PlanError
from h2o_flexgen.memory.cuda import Device, open_device
from h2o_flexgen.memory.disk_tier import DiskTier, Region
from h2o_flexgen.memory.handle import page_ceil
from h2o_flexgen.memory.ledger import Ledger
from h2o_flexgen.memory.pages import Block, DeviceMemory, HostMemory, Memory
from h2o_flexgen.memory.pinned import Pin, PinnedPool
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.spare import Spare

__all__ = ["Buffer", "DiskTier", "Ledger", "Region", "Tier", "Tiers", "make_tiers"]


class Buffer:
    """A lease on bytes of a tier: `tensor` is 1-D uint8 of `nbytes`, page-aligned on the host, zeroed there.

    `release` (or leaving the `with` block) gives the memory back to the system at once, whoever still holds a view; or
    to the tier, see `Tier.keeping`.
    """

    def __init__(self, tier: Tier, nbytes: int, what: str, block: Block) -> None:
        self.tier, self.nbytes, self.what = tier, nbytes, what
        self._block: Block | None = block

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes; RuntimeError after the release."""
        if self._block is None:
            raise RuntimeError(f"the buffer of {self.what} was released")
        return self._block.tensor

    def release(self) -> None:
        """Return the memory; a second call does nothing."""
        block, self._block = self._block, None
        if block is not None:
            self.tier.give_back(self, block)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Tier(Ledger):
    """Memory with a capacity: `gpu` (a CUDA device, or host memory emulating one) or `cpu`.

    Every allocation is counted in whole pages before it is made. `pins` page-locks what a GPU copies. Thread safe.
    """

    def __init__(self, name: str, capacity: int | None, memory: Memory, pins: PinnedPool | None = None) -> None:
        super().__init__(name, capacity)
        self.device = memory.device
        self._memory, self._pins = memory, pins
        self._live: set[Buffer] = set()
        self._spare = Spare()

    def allocate(self, nbytes: int, what: str, pin: Pin = Pin.IF_ROOM) -> Buffer:
        """`nbytes` for `what`. PlanError naming tier, what, needed and free where they do not fit.

        `pin`: whether host memory beside a GPU is page-locked.
        """
        self.charge(page_ceil(nbytes), what)
        try:
            block = self._spare.take(nbytes)
            if block is None:
                most = self.peak if self.capacity is None else min(self.peak, self.capacity)
                self._spare.shrink(most - self.used)
                block = self._memory.allocate(nbytes)
            buffer = Buffer(self, nbytes, what, self._locked(block, pin))
        except BaseException:
            self.refund(page_ceil(nbytes), what)
            raise
        self._live.add(buffer)
        return buffer

    def give_back(self, buffer: Buffer, block: Block) -> None:
        """Called by Buffer.release."""
        self._live.discard(buffer)
        if block.lock is not None and not block.lock.held:
            block.lock.undo()
            block = block._replace(lock=None)
        if not self._spare.put(buffer.nbytes, block):
            block.free()
        self.refund(page_ceil(buffer.nbytes), buffer.what)

    def _locked(self, block: Block, pin: Pin) -> Block:
        """`block`, page-locked as far as `pin` wants it and there is room: one that waited so stays as it is."""
        if self._pins is None:
            return block
        if block.lock is not None:
            if block.lock.pin is pin:
                return block
            block.lock.undo()
        return block._replace(lock=self._pins.lock(block.tensor, pin, self._spare.give_way))

    @property
    def held(self) -> int:
        """Bytes that the system has given: in use, or waiting for the next buffer of their size."""
        return self.used + self._spare.nbytes

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within, host memory that is given back waits for the next buffer of its size.

        What waits is not counted as used; with what is used it never exceeds the most that was used at once, nor the
        capacity. It stays page-locked, unless another buffer cannot be locked beside it.
        """
        # A GPU's memory is kept by torch, which also knows what its streams are still using.
        if self.device.type == "cpu":
            self._spare.open()
        try:
            yield
        finally:
            self._spare.close()

    def close(self) -> None:
        """Release whatever is still allocated."""
        for buffer in tuple(self._live):
            buffer.release()
        self._spare.close()


class Tiers:
    """The tiers of one run. `gpu` is None on a machine that computes on its CPU. A context manager; owns no folder.

    `pins`: what page-locks memory of the cpu tier for a real GPU.
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

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_tiers(
    gpu_capacity: int | None,
    cpu_capacity: int | None,
    disk_capacity: int | None,
    emulate_gpu: bool,
    run_dir: OffloadDir | None,
    *,
    device: torch.device | None = None,
    pins: PinnedPool | None = None,
) -> Tiers:
    """The tiers of a run; capacities in bytes, None for no limit.

    `device` is the compute device, by default CUDA where there is one. `emulate_gpu` adds a gpu tier in host memory,
    and computes on the CPU. `pins`: the GPU that the gpu tier is on, and what locks pages for it; made for `device`
    where it is not given. Without `run_dir` the disk tier refuses every allocation.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() and not emulate_gpu else "cpu")
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
