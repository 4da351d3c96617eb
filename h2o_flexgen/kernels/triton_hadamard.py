"""The Hadamard transform on a GPU, in one launch: see `hadamard`. Each number is read and written once.

Imports Triton; see `triton_available`. Measured so far: nothing. The kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # numbers per program: 16 per thread


def hadamard(x: Tensor, block: int) -> Tensor:
    """x (..., d), each `block` of its numbers transformed: a new tensor. `block`: a power of two."""
    x = x.contiguous()
    out, blocks = torch.empty_like(x), x.numel() // block
    together = max(1, TILE // block)
    if blocks:
        _hadamard[(triton.cdiv(blocks, together),)](
            x, out, blocks, block**-0.5, block.bit_length() - 1, together, num_warps=4
        )
    return out


@triton.jit
def _hadamard(x, out, blocks, scale, stages: tl.constexpr, together: tl.constexpr):
    """One program: `together` blocks of 2 ** stages numbers."""
    block: tl.constexpr = 1 << stages
    row = tl.program_id(0).to(tl.int64) * together + tl.arange(0, together)
    at = row[:, None] * block + tl.arange(0, block)[None, :]
    there = (row < blocks)[:, None]
    y = tl.load(x + at, there, 0).to(tl.float32)
    for stage in tl.static_range(stages):
        halves = tl.reshape(y, (together, block >> (stage + 1), 2, 1 << stage))
        first, second = tl.split(tl.permute(halves, (0, 1, 3, 2)))
        y = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), (together, block))
    tl.store(out + at, (y * scale).to(out.dtype.element_ty), there)
