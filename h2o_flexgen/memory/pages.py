"""Where the bytes of a tier come from: anonymous host pages, or a GPU; and host pages that wait to be used again."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from h2o_flexgen.config.model.tensors import page_ceil
from h2o_flexgen.errors import MemoryRefused
from h2o_flexgen.huge import huge_pages
from h2o_flexgen.memory.cuda import Device
from h2o_flexgen.memory.pinned import PageLock
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
