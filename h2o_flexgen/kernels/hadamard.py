"""The Hadamard transform of keys, values and queries: outliers are spread over all numbers before they are rounded.

A block x of n numbers, n a power of two, becomes H x / sqrt(n), H of 1 and -1 with H H = n: the transform is its own
inverse, and no dot product of two vectors that were transformed changes. Published for caches of few bits by Ashkboos
et al. 2024 (arXiv 2404.00456, "QuaRot"). n log2(n) additions in float32, those of neighbours first: the order is
that of native/pieces.c, so that results are equal to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kernels import triton_available


def hadamard(x: Tensor, block: int) -> Tensor:
    """x (..., d), each `block` of its numbers transformed, in its dtype; x itself where `block` is below 2.

    `block`: a power of two that d is a multiple of. Sums are float32 and rounded once.
    """
    if block < 2:
        return x
    if triton_available.serves(x.device):
        from h2o_flexgen.kernels import triton_hadamard  # imports Triton, which is not there on every machine

        return triton_hadamard.hadamard(x, block)
    y, apart = x.float(), 1
    while apart < block:
        first, second = y.unflatten(-1, (-1, 2, apart)).unbind(-2)
        y = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        apart *= 2
    return (y * block**-0.5).to(x.dtype)
