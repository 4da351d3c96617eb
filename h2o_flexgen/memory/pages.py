"""Where the bytes of a tier come from: anonymous host pages, or a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from h2o_flexgen.errors import MemoryRefused
from h2o_flexgen.huge import huge_pages
from h2o_flexgen.memory.cuda import Device
from h2o_flexgen.memory.pinned import PageLock
from h2o_flexgen.units import format_bytes


class Block(NamedTuple):
    """Fresh bytes (1-D uint8) and the call that gives them back to the system."""

    tensor: torch.Tensor
    release: Callable[[], None]
    lock: PageLock | None = None
    """Of the bytes, or of the wish for it."""

    def free(self) -> None:
        """Unlock the bytes and give them back."""
        if self.lock is not None:
            self.lock.undo()
        self.release()


class Memory(Protocol):
    """Makes blocks on one device."""

    device: torch.device

    def allocate(self, nbytes: int) -> Block:
        """Exactly `nbytes`, page-aligned on the host. MemoryRefused where the system has no more."""


class HostMemory:
    """Private anonymous pages: page-aligned, zeroed, huge where the kernel has huge pages, gone on release."""

    device = torch.device("cpu")

    def allocate(self, nbytes: int) -> Block:
        """See Memory.allocate. A view that outlives the release reads zeros; it never faults."""
        if nbytes == 0:
            return Block(torch.empty(0, dtype=torch.uint8), _nothing)
        try:
            pages = huge_pages(nbytes)
        except OSError as error:
            raise MemoryRefused(
                f"the system refused {format_bytes(nbytes)} of host memory ({error.strerror})",
                change="free memory, or lower --cpu-mem or --gpu-batch-size",
            ) from error
        tensor = torch.frombuffer(pages, dtype=torch.uint8)

        def release() -> None:
            # the pages go now, even if a view keeps the address range alive for a while
            pages.madvise(mmap.MADV_DONTNEED)

        return Block(tensor, release)


class DeviceMemory:
    """Bytes of a GPU."""

    def __init__(self, gpu: Device) -> None:
        self.device = gpu.torch_device
        self._gpu = gpu

    def allocate(self, nbytes: int) -> Block:
        """See Memory.allocate."""
        try:
            return Block(self._gpu.allocate(nbytes), _nothing)
        except torch.OutOfMemoryError as error:
            raise MemoryRefused(
                f"the GPU refused {format_bytes(nbytes)}", change="lower --gpu-mem or --gpu-batch-size"
            ) from error


def _nothing() -> None:
    """The release of blocks that their last reference frees."""
