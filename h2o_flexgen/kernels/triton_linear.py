"""Products with packed matrices on a GPU: each program expands the tile of the weight that it multiplies with.

Imports Triton; see `triton_available`. Codes, scales and lows are read once per tile of rows of x, and no expanded
number is written: at few rows a product costs the bytes of the codes, at many the matrix units' time and that of
expanding once per 128 rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.config.model.packing import LEVEL_BITS, LEVELS, SUPER, Packing
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.kernels.triton_decode_kernels import product
from h2o_flexgen.kernels.triton_quant import bytes_to_pairs

_LEVELS = tuple(LEVEL_BITS)
_UINT4, _E2M1, _IQ3, _IQ3S, _INT8 = (
    tl.constexpr(_LEVELS.index(each)) for each in ("uint4", "e2m1", "iq3", "iq3s", "int8")
)
_TABLES = tl.constexpr(tuple(LEVELS.get(each, ()) for each in _LEVELS))
_SCALES = {"e8m0": 1, "super": 2, "e4m3": 3}
_POWER, _TWO_LEVELS, _OF_ROW = (tl.constexpr(number) for number in range(1, 4))
_LOWS = {"none": 1, "middle": 2, "zero": 3, "super": 4}
_NO_LOW, _MIDDLE, _ZERO, _SUPER_LOW = (tl.constexpr(number) for number in range(1, 5))
_SUPER = tl.constexpr(SUPER)
PARTS = ("codes", "scale", "super_scale", "low", "super_low")
_DEEP = 64  # inputs of a tile
_MOST_DEEP = 128


class _Rows(NamedTuple):
    """Numbers (rows, n), those of a row side by side, and from one row to the next."""

    at: Any
    stride: int


class WeightParts(NamedTuple):
    """The parts of a packed matrix, row-major; None for parts that its layout lacks."""

    outs: int
    codes: Any
    scale: Any
    super_scale: Any
    low: Any
    super_low: Any


class _LinearForm(NamedTuple):
    """The sizes and options that a kernel is compiled for; the first six are `codes_form`'s."""

    levels: int  # in _LEVELS
    scale: int  # in _SCALES, 0: numbers
    low: int  # in _LOWS, 0: numbers
    size: int  # inputs of a group, 0: all
    groups: int  # of a row
    group: int  # inputs of a tile that share a group
    ins: int
    rows: int  # of a tile: rows of x, rows of the weight, and inputs
    outs: int
    deep: int
    relu: bool
    add: bool
    wide: bool  # see `product`


def tile_depth(packing: Packing) -> int:
    """Inputs of a tile: a whole group's, but at least `_DEEP` and at most `_MOST_DEEP`."""
    return min(_MOST_DEEP, max(_DEEP, packing.group))


def codes_form(packing: Packing, ins: int, deep: int) -> tuple[int, int, int, int, int, int]:
    """The first fields of `_LinearForm`, which `expanded` reads, for a matrix with `ins` inputs in tiles of `deep`:
    levels, scale, low, size, groups and group."""
    kinds = _LEVELS.index(packing.levels), _SCALES.get(packing.scale, 0), _LOWS.get(packing.low, 0)
    return *kinds, packing.group, packing.groups(ins), min(packing.group, deep) or deep


def packed_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, y: Tensor, *, relu: bool = False, add: bool = False
) -> Tensor:
    """y (T, outs), any strided rows, overwritten by x (T, ins) times the numbers of `weight`, rounded to x's dtype,
    plus bias (outs); with `add` that is added to it. Inputs are in the order of the codes. `relu`: negative results
    become 0. Sums are float32. Returns y."""
    (outs, ins), rows, packing = weight.shape, x.shape[0], weight.packing
    if not rows:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    deep = tile_depth(packing)
    tile, tile_outs, warps = (16, 32, 4) if rows <= 16 else (64, 64, 4) if rows <= 64 else (128, 128, 8)
    form = _LinearForm(
        *codes_form(packing, ins, deep),
        ins=ins,
        rows=tile,
        outs=tile_outs,
        deep=deep,
        relu=relu,
        add=add,
        wide=interpreting(),
    )
    matrix = WeightParts(outs, *(weight.parts.get(name) for name in PARTS))
    grid = (triton.cdiv(outs, tile_outs), triton.cdiv(rows, tile))
    _linear[grid](_Rows(x, x.stride(0)), matrix, bias, _Rows(y, y.stride(0)), rows, form, num_warps=warps)
    return y


@triton.jit
def _linear(x, matrix, bias, y, rows, form: tl.constexpr):
    """One program: some rows of x times some of the weight."""
    out = tl.program_id(0).to(tl.int64) * form.outs + tl.arange(0, form.outs)
    row = tl.program_id(1).to(tl.int64) * form.rows + tl.arange(0, form.rows)
    there, inside = row < rows, out < matrix.outs
    total = tl.full((form.rows, form.outs), 0.0, tl.float32)
    for start in range(0, form.ins, form.deep):
        column = start + tl.arange(0, form.deep)
        mask = there[:, None] & (column < form.ins)[None, :]
        some = tl.load(x.at + row[:, None] * x.stride + column[None, :], mask=mask, other=0.0)
        weight = expanded(matrix, out, inside, start, form)
        total += product(some, tl.trans(weight.to(some.dtype)), form.wide)
    if bias is not None:
        total += tl.load(bias + out, mask=inside, other=0.0).to(tl.float32)[None, :]
    if form.relu:
        total = tl.maximum(total, 0.0)
    to = y.at + row[:, None] * y.stride + out[None, :]
    mask = there[:, None] & inside[None, :]
    if form.add:
        total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total.to(y.at.dtype.element_ty), mask=mask)


@triton.jit
def expanded(matrix, out, inside, start, form: tl.constexpr):
    """Inputs [start, start + deep) of the weight's rows `out`, (outs, deep) float32."""
    part = tl.arange(0, form.deep // form.group)  # a group, or a piece of one
    group = part * 0 if form.size == 0 else start // form.size + part
    at = out[:, None] * form.groups + group[None, :]
    block = out[:, None] * tl.cdiv(form.ins, _SUPER) + ((start + part * form.group) // _SUPER)[None, :]
    mask = inside[:, None] & (group < form.groups)[None, :]
    scale = tl.load(matrix.scale + at, mask=mask, other=0)
    if form.scale == _OF_ROW:
        scale = _float8(scale) * tl.load(matrix.super_scale + out, mask=inside, other=0.0)[:, None]
    else:
        scale = scale.to(tl.float32)
    if form.scale == _POWER:
        scale = tl.exp2(scale - 127.0)
    elif form.scale == _TWO_LEVELS:
        scale *= tl.load(matrix.super_scale + block, mask=mask, other=0.0).to(tl.float32)
    x = tl.reshape(_levels(matrix.codes, out, inside, start, form), (form.outs, form.deep // form.group, form.group))
    x *= scale[:, :, None]
    if form.low == _MIDDLE:
        x -= 8.0 * scale[:, :, None]
    elif form.low != _NO_LOW:
        low = tl.load(matrix.low + at, mask=mask, other=0).to(tl.float32)
        if form.low == _ZERO:
            low *= -scale
        elif form.low == _SUPER_LOW:
            low *= -tl.load(matrix.super_low + block, mask=mask, other=0.0).to(tl.float32)
        x += low[:, :, None]
    return tl.reshape(x, (form.outs, form.deep))


@triton.jit
def _levels(codes, out, inside, start, form: tl.constexpr):
    """The numbers of the codes of `expanded`, (outs, deep) float32; beyond a row's end the number of code 0."""
    if form.levels < _INT8:
        byte = start // 2 + tl.arange(0, form.deep // 2)
        mask = inside[:, None] & (byte < form.ins // 2)[None, :]
        some = tl.load(codes + out[:, None] * (form.ins // 2) + byte[None, :], mask=mask, other=0)
        code = bytes_to_pairs(some, form.outs, form.deep)
        if form.levels == _UINT4:
            level = code.to(tl.float32)
        elif form.levels == _E2M1:
            level = _small_float(code, 1, 3, 1)
        elif form.levels != _IQ3 and form.levels != _IQ3S:
            level = code.to(tl.float32)
            for i in tl.static_range(16):
                level = tl.where(code == i, _TABLES[form.levels][i], level)
        else:
            size = (code & 7).to(tl.float32) * 2.0 + 1.0
            if form.levels == _IQ3:
                size = tl.where(size == 15.0, 15.5, size)
            level = tl.where(code < 8, size, -size)
    else:
        byte = start + tl.arange(0, form.deep)
        mask = inside[:, None] & (byte < form.ins)[None, :]
        some = tl.load(codes + out[:, None] * form.ins + byte[None, :], mask=mask, other=0)
        if form.levels == _INT8:
            level = some.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            level = _float8(some)
    return level


@triton.jit
def _float8(codes):
    """Codes (uint8) of E4M3 as float32."""
    return tl.where((codes & 127) == 127, float("nan"), _small_float(codes.to(tl.int32), 3, 7, 7))


@triton.jit
def _small_float(code, fraction: tl.constexpr, sign: tl.constexpr, bias: tl.constexpr):
    """Codes (int32) of floats with so many bits of fraction, their sign at bit `sign`, as float32: by its bits."""
    size = code & ((1 << sign) - 1)
    number = ((size << (23 - fraction)) + ((127 - bias) << 23)).to(tl.float32, bitcast=True)
    least: tl.constexpr = 2.0 ** (1 - bias - fraction)
    number = tl.where(size >> fraction == 0, size.to(tl.float32) * least, number)
    return tl.where(code >> sign == 0, number, -number)
