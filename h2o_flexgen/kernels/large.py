"""Large intermediate results on the host: in pages of their own, which the next ones get.

An activation from malloc leaves a hole when it is freed; a small tensor that stays is cut from the hole, the next
activation does not fit into the rest, and the heap grows by one in every layer. Pages that are kept are not made and
zeroed by the system anew, either, and are huge where it has huge pages.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.huge import huge_pages

LEAST = 1 << 20
"""Bytes from which on a tensor is large."""
_UNIT = 2 << 20  # of pages: a huge one
_ROOMY = 2  # pages serve what fills half of them or more


class _Pages:
    """Anonymous memory that one tensor at a time lies in."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // _UNIT) * _UNIT
        self.memory = huge_pages(self.nbytes)
        self.kind: Any = ctypes.c_char * self.nbytes


class LargeMemory:
    """Hands out pages, and gets them back when the last view of a tensor in them is gone. For one computing thread."""

    def __init__(self) -> None:
        self._free: list[_Pages] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised host tensor; small ones are torch's own. MemoryError where the system has no more."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes < LEAST:
            return torch.empty(shape, dtype=dtype)
        pages = self._take(nbytes)
        lease = pages.kind.from_buffer(pages.memory)  # torch holds this, and it the pages
        weakref.finalize(lease, self._free.append, pages).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count).view(shape)

    def trim(self) -> None:
        """Give pages that nothing lies in back to the system."""
        self._free.clear()

    @property
    def free_bytes(self) -> int:
        """Of pages that nothing lies in."""
        return sum(pages.nbytes for pages in self._free)

    def _take(self, nbytes: int) -> _Pages:
        fitting = [pages for pages in self._free if nbytes <= pages.nbytes < _ROOMY * max(nbytes, _UNIT)]
        if fitting:
            best = min(fitting, key=lambda pages: pages.nbytes)
            self._free.remove(best)
            return best
        # Larger pages serve in place of smaller ones, not beside them.
        smaller = [pages for pages in self._free if pages.nbytes < nbytes]
        if smaller:
            self._free.remove(max(smaller, key=lambda pages: pages.nbytes))
        try:
            return _Pages(nbytes)
        except OSError as error:
            raise MemoryError(f"the system refused {nbytes} bytes for intermediate results") from error


LARGE = LargeMemory()
"""That of the process."""
