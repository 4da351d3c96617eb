"""Packing keys and values for caches and expanding them, in C: see pieces.c. And their rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.config.model.packing import CachePacking
from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.native import function


def pack(x: Tensor, packing: CachePacking, *, errors: bool = False) -> Tensor:
    """x (..., dim) in their pieces, (..., nbytes) uint8. Of a kind that is `decode.available`.

    errors: the pieces of what the rounding of x costs them, in place of their own.
    """
    packed = torch.empty(*x.shape[:-1], packing.nbytes, dtype=torch.uint8)
    _move(x.contiguous(), packed, x, packing, 2 if errors else 1)
    return packed


def expand(packed: Tensor, packing: CachePacking, dtype: torch.dtype) -> Tensor:
    """The numbers that `packed` (..., nbytes) was made of, (..., dim) in `dtype`."""
    x = torch.empty(*packed.shape[:-1], packing.dim, dtype=dtype)
    _move(packed.contiguous(), x, x, packing, 0)
    return x


def _move(source: Tensor, target: Tensor, numbers: Tensor, packing: CachePacking, packs: int) -> None:
    wide, count = numbers.dtype == torch.float32, numbers.numel() // packing.dim
    call = function("move_pieces", "PPlliliii")
    how = (count, packing.dim, packing.bits, packing.block, wide, packs, torch.get_num_threads())
    call(source.data_ptr(), target.data_ptr(), *how)


def hadamard(x: Tensor, block: int) -> Tensor:
    """x (..., d), each `block` of its numbers transformed, in its dtype; x itself where `block` is below 2.

    n numbers x, n a power of two that d is a multiple of, become H x / sqrt(n), H of 1 and -1 with H H = n: the
    transform is its own inverse, and no dot product of two vectors that were transformed changes. It spreads outliers
    over all numbers before they are rounded (Ashkboos et al. 2024, arXiv 2404.00456, "QuaRot"). n log2(n) additions in
    float32, those of neighbours first, rounded once at the end: in the order of native/pieces.c, equal to the bit.
    """
    if block < 2:
        return x
    if triton_available.serves(x.device):
        from h2o_flexgen.kernels import triton_quant  # imports Triton, which is not there on every machine

        return triton_quant.hadamard(x, block)
    y, apart = x.float(), 1
    while apart < block:
        first, second = y.unflatten(-1, (-1, 2, apart)).unbind(-2)
        y = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        apart *= 2
    return (y * block**-0.5).to(x.dtype)
