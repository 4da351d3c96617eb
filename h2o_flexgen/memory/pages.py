"""Where the bytes of a tier come from: anonymous host pages, or a CUDA device."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import torch

from h2o_flexgen.errors import MemoryRefused
from h2o_flexgen.units import format_bytes

log = logging.getLogger(__name__)


class Block(NamedTuple):
    """Fresh bytes (1-D uint8) and the call that gives them back to the system."""

    tensor: torch.Tensor
    release: Callable[[], None]


class Memory(Protocol):
    """Makes blocks on one device."""

    device: torch.device

    def allocate(self, nbytes: int) -> Block:
        """Exactly `nbytes`, page-aligned on the host. MemoryRefused where the system has no more."""


class HostMemory:
    """Private anonymous pages: page-aligned, zeroed, huge where the kernel has huge pages, gone on release.

    `pinned` page-locks them for CUDA; where the system refuses, the pages stay pageable and a warning says so once.
    """

    device = torch.device("cpu")

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned

    def allocate(self, nbytes: int) -> Block:
        """See Memory.allocate. A view that outlives the release reads zeros; it never faults."""
        if nbytes == 0:
            return Block(torch.empty(0, dtype=torch.uint8), _nothing)
        try:
            # Python's default is MAP_SHARED, which the kernel treats as shared memory and backs by small pages
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryRefused(
                f"the system refused {format_bytes(nbytes)} of host memory ({error.strerror})",
                change="free memory, or lower --cpu-mem or --gpu-batch-size",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                log.debug("no transparent huge pages for a buffer of %s", format_bytes(nbytes))
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        locked = self._pinned and self._lock_pages(tensor)

        def release() -> None:
            if locked:
                _cudart().cudaHostUnregister(tensor.data_ptr())
            # the pages go now, even if a view keeps the address range alive for a while
            pages.madvise(mmap.MADV_DONTNEED)

        return Block(tensor, release)

    def _lock_pages(self, tensor: torch.Tensor) -> bool:
        status = int(_cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
        if status:
            log.warning(
                "could not page-lock %s of host memory (CUDA error %d): copies to the GPU will be slower",
                format_bytes(tensor.numel()), status,
            )  # fmt: skip
            self._pinned = False
        return status == 0


class CudaMemory:
    """Bytes on a CUDA device, from torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> Block:
        """See Memory.allocate."""
        try:
            return Block(torch.empty(nbytes, dtype=torch.uint8, device=self.device), _nothing)
        except torch.OutOfMemoryError as error:
            raise MemoryRefused(
                f"the GPU refused {format_bytes(nbytes)}", change="lower --gpu-mem or --gpu-batch-size"
            ) from error


def _cudart() -> Any:
    return cast(Any, torch.cuda.cudart)()  # untyped in torch


def _nothing() -> None:
    """The release of blocks that their last reference frees."""
