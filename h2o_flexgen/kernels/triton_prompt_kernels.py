"""Attention of whole prompts on a GPU: the device code of `triton_prompt`. Logits are in base 2."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from h2o_flexgen.kernels.triton_tiles import wide_product


class Asked(NamedTuple):
    """Queries (rows, heads, queries, dim) and what is said of them, (rows, heads, queries) and contiguous.

    The strides of q are in elements. `lse`: natural logarithms of the sums of exponentials.
    """

    q: Any
    row: int
    head: int
    token: int
    queries: int
    lse: Any
    out: Any


class Keys(NamedTuple):
    """Keys and values (rows, kv_heads, length, dim) of the positions from `first` on; strides in elements."""

    k: Any
    v: Any
    row: int
    head: int
    token: int
    v_row: int
    v_head: int
    v_token: int
    length: int
    first: int


class Sums(NamedTuple):
    """Column sums (rows, kv_heads, keys) float32; elements from one to the next."""

    at: Any
    row: int
    head: int


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    kv_heads: int
    group: int  # query heads per KV head
    dim: int
    d: int  # dim, as a power of two
    asked: int  # queries per tile
    seen: int  # keys per tile
    stages: int  # tiles on the way
    wide: bool  # see `wide_product`


@triton.jit
def sums_kernel(asked, keys, sums, past, window, scale, shape: tl.constexpr):
    """Column sums of one tile of keys of one row and KV head, over all queries that see any of them.

    The tile is read once and kept; query tiles of all heads of the group go by. No sum leaves the program before it is
    complete, so that it does not depend on the order in which programs run.
    """
    task, block = tl.program_id(0), tl.program_id(1)
    row, head = (task // shape.kv_heads).to(tl.int64), task % shape.kv_heads
    dims, key = tl.arange(0, shape.d), block * shape.seen + tl.arange(0, shape.seen)
    inside = (key < keys.length)[:, None] & (dims < shape.dim)[None, :]
    at = keys.k + row * keys.row + head * keys.head + key.to(tl.int64)[:, None] * keys.token + dims[None, :]
    k = tl.load(at, mask=inside, other=0.0)
    # Queries from the first that comes after the tile's first key to the last whose window holds its last.
    lowest = keys.first + block * shape.seen - past
    begin = tl.maximum(lowest, 0) // shape.asked * shape.asked
    end = tl.minimum(asked.queries, lowest + shape.seen - 1 + window)
    tiles = tl.maximum(end - begin + shape.asked - 1, 0) // shape.asked
    total = tl.full((shape.seen,), 0.0, tl.float32)
    for turn in tl.range(0, tiles * shape.group, num_stages=shape.stages):
        of = row * (shape.kv_heads * shape.group) + head * shape.group + turn // tiles
        token = begin + turn % tiles * shape.asked + tl.arange(0, shape.asked)
        q = _queries(asked, of, token, shape)
        lse = tl.load(asked.lse + of * asked.queries + token, mask=token < asked.queries, other=float("inf"))
        x = _product(k, tl.trans(q), shape) * scale
        # How far a query is behind a key; whoever sees none of the tile gets nothing but zeros.
        behind = (past + token)[None, :] - (keys.first + key)[:, None]
        seen = (behind >= 0) & (behind < window)
        total += tl.sum(tl.where(seen, tl.exp2(x - (lse * 1.4426950408889634)[None, :]), 0.0), 1)
    tl.store(sums.at + row * sums.row + head * sums.head + key, total / shape.group, mask=key < keys.length)


@triton.jit
def forward_kernel(asked, before, own, past, window, scale, shape: tl.constexpr):
    """Attention of one tile of queries of one row and head to the keys `before`, if any, and to `own`."""
    head_of, block = tl.program_id(0), tl.program_id(1)
    of = head_of.to(tl.int64)
    row, head = of // (shape.kv_heads * shape.group), of % (shape.kv_heads * shape.group) // shape.group
    start = block * shape.asked
    token, dims = start + tl.arange(0, shape.asked), tl.arange(0, shape.d)
    q = _queries(asked, of, token, shape)
    state = (
        tl.full((shape.asked,), float("-inf"), tl.float32),
        tl.full((shape.asked,), 0.0, tl.float32),
        tl.full((shape.asked, shape.d), 0.0, tl.float32),
    )
    if before is not None:
        begin = tl.maximum(past + start + 1 - window, 0) // shape.seen * shape.seen
        state = _take_in(q, state, before, (row, head, begin, before.length), past + token, window, scale, shape)
    begin = tl.maximum(start + 1 - window, 0) // shape.seen * shape.seen
    end = tl.minimum(start + shape.asked, own.length)
    top, total, mixed = _take_in(q, state, own, (row, head, begin, end), past + token, window, scale, shape)
    inside = token < asked.queries
    total = tl.where(total == 0, 1.0, total)  # of a query beyond the last, in whose window nothing may be
    at = asked.out + (of * asked.queries + token.to(tl.int64))[:, None] * shape.dim + dims[None, :]
    mixed = (mixed / total[:, None]).to(asked.out.dtype.element_ty)
    tl.store(at, mixed, mask=inside[:, None] & (dims < shape.dim)[None, :])
    lse = (tl.where(inside, top, 0.0) + tl.log2(total)) * 0.6931471805599453
    tl.store(asked.lse + of * asked.queries + token, lse, mask=inside)


@triton.jit
def _take_in(q, state, keys, where, position, window, scale, shape: tl.constexpr):
    """The softmax of queries q at `position` (asked,), carried on over keys from `begin` to `end`."""
    top, total, mixed = state
    row, head, begin, end = where
    dims = tl.arange(0, shape.d)
    for start in tl.range(begin, end, shape.seen, num_stages=shape.stages):
        key = start + tl.arange(0, shape.seen)
        inside = (key < keys.length)[:, None] & (dims < shape.dim)[None, :]
        wide = key.to(tl.int64)[:, None]
        at = keys.k + row * keys.row + head * keys.head + wide * keys.token + dims[None, :]
        k = tl.load(at, mask=inside, other=0.0)
        at = keys.v + row * keys.v_row + head * keys.v_head + wide * keys.v_token + dims[None, :]
        v = tl.load(at, mask=inside, other=0.0)
        behind = position[:, None] - (keys.first + key)[None, :]
        seen = (behind >= 0) & (behind < window) & (key < keys.length)[None, :]
        x = tl.where(seen, _product(q, tl.trans(k), shape) * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(x, 1))
        # A query that has seen nothing yet has -inf, from which nothing can be subtracted.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        p, shrink = tl.exp2(x - base[:, None]), tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + _product(p.to(v.dtype), v, shape)
        top = peak
    return top, total, mixed


@triton.jit
def _queries(asked, of, token, shape: tl.constexpr):
    """Queries (asked, d) of head `of`, counted through all rows; 0 beyond the last."""
    heads: tl.constexpr = shape.kv_heads * shape.group
    dims = tl.arange(0, shape.d)
    at = asked.q + of // heads * asked.row + of % heads * asked.head
    at = at + token.to(tl.int64)[:, None] * asked.token + dims[None, :]
    return tl.load(at, mask=(token < asked.queries)[:, None] & (dims < shape.dim)[None, :], other=0.0)


@triton.jit
def _product(a, b, shape: tl.constexpr):
    """Matrix product, float32."""
    if shape.wide:
        x = wide_product(a, b)
    else:
        x = tl.dot(a, b, input_precision="tf32x3")
    return x
