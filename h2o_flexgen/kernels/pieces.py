"""Packing keys and values for caches and expanding them, in C: see pieces.c for what is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import function, library

DTYPES = (torch.float32, torch.bfloat16)
MAX_DIM = 256
"""Numbers of a key or value."""


def available(dtype: torch.dtype, dim: int, device: torch.device) -> bool:
    """Whether C packs vectors of this kind, and expands them."""
    return device.type == "cpu" and dtype in DTYPES and dim <= MAX_DIM and library() is not None


def pack(x: Tensor, bits: int, nbytes: int) -> Tensor:
    """x (..., dim) in pieces of `nbytes` bytes, (..., nbytes) uint8. Of a kind that is `available`."""
    packed = torch.empty(*x.shape[:-1], nbytes, dtype=torch.uint8)
    _move(x.contiguous(), packed, x, bits, packs=True)
    return packed


def expand(packed: Tensor, bits: int, dim: int, dtype: torch.dtype) -> Tensor:
    """The numbers of `packed` (..., nbytes), (..., dim) in `dtype`."""
    x = torch.empty(*packed.shape[:-1], dim, dtype=dtype)
    _move(packed.contiguous(), x, x, bits, packs=False)
    return x


def _move(source: Tensor, target: Tensor, numbers: Tensor, bits: int, *, packs: bool) -> None:
    dim, wide = numbers.shape[-1], numbers.dtype == torch.float32
    call = function("move_pieces", "PPlliiii")
    threads = torch.get_num_threads()
    call(source.data_ptr(), target.data_ptr(), numbers.numel() // dim, dim, bits, wide, packs, threads)
