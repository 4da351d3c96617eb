"""Rotation of queries and keys on a GPU: both in one launch, where torch takes three for each.

Imports Triton; see `triton_available`. Each number is read twice, the second time from a cache, and written once.

Measured so far: nothing. The kernel was compiled for NVIDIA's architecture 9.0 and runs in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048  # numbers per program: 16 per thread


class _Heads(NamedTuple):
    """Heads of tokens (tokens, heads, dim), strides in elements; `out` is contiguous."""

    at: Any
    token: int
    head: int
    heads: int
    out: Any


class _Form(NamedTuple):
    """What the kernel is compiled for: heads per program; numbers per head, and as a power of two; those that turn."""

    heads: int
    dim: int
    d: int
    turned: int


def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q (T, heads, dim) and k (T, kv_heads, dim), each as `rotate.rotate_halves` turns it: two new tensors.

    cos, sin (T, turned) in any dtype; their second half repeats the first. Sums are float32, and rounded once.
    """
    dim, turned = q.shape[-1], cos.shape[-1]
    d = triton.next_power_of_2(dim)
    form = _Form(max(1, _TILE // d), dim, d, turned)
    outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)]
    of_q, of_k = (_heads(*pair) for pair in zip((q, k), outs, strict=True))
    cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin))
    programs = triton.cdiv(of_q.heads, form.heads) + triton.cdiv(of_k.heads, form.heads)
    if len(q):
        strides = cos.stride(0), sin.stride(0)
        rotate_kernel[(len(q), programs)](of_q, of_k, cos, sin, *strides, form, num_warps=4)
    return outs[0], outs[1]


def _heads(x: Tensor, out: Tensor) -> _Heads:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _Heads(x, x.stride(0), x.stride(1), x.shape[1], out)


@triton.jit
def rotate_kernel(q, k, cos, sin, cos_token, sin_token, form: tl.constexpr):
    """One program: some heads of q, or of k, of one token."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = cos + token * cos_token, sin + token * sin_token
    of_q = tl.cdiv(q.heads, form.heads)
    if block < of_q:
        _turn(q, token, block, cos, sin, form)
    else:
        _turn(k, token, block - of_q, cos, sin, form)


@triton.jit
def _turn(x, token, block, cos, sin, form: tl.constexpr):
    """Dimension i with i + half by the angle of i; the second half of the angles repeats the first."""
    half: tl.constexpr = form.turned // 2
    head, i = block * form.heads + tl.arange(0, form.heads), tl.arange(0, form.d)
    turns = i < form.turned
    inside = (head < x.heads)[:, None] & (i < form.dim)[None, :]
    at = x.at + token * x.token + head[:, None] * x.head
    own = tl.load(at + i[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.where(i < half, i + half, i - half)
    other = tl.load(at + partner[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
    c = tl.load(cos + i, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + i, mask=turns, other=0.0).to(tl.float32)
    y = own * c[None, :] + other * tl.where(i < half, -s, s)[None, :]
    at = x.out + (token * x.heads + head[:, None]) * form.dim + i[None, :]
    tl.store(at, y.to(x.out.dtype.element_ty), mask=inside)
