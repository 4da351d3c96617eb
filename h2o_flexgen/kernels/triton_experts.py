"""Experts of a mixture on a GPU: all that lie there at once, each for the tokens that chose it, in three launches.

Imports Triton; see `triton_available`. The first launch gathers tokens and makes the gated middle, the second goes back
to the hidden size, times the tokens' shares, the third adds to each token what its experts made, one after the other,
rounding each time: so sums are the same however the experts are divided among calls.

An expert's product with r rows is 2 r FLOPs per weight of two bytes, and an H200 has some 200 FLOPs per byte of its
bandwidth. Up to about 200 rows it costs the bytes of the weights, which a program reads once for 16, 64 or 128 rows.
Weights are the left factor, tokens the right one: the least tile of the matrix units has 64 rows on the left, but 8
columns on the right, so that few tokens waste nothing, and the instruction is the same for any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.kernels.triton_decode_kernels import product
from h2o_flexgen.kernels.triton_linear import PARTS, WeightParts, codes_form, expanded, tile_depth

_PLAIN = tl.constexpr(-1)  # levels of a matrix that is not packed
_OUTS, _DEEP = 64, 64  # of a tile
_COLUMNS = 1024  # that a program of the last launch adds up
_ALIGNED = 16
_HEAD = tl.constexpr(3)  # numbers of a tile before the addresses: its first choice, their count, their first row
_ADDRESSES = tl.constexpr(len(PARTS) + 1)  # of a matrix, its bias the last
_WIDTH = tl.constexpr(3 + 3 * (len(PARTS) + 1))
_SLOPE = tl.constexpr(1.702)


class _MatrixForm(NamedTuple):
    """The layout of a matrix that a kernel is compiled for; the first six numbers are `codes_form`'s."""

    levels: int
    scale: int
    low: int
    size: int
    groups: int
    group: int
    whole: int  # outputs
    outs: int  # of a tile: outputs and inputs
    deep: int
    ins: int
    first: int  # of its rows: the one of output 0, and from one to the next
    step: int
    kinds: tuple[Any, ...]  # of numbers in each of PARTS
    bias: bool
    aligned: bool


class _TileForm(NamedTuple):
    """Options a kernel is compiled for: tokens of a tile; whether there is a `clamp`, as in `Gate`; see `product`."""

    rows: int
    clamped: bool
    clamp: float
    wide: bool


class TritonExpert(NamedTuple):
    """An expert whose matrices lie on a GPU: their layouts for kernels, and the addresses of up, gate and down."""

    forms: tuple[_MatrixForm, _MatrixForm, _MatrixForm]
    at: tuple[int, ...]

    @classmethod
    def of(cls, w: Mapping[str, Any]) -> TritonExpert | None:
        """Of an expert's weights, which must outlive it; None where the kernels cannot take them."""
        names = [("up", 0, 1), ("gate", 0, 1)] if "up.weight" in w else [("gate_up", 1, 2), ("gate_up", 0, 2)]
        matrices = [_matrix_form(w, *name) for name in (*names, ("down", 0, 1))]
        if any(form is None for form, _ in matrices):
            return None
        up, gate, down = (form for form, _ in matrices if form is not None)
        if up._replace(first=0) != gate._replace(first=0):
            return None
        return cls((up, gate, down), tuple(at for _, each in matrices for at in each))


def _matrix_form(w: Mapping[str, Any], name: str, first: int, step: int) -> tuple[_MatrixForm | None, list[int]]:
    """Of outputs first, first + step, ... of a matrix; and its addresses."""
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    outs, ins = weight.shape
    if isinstance(weight, PackedWeight):
        deep = tile_depth(weight.packing)
        codes, parts = codes_form(weight.packing, ins, deep), [weight.parts.get(part) for part in PARTS]
        fits = weight.order is None
    else:
        deep, codes, parts = _DEEP, (_PLAIN.value, 0, 0, 0, 0, 0), [weight, *[None] * (len(PARTS) - 1)]
        fits = weight.is_contiguous()
    fits = fits and (bias is None or bias.is_contiguous())
    at = [0 if part is None else part.data_ptr() for part in (*parts, bias)]
    kinds = tuple(tl.uint8 if part is None else _kind(part.dtype) for part in (*parts, bias))
    aligned = not any(address % _ALIGNED for address in at)
    form = _MatrixForm(*codes, outs // step, _OUTS, deep, ins, first, step, kinds, bias is not None, aligned)
    return (form if fits else None), at


def _kind(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))


class _Piece(NamedTuple):
    """Choices [start, stop) of one expert."""

    expert: TritonExpert
    start: int
    stop: int


def add_experts(
    x: Tensor,
    out: Tensor,
    choices: tuple[Tensor, Tensor, Tensor],
    starts: Sequence[int],
    experts: Sequence[TritonExpert],
    clamp: float | None,
    most: int,
) -> None:
    """Adds to `out` (T, H) what `experts` make of their tokens' x (T, H), times their shares, expert after expert.

    choices: `tokens` (n,) int64, `shares` (n,) float32, and `places` (T, k) int64, where each token stands in these,
    ascending, then -1 where it chose fewer. starts: of each expert's choices, and the end of the last one's. clamp:
    that of gpt-oss's gates, None: the gates are SiLU's. most: tokens that are under way at once. Sums are float32 up to
    the addition to `out`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    for pieces in _segments(starts, experts, most):
        _add_segment(x, out, choices, pieces, clamp or 0.0)


def _segments(starts: Sequence[int], experts: Sequence[TritonExpert], most: int) -> Iterator[list[_Piece]]:
    """The choices in their order, at most `most` at once, of experts that one kernel takes."""
    pieces: list[_Piece] = []
    free = most
    for expert, start, stop in zip(experts, starts[:-1], starts[1:], strict=True):
        while start < stop:
            if pieces and (not free or pieces[-1].expert.forms != expert.forms):
                yield pieces
                pieces, free = [], most
            end = min(stop, start + free)
            pieces.append(_Piece(expert, start, end))
            free -= end - start
            start = end
    if pieces:
        yield pieces


def _add_segment(
    x: Tensor, out: Tensor, choices: tuple[Tensor, Tensor, Tensor], pieces: Sequence[_Piece], clamp: float
) -> None:
    tokens, shares, places = choices
    up, gate, down = pieces[0].expert.forms
    first, end, most = pieces[0].start, pieces[-1].stop, max(piece.stop - piece.start for piece in pieces)
    rows, warps = (16, 4) if most <= 16 else (64, 4) if most <= 64 else (128, 8)
    entries = [[first, end, *[0] * (_WIDTH.value - 2)]]
    for expert, start, stop in pieces:
        entries += [[begin, min(rows, stop - begin), begin - first, *expert.at] for begin in range(start, stop, rows)]
    tiles = torch.tensor(entries).to(x.device, non_blocking=True)
    middle = x.new_empty(end - first, up.whole)
    made = x.new_empty(end - first, down.whole, dtype=torch.float32)
    form = _TileForm(rows, bool(clamp), clamp, interpreting())
    grid = len(entries) - 1, triton.cdiv(up.whole, _OUTS)
    _gate_up[grid](x, x.stride(0), tokens, tiles, middle, up, gate, form, num_warps=warps)
    grid = len(entries) - 1, triton.cdiv(down.whole, _OUTS)
    _down[grid](middle, shares, tiles, made, down, form, num_warps=warps)
    columns = min(_COLUMNS, triton.next_power_of_2(down.whole))
    grid = len(x), triton.cdiv(down.whole, columns)
    slots = triton.next_power_of_2(places.shape[1])
    _add_up[grid](made, tiles, places, out, out.stride(0), places.shape[1], slots, down.whole, columns, num_warps=4)


@triton.jit
def _gate_up(x, stride, tokens, tiles, middle, up: tl.constexpr, gate: tl.constexpr, form: tl.constexpr):
    """One program: some outputs of an expert's gate and up, and what is between, for some of its tokens."""
    entry = tiles + (tl.program_id(0) + 1) * _WIDTH
    place = tl.arange(0, form.rows)
    there = place < tl.load(entry + 1)
    token = tl.load(tokens + tl.load(entry) + place, mask=there, other=0)
    out = tl.program_id(1) * up.outs + tl.arange(0, up.outs)
    inside = out < up.whole
    up_parts, gate_parts = _parts(entry + _HEAD, up), _parts(entry + _HEAD + _ADDRESSES, gate)
    opened = tl.full((up.outs, form.rows), 0.0, tl.float32)
    total = tl.full((up.outs, form.rows), 0.0, tl.float32)
    for start in range(0, up.ins, up.deep):
        column = start + tl.arange(0, up.deep)
        mask = there[:, None] & (column < up.ins)[None, :]
        some = tl.trans(tl.load(x + token[:, None] * stride + column[None, :], mask=mask, other=0.0))
        total += product(_weight(up_parts, out, inside, start, up).to(some.dtype), some, form.wide)
        opened += product(_weight(gate_parts, out, inside, start, gate).to(some.dtype), some, form.wide)
    if up.bias:
        total += _bias(entry + _HEAD, out, inside, up)[:, None]
        opened += _bias(entry + _HEAD + _ADDRESSES, out, inside, gate)[:, None]
    if form.clamped:  # comparisons, which let nan through
        opened = tl.where(opened > form.clamp, form.clamp, opened)
        total = tl.where(total > form.clamp, form.clamp, tl.where(total < -form.clamp, -form.clamp, total))
        total = (total + 1.0) * opened * tl.sigmoid(opened * _SLOPE)
    else:
        total *= opened * tl.sigmoid(opened)
    row = tl.load(entry + 2) + place
    to = middle + row[:, None] * up.whole + out[None, :]
    tl.store(to, tl.trans(total).to(middle.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def _down(middle, shares, tiles, made, down: tl.constexpr, form: tl.constexpr):
    """One program: some outputs of an expert for some of its tokens, times their shares."""
    entry = tiles + (tl.program_id(0) + 1) * _WIDTH
    place = tl.arange(0, form.rows)
    there = place < tl.load(entry + 1)
    row = tl.load(entry + 2) + place
    out = tl.program_id(1) * down.outs + tl.arange(0, down.outs)
    inside = out < down.whole
    parts = _parts(entry + _HEAD + 2 * _ADDRESSES, down)
    total = tl.full((down.outs, form.rows), 0.0, tl.float32)
    for start in range(0, down.ins, down.deep):
        column = start + tl.arange(0, down.deep)
        mask = there[:, None] & (column < down.ins)[None, :]
        some = tl.trans(tl.load(middle + row[:, None] * down.ins + column[None, :], mask=mask, other=0.0))
        total += product(_weight(parts, out, inside, start, down).to(some.dtype), some, form.wide)
    if down.bias:
        total += _bias(entry + _HEAD + 2 * _ADDRESSES, out, inside, down)[:, None]
    total *= tl.load(shares + tl.load(entry) + place, mask=there, other=0.0)[None, :]
    to = made + row[:, None] * down.whole + out[None, :]
    tl.store(to, tl.trans(total), mask=there[:, None] & inside[None, :])


@triton.jit
def _add_up(made, tiles, places, out, stride, active, slots: tl.constexpr, hidden: tl.constexpr, columns: tl.constexpr):
    """One program: some numbers of a token, to which are added those that this segment's experts made, in order."""
    token = tl.program_id(0).to(tl.int64)
    first, end = tl.load(tiles), tl.load(tiles + 1)
    slot = tl.arange(0, slots)
    place = tl.load(places + token * active + slot, mask=slot < active, other=-1)
    chosen = tl.max(((place >= first) & (place < end)).to(tl.int32), 0) > 0
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < tl.where(chosen, hidden, 0)  # Triton 3.9's interpreter has no masks of a block and a single truth
    to = out + token * stride + column
    total = tl.load(to, mask=inside, other=0.0)
    for number in range(active):
        at = tl.load(places + token * active + number)
        mine = (at >= first) & (at < end)
        part = tl.load(made + (at - first) * hidden + column, mask=column < tl.where(mine, hidden, 0), other=0.0)
        total = tl.where(mine, (total.to(tl.float32) + part).to(total.dtype), total)
    tl.store(to, total, mask=inside)


@triton.jit
def _parts(entry, form: tl.constexpr):
    """The parts of a matrix whose addresses stand at `entry`."""
    return WeightParts(
        form.whole,
        _pointer(entry, form.kinds[0], form.aligned),
        _pointer(entry + 1, form.kinds[1], form.aligned),
        _pointer(entry + 2, form.kinds[2], form.aligned),
        _pointer(entry + 3, form.kinds[3], form.aligned),
        _pointer(entry + 4, form.kinds[4], form.aligned),
    )


@triton.jit
def _pointer(entry, kind: tl.constexpr, aligned: tl.constexpr):
    """Where numbers of a kind lie: an address that was stored."""
    at = tl.load(entry).to(tl.pointer_type(kind))
    if aligned:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def _weight(parts, out, inside, start, form: tl.constexpr):
    """Inputs [start, start + deep) of a matrix's outputs `out`, (outs, deep)."""
    row = out.to(tl.int64) * form.step + form.first
    if form.levels == _PLAIN:
        column = start + tl.arange(0, form.deep)
        mask = inside[:, None] & (column < form.ins)[None, :]
        weight = tl.load(parts.codes + row[:, None] * form.ins + column[None, :], mask=mask, other=0.0)
    else:
        weight = expanded(parts, row, inside, start, form)
    return weight


@triton.jit
def _bias(entry, out, inside, form: tl.constexpr):
    """Of the outputs `out` of a matrix, (outs,) float32."""
    at = _pointer(entry + _ADDRESSES - 1, form.kinds[5], False)
    return tl.load(at + out * form.step + form.first, mask=inside, other=0.0).to(tl.float32)
