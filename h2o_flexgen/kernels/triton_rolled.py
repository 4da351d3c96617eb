"""Keys turned by their places in the cache, in one launch: each by the row of a table that its rank names.

Imports Triton; see `triton_available`. Reads K and writes the turned copy, and that is all that is moved: tables of
angles stay in the second-level cache. Measured so far: nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(32)  # slots per program


@triton.jit
def _turn_kernel(
    keys, ranks, angles, out, strides, sizes, half: tl.constexpr, rest: tl.constexpr, m: tl.constexpr, r: tl.constexpr
):  # fmt: skip
    (cos, sin), (heads, width) = angles, sizes
    strides, rank_strides, angle_stride = strides
    task, slots = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, head, there = task // heads, task % heads, slots < width
    rank = tl.load(ranks + row * rank_strides[0] + head * rank_strides[1] + slots * rank_strides[2], there, 0)
    source = keys + row * strides[0] + head * strides[1] + slots[:, None].to(tl.int64) * strides[2]
    target = out + (task * width + slots[:, None]) * (2 * half + rest)
    pair = tl.arange(0, m)[None, :]
    here = there[:, None] & (pair < half)
    angle = rank[:, None].to(tl.int64) * angle_stride + pair
    c, s = tl.load(cos + angle, here, 0).to(tl.float32), tl.load(sin + angle, here, 0).to(tl.float32)
    first = tl.load(source + pair, here, 0).to(tl.float32)
    second = tl.load(source + half + pair, here, 0).to(tl.float32)
    tl.store(target + pair, (first * c - second * s).to(out.dtype.element_ty), here)
    tl.store(target + half + pair, (second * c + first * s).to(out.dtype.element_ty), here)
    if rest > 0:
        other = 2 * half + tl.arange(0, r)[None, :]
        kept = there[:, None] & (other < 2 * half + rest)
        tl.store(target + other, tl.load(source + other, kept, 0), kept)


def turned(keys: Tensor, ranks: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """keys (b, kv_heads, width, d), the numbers of a key side by side, as new ones, each turned by the angles of row
    `ranks` of cos and sin (places, half), 2 half <= d. `ranks`: whole numbers that broadcast to (b, kv_heads, width).
    """
    batch, heads, width, dim = keys.shape
    half = cos.shape[1]
    if keys.stride(-1) != 1 or cos.stride() != sin.stride() or cos.stride(-1) != 1 or not 0 < 2 * half <= dim:
        raise ValueError(f"keys of {dim} numbers with strides {keys.stride()}, angles of {half} with {cos.stride()}")
    out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    ranks, rest = ranks.expand(batch, heads, width), dim - 2 * half
    strides = (keys.stride()[:3], ranks.stride(), cos.stride(0))
    m, r = triton.next_power_of_2(half), triton.next_power_of_2(max(rest, 1))
    _turn_kernel[(batch * heads, triton.cdiv(width, BLOCK.value))](
        keys, ranks, (cos, sin), out, strides, (heads, width), half=half, rest=rest, m=m, r=r
    )  # fmt: skip
    return out
