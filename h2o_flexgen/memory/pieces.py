"""What a thread does in one go: a part of a transfer, a move between host tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from h2o_flexgen.memory.handle import page_floor


def cuts_of(offset: int, nbytes: int, chunk: int) -> Iterator[tuple[int, int]]:
    """[offset, offset + nbytes) as (start, size) pairs that meet on page boundaries."""
    start, end = offset, offset + nbytes
    while start < end:
        stop = min(page_floor(start) + chunk, end)
        yield start, stop - start
        start = stop


def move(dst: torch.Tensor, src: torch.Tensor, to: int, source: int, nbytes: int) -> None:
    """One thread's memmove, without the GIL: torch's own copy would start a second team of threads beside the compute.

    The tensors are passed to keep their memory alive.
    """
    ctypes.memmove(to, source, nbytes)


def convert(dst: torch.Tensor, src: torch.Tensor) -> None:
    """One thread's copy between dtypes and layouts, by torch."""
    with torch.inference_mode():
        dst.copy_(src)
