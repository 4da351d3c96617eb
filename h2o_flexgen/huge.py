"""Host memory in pages of its own mapping, huge where the kernel has huge pages."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

LEAST = 1 << 20
"""Bytes from which on a tensor is large."""
_UNIT = 2 << 20  # of pages: a huge one
_ROOMY = 2  # pages serve what fills half of them or more


def huge_pages(nbytes: int) -> mmap.mmap:
    """`nbytes` (more than 0) of private memory: page-aligned, zeroed, gone with the last reference to it.

    OSError where the system has no more; where it has no huge pages to give they are small ones.
    """
    # Python's default is MAP_SHARED, which the kernel treats as shared memory and backs by small pages.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            log.debug("no transparent huge pages for %d bytes", nbytes)
    return pages


class LargeMemory:
    """Large intermediate results on the host, in pages that are kept for the next ones. For one computing thread.

    An activation from malloc leaves a hole when it is freed; a small tensor that stays is cut from the hole, the next
    activation does not fit into the rest, and the heap grows by one in every layer. Nor does the system make and zero
    kept pages anew. Pages are free again when the last view of a tensor in them is gone.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised host tensor; small ones are torch's own. MemoryError where the system has no more."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes < LEAST:
            return torch.empty(shape, dtype=dtype)
        pages = self._take(nbytes)
        lease = _whole(len(pages)).from_buffer(pages)  # torch holds this, and it the pages
        weakref.finalize(lease, self._free.append, pages).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count).view(shape)

    def like(self, x: Tensor, count: int | None = None) -> Tensor:
        """An uninitialised contiguous tensor (n, ...) like x, on its device; with a `count` of (count, ...)."""
        shape = (len(x) if count is None else count, *x.shape[1:])
        return self.empty(*shape, dtype=x.dtype) if x.is_cpu else x.new_empty(shape)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors (n, ...) of one dtype, one after the other; a single one as it is."""
        if len(parts) == 1:
            return parts[0]
        out = self.like(parts[0], sum(map(len, parts)))
        return torch.cat(tuple(parts), out=out)

    def trim(self) -> None:
        """Give free pages back to the system."""
        self._free.clear()

    @property
    def free_bytes(self) -> int:
        return sum(map(len, self._free))

    def _take(self, nbytes: int) -> mmap.mmap:
        fitting = [pages for pages in self._free if nbytes <= len(pages) < _ROOMY * max(nbytes, _UNIT)]
        if fitting:
            return self._remove(min(fitting, key=len))
        # Larger pages serve in place of smaller ones, not beside them.
        smaller = [pages for pages in self._free if len(pages) < nbytes]
        if smaller:
            self._remove(max(smaller, key=len))
        try:
            return huge_pages(-(-nbytes // _UNIT) * _UNIT)
        except OSError as error:
            raise MemoryError(f"the system refused {nbytes} bytes for intermediate results") from error

    def _remove(self, pages: mmap.mmap) -> mmap.mmap:
        self._free.remove(pages)
        return pages


@cache
def _whole(nbytes: int) -> Any:
    """The type of a lease of so many bytes: making one takes longer than the rest."""
    return ctypes.c_char * nbytes


LARGE = LargeMemory()
"""That of the process."""
