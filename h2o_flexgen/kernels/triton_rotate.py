"""Rotation of queries and keys on a GPU, in one launch where torch takes three for each tensor.

Imports Triton; see `triton_available`. Each number is read and written once; tables of angles stay in the second-level
cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # slots of a cache per program
_TILE = 2048  # numbers of prompts and new tokens per program: 16 per thread


class _Heads(NamedTuple):
    """Heads of tokens (tokens, heads, dim), strides in elements; `out` is contiguous."""

    at: Any
    token: int
    head: int
    heads: int
    out: Any


class _Cached(NamedTuple):
    """Keys or their ranks, (rows, kv_heads, slots, ..), strides in elements."""

    at: Any
    row: int
    head: int
    slot: int


class _RotationForm(NamedTuple):
    """The sizes and options that a kernel is compiled for."""

    vectors: int  # heads or slots per program
    half: int  # pairs of a vector that turn
    m: int  # half, as a power of two
    rest: int  # numbers of a vector that do not turn
    r: int  # rest, as a power of two


def _form(vectors: int, half: int, dim: int) -> _RotationForm:
    rest = dim - 2 * half
    return _RotationForm(vectors, half, triton.next_power_of_2(half), rest, triton.next_power_of_2(max(rest, 1)))


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q (T, heads, dim) and k (T, kv_heads, dim), each as `layers.rotate_halves` turns it: two new tensors.

    cos, sin (T, turned) in any dtype; their second half repeats the first. Sums are float32, and rounded once.
    """
    dim = q.shape[-1]
    form = _form(max(1, _TILE // triton.next_power_of_2(dim)), cos.shape[-1] // 2, dim)
    outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)]
    of_q, of_k = (_heads(*pair) for pair in zip((q, k), outs, strict=True))
    cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin))
    programs = triton.cdiv(of_q.heads, form.vectors) + triton.cdiv(of_k.heads, form.vectors)
    if len(q):
        strides = cos.stride(0), sin.stride(0)
        rotate_kernel[(len(q), programs)](of_q, of_k, cos, sin, *strides, form, num_warps=4)
    return outs[0], outs[1]


def _heads(x: Tensor, out: Tensor) -> _Heads:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _Heads(x, x.stride(0), x.stride(1), x.shape[1], out)


def rotate_cached(keys: Tensor, ranks: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """keys (b, kv_heads, width, d) of a cache, each turned by the angles in row `ranks` of cos and sin: a new tensor.

    The numbers of a key lie side by side. cos, sin: (places, half), 2 half <= d. ranks: whole numbers that broadcast to
    (b, kv_heads, width).
    """
    batch, heads, width, dim = keys.shape
    half = cos.shape[1]
    if keys.stride(-1) != 1 or cos.stride() != sin.stride() or cos.stride(-1) != 1 or not 0 < 2 * half <= dim:
        raise ValueError(f"keys of {dim} numbers with strides {keys.stride()}, angles of {half} with {cos.stride()}")
    out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    ranks, grid = ranks.expand(batch, heads, width), (batch * heads, triton.cdiv(width, BLOCK))
    tensors = _Cached(keys, *keys.stride()[:3]), _Cached(ranks, *ranks.stride()), cos, sin, out
    cached_kernel[grid](*tensors, cos.stride(0), heads, width, _form(BLOCK, half, dim))
    return out


@triton.jit
def rotate_kernel(q, k, cos, sin, cos_token, sin_token, form: tl.constexpr):
    """One program: some heads of q, or of k, of one token."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = cos + token * cos_token, sin + token * sin_token
    of_q = tl.cdiv(q.heads, form.vectors)
    if block < of_q:
        _turn_heads(q, token, block, cos, sin, form)
    else:
        _turn_heads(k, token, block - of_q, cos, sin, form)


@triton.jit
def _turn_heads(x, token, block, cos, sin, form: tl.constexpr):
    head = (block * form.vectors + tl.arange(0, form.vectors))[:, None]
    target = x.out + (token * x.heads + head) * (2 * form.half + form.rest)
    _turn(x.at + token * x.token + head * x.head, target, cos, sin, head < x.heads, form)


@triton.jit
def cached_kernel(keys, ranks, cos, sin, out, place, heads, width, form: tl.constexpr):
    """One program: some slots of one row and KV head. `place`: numbers from one place's angles to the next one's."""
    task, slots = tl.program_id(0).to(tl.int64), tl.program_id(1) * form.vectors + tl.arange(0, form.vectors)
    row, head, there = task // heads, task % heads, slots < width
    rank = tl.load(ranks.at + row * ranks.row + head * ranks.head + slots * ranks.slot, there, 0)
    angle = rank[:, None].to(tl.int64) * place
    source = keys.at + row * keys.row + head * keys.head + slots[:, None].to(tl.int64) * keys.slot
    target = out + (task * width + slots[:, None]) * (2 * form.half + form.rest)
    _turn(source, target, cos + angle, sin + angle, there[:, None], form)


@triton.jit
def _turn(source, target, cos, sin, there, form: tl.constexpr):
    """Vectors at `source` (vectors, 1), where `there`, turned to `target`: number i with i + half by the angle of i.

    cos, sin: where the first angle of all vectors lies, or of each of them (vectors, 1), whether it is there or not.
    """
    pair = tl.arange(0, form.m)[None, :]
    turns = pair < form.half
    here = there & turns
    c, s = tl.load(cos + pair, turns, 0).to(tl.float32), tl.load(sin + pair, turns, 0).to(tl.float32)
    first = tl.load(source + pair, here, 0).to(tl.float32)
    second = tl.load(source + form.half + pair, here, 0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target + pair, (first * c - second * s).to(dtype), here)
    tl.store(target + form.half + pair, (second * c + first * s).to(dtype), here)
    if form.rest > 0:
        other = 2 * form.half + tl.arange(0, form.r)[None, :]
        kept = there & (other < 2 * form.half + form.rest)
        tl.store(target + other, tl.load(source + other, kept, 0), kept)
