"""Group-wise quantisation on a GPU: the layout and, bit for bit, the numbers of `h2o_flexgen.quant.groupwise`.

Imports Triton; see `triton_available`. Both directions are bound by memory. Per number they move the bytes of x and,
with 4 bits in groups of 64, 0.5625 bytes of codes, scales and lows: 2.56 bytes from or to bfloat16, one read and one
write of everything. A program handles some groups of one column of groups, so that a warp reads whole sectors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.types import Quantised

LOWER_HALF = tl.constexpr(0xFFFF)
TILE = 4096  # numbers per program: 32 per thread


class _QuantForm(NamedTuple):
    """The sizes that a kernel is compiled for: numbers per row, numbers per group, their bits, rows per program."""

    size: int
    group: int
    bits: int
    rows: int


def quantise(x: Tensor, bits: int = 4, group: int = 64) -> Quantised:
    """x (..., d) as `groupwise.quantise` has it. `group`: a power of two; d: even with 4 bits.

    Reads x once, writes its codes once; x is made contiguous first if it is not.
    """
    size = x.shape[-1]
    _check(size, bits, group)
    groups, lead = -(-size // group), x.shape[:-1]
    packed = Quantised(
        torch.empty(*lead, size * bits // 8, dtype=torch.uint8, device=x.device),
        torch.empty(*lead, groups, dtype=torch.bfloat16, device=x.device),
        torch.empty(*lead, groups, dtype=torch.bfloat16, device=x.device),
    )
    _launch(_quantise, x.contiguous(), packed, _QuantForm(size, group, bits, max(1, TILE // group)))
    return packed


def dequantise(packed: Quantised, dtype: torch.dtype, bits: int = 4, group: int = 64) -> Tensor:
    """The numbers of `packed`, contiguous, (..., d) in `dtype`."""
    size = packed.codes.shape[-1] * 8 // bits
    _check(size, bits, group)
    x = torch.empty(*packed.codes.shape[:-1], size, dtype=dtype, device=packed.codes.device)
    _launch(_dequantise, x, packed, _QuantForm(size, group, bits, max(1, TILE // group)))
    return x


def hadamard(x: Tensor, block: int) -> Tensor:
    """`pieces.hadamard`: a new tensor. Each number is read and written once."""
    x = x.contiguous()
    out, blocks = torch.empty_like(x), x.numel() // block
    together = max(1, TILE // 2 // block)
    if blocks:
        _hadamard[(triton.cdiv(blocks, together),)](
            x, out, blocks, block**-0.5, block.bit_length() - 1, together, num_warps=4
        )
    return out


def _check(size: int, bits: int, group: int) -> None:
    if bits not in (4, 8) or group < 2 or group & (group - 1) or size * bits % 8:
        raise ValueError(f"{size} numbers of {bits} bits in groups of {group}: needed 4 or 8 bits, a power of two")


def _launch(kernel: triton.JITFunction, x: Tensor, packed: Quantised, form: _QuantForm) -> None:
    rows = x.numel() // max(form.size, 1)
    if rows:
        kernel[(triton.cdiv(rows, form.rows), packed.scale.shape[-1])](x, packed, rows, form, num_warps=4)


@triton.jit
def groups_to_codes(x, top: tl.constexpr):
    """x (n, group) float32 as codes int32, each row's scale and its low (n,), which bfloat16 can express.

    To leave numbers out let them repeat another one of their row.
    """
    low = to_bfloat16(tl.min(x, 1), False)
    scale = to_bfloat16(tl.div_rn(tl.max(x, 1) - low, tl.zeros_like(low) + top), True)
    step = tl.where(scale > 0, scale, 1.0)
    codes = tl.floor(tl.div_rn(x - low[:, None], tl.zeros_like(x) + step[:, None]) + 0.5)
    return tl.minimum(tl.maximum(codes, 0.0), top).to(tl.int32), scale, low


@triton.jit
def to_bfloat16(x, up: tl.constexpr):
    """x (float32) as the nearest number that bfloat16 has and that is not below x, or without `up` not above it."""
    bits = x.to(tl.int32, bitcast=True)
    away = (bits >= 0) if up else (bits < 0)
    bits = tl.where(away, bits + LOWER_HALF, bits) & ~LOWER_HALF
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pairs_to_bytes(codes, n: tl.constexpr, size: tl.constexpr):
    """codes (n, size) int32 of 4 bits as bytes (n, size / 2): of each pair the first is the lower half."""
    low, high = tl.split(tl.reshape(codes, (n, size // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def bytes_to_pairs(codes, n: tl.constexpr, size: tl.constexpr):
    """Bytes (n, size / 2) as codes (n, size) int32 of 4 bits."""
    wide = codes.to(tl.int32)
    return tl.reshape(tl.join(wide & 15, wide >> 4), (n, size))


@triton.jit
def _quantise(x, packed, rows, form: tl.constexpr):
    """One program: `form.rows` rows of one group."""
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * form.rows + tl.arange(0, form.rows)
    column = group * form.group + tl.arange(0, form.group)
    # Beyond the end of a short group its last number is read again, which changes neither least nor greatest.
    at = row[:, None] * form.size + tl.minimum(column, form.size - 1)[None, :]
    values = tl.load(x + at, mask=(row < rows)[:, None], other=0.0).to(tl.float32)
    codes, scale, low = groups_to_codes(values, (1 << form.bits) - 1)
    if form.bits == 4:
        codes = pairs_to_bytes(codes, form.rows, form.group)
    width: tl.constexpr = form.group * form.bits // 8
    total: tl.constexpr = form.size * form.bits // 8
    byte = group * width + tl.arange(0, width)
    inside = (row < rows)[:, None] & (byte < total)[None, :]
    tl.store(packed.codes + row[:, None] * total + byte[None, :], codes.to(tl.uint8), mask=inside)
    at = row * tl.num_programs(1) + group
    tl.store(packed.scale + at, scale.to(tl.bfloat16), mask=row < rows)
    tl.store(packed.low + at, low.to(tl.bfloat16), mask=row < rows)


@triton.jit
def _dequantise(x, packed, rows, form: tl.constexpr):
    """One program: `form.rows` rows of one group."""
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * form.rows + tl.arange(0, form.rows)
    width: tl.constexpr = form.group * form.bits // 8
    total: tl.constexpr = form.size * form.bits // 8
    byte = group * width + tl.arange(0, width)
    inside = (row < rows)[:, None] & (byte < total)[None, :]
    codes = tl.load(packed.codes + row[:, None] * total + byte[None, :], mask=inside, other=0)
    if form.bits == 4:
        codes = bytes_to_pairs(codes, form.rows, form.group)
    at = row * tl.num_programs(1) + group
    scale = tl.load(packed.scale + at, mask=row < rows, other=0.0).to(tl.float32)
    low = tl.load(packed.low + at, mask=row < rows, other=0.0).to(tl.float32)
    values = low[:, None] + codes.to(tl.float32) * scale[:, None]
    column = group * form.group + tl.arange(0, form.group)
    inside = (row < rows)[:, None] & (column < form.size)[None, :]
    tl.store(x + row[:, None] * form.size + column[None, :], values.to(x.dtype.element_ty), mask=inside)


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
