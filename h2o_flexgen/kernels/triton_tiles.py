"""K and V in the slots of a task, as tiles: read, unpacked and written. Device code of `triton_decode`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from h2o_flexgen.kernels.triton_quant import bytes_to_pairs, groups_to_codes, pairs_to_bytes

QUANT_GROUP = 64  # of packed K and V
_GROUP = tl.constexpr(QUANT_GROUP)


class Held(NamedTuple):
    """K and V (rows, kv_heads, capacity, dim); packed: codes (.., dim / 2) with scales and lows (.., groups)."""

    k: Any
    v: Any
    k_scale: Any = None
    k_low: Any = None
    v_scale: Any = None
    v_low: Any = None


class Form(NamedTuple):
    """What a kernel is compiled for."""

    dim: int
    d: int  # dim, as a power of two
    group: int
    g: int  # query heads per KV head as tiles have them: 1, or 16 for matrix products
    block: int  # slots per tile
    scan: int  # slots at a time when scores are added to
    stages: int  # tiles on the way
    packed: bool
    adds: bool
    wide: bool  # see `wide_product`


@triton.jit
def tile(kept, scale, low, base, at, old, form: tl.constexpr):
    """K or V (block, d) of slots `at`; 0 where not `old`, of which nothing is read."""
    if not form.packed:
        dims = tl.arange(0, form.d)
        mask = old[:, None] & (dims < form.dim)[None, :]
        loaded = tl.load(kept + base * form.dim + at[:, None] * form.dim + dims[None, :], mask=mask, other=0.0)
    else:
        loaded = _unpacked(kept, scale, low, base, at, old, form)
    return loaded


@triton.jit
def _unpacked(kept, scale, low, base, at, old, form: tl.constexpr):
    """As `tile`, float32, of K or V in codes."""
    wide: tl.constexpr = form.dim // 2
    groups: tl.constexpr = (form.dim + _GROUP - 1) // _GROUP
    each: tl.constexpr = min(_GROUP, form.d)
    bytes_, group = tl.arange(0, form.d // 2), tl.arange(0, form.d // each)
    mask = old[:, None] & (bytes_ < wide)[None, :]
    codes = tl.load(kept + base * wide + at[:, None] * wide + bytes_[None, :], mask=mask, other=0)
    values = tl.reshape(bytes_to_pairs(codes, form.block, form.d).to(tl.float32), (form.block, form.d // each, each))
    mask = old[:, None] & (group < groups)[None, :]
    of = base * groups + at[:, None] * groups + group[None, :]
    scales = tl.load(scale + of, mask=mask, other=0.0).to(tl.float32)
    lows = tl.load(low + of, mask=mask, other=0.0).to(tl.float32)
    return tl.reshape(lows[:, :, None] + values * scales[:, :, None], (form.block, form.d))


@triton.jit
def put(source, kept, scale, low, slot, mine, form: tl.constexpr):
    """The new token's K or V (d,) as its slot will hold it; if `mine`, puts it there."""
    dims = tl.arange(0, form.d)
    if not form.packed:
        x = tl.load(source + dims, mask=dims < form.dim, other=0.0)
        tl.store(kept + slot * form.dim + dims, x, mask=dims < tl.where(mine, form.dim, 0))
    else:
        x = _put_packed(source, kept, scale, low, slot, mine, form)
    return x


@triton.jit
def _put_packed(source, kept, scale, low, slot, mine, form: tl.constexpr):
    """As `put`, float32, of K or V in codes."""
    dims = tl.arange(0, form.d)
    wide: tl.constexpr = form.dim // 2
    groups: tl.constexpr = (form.dim + _GROUP - 1) // _GROUP
    each: tl.constexpr = min(_GROUP, form.d)
    n: tl.constexpr = form.d // each
    # What a short group lacks repeats its last number.
    x = tl.load(source + tl.minimum(dims, form.dim - 1)).to(tl.float32)
    codes, scales, lows = groups_to_codes(tl.reshape(x, (n, each)), 15)
    bytes_, group = tl.arange(0, form.d // 2), tl.arange(0, n)
    packed = tl.reshape(pairs_to_bytes(codes, n, each), (form.d // 2,))
    tl.store(kept + slot * wide + bytes_, packed, mask=bytes_ < tl.where(mine, wide, 0))
    tl.store(scale + slot * groups + group, scales.to(tl.bfloat16), mask=group < tl.where(mine, groups, 0))
    tl.store(low + slot * groups + group, lows.to(tl.bfloat16), mask=group < tl.where(mine, groups, 0))
    return tl.reshape(lows[:, None] + codes.to(tl.float32) * scales[:, None], (form.d,))


@triton.jit
def wide_product(a, b):
    """a (m, k) times b (k, n) in float32, for Triton's interpreter. Its `dot` is numpy's matmul, which has no bfloat16
    and rounds differently from lane to lane; here, as in a GPU's matrix units, every element is summed the same way.
    """
    return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
