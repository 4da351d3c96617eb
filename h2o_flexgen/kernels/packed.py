"""Matrices of fewer bits: their numbers, rows of them, and the arguments of kernels for them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.config.model.packing import LEVEL_BITS, LEVELS, SUPER, Packing
from h2o_flexgen.kernels.native import function, library, structure

_LEVELS = tuple(LEVEL_BITS)
_KINDS = ("bfloat16", "float16", "float32", "e8m0", "e4m3", "super", "none", "middle", "zero")


_Packed = structure("weights.h", "Packed")


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix (outs, ins) in the layout of `packing`, whose tensors are `parts`, and the dtype that it is used in."""

    packing: Packing
    shape: tuple[int, int]
    parts: Mapping[str, Tensor]
    dtype: torch.dtype

    @staticmethod
    def over(packing: Packing, shape: tuple[int, ...], data: Tensor, dtype: torch.dtype) -> PackedWeight:
        """The matrix whose bytes are `data` (flat uint8, starting on a multiple of 64 bytes), without a copy."""
        parts = {
            part.name: data.narrow(0, part.offset, part.nbytes).view(getattr(torch, part.dtype)).view(part.shape)
            for part in packing.parts(shape)
        }
        return PackedWeight(packing, (shape[0], shape[1]), parts, dtype)

    @staticmethod
    def empty(packing: Packing, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> PackedWeight:
        """One with memory of its own, to be filled."""
        data = torch.empty(packing.nbytes(shape) + 64, dtype=torch.uint8)
        return PackedWeight.over(packing, shape, data[-data.data_ptr() % 64 :], dtype)

    @property
    def device(self) -> torch.device:
        return self.parts["codes"].device

    @cached_property
    def order(self) -> Tensor | None:
        """Which input each column of the codes belongs to; None: as they lie."""
        return self.parts["order"].long() if self.packing.ordered else None

    @cached_property
    def place(self) -> ctypes.Structure | None:
        """The arguments of kernels in C; None where they cannot take it."""
        group = self.packing.group
        if self.device.type != "cpu" or library() is None:
            return None
        kinds = (_KINDS.index(kind) for kind in (self.packing.scale, self.packing.low))
        names = ("codes", "scale", "super_scale", "low", "super_low")
        places = (self.parts[name].data_ptr() if name in self.parts else None for name in names)
        return _Packed(*places, _LEVELS.index(self.packing.levels), group, *kinds, self.shape[1])

    @cached_property
    def whole(self) -> bool:
        """Whether its products with bfloat16 numbers are of whole ones: `native/whole.c` rounds those to 8 bits."""
        return self.place is not None and bool(function("takes_whole", "P", "i")(ctypes.byref(self.place)))

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Outputs [start, stop): a view."""
        parts = {name: part if name == "order" else part[start:stop] for name, part in self.parts.items()}
        return PackedWeight(self.packing, (stop - start, self.shape[1]), parts, self.dtype)

    def expanded(self, dtype: torch.dtype | None = None) -> Tensor:
        """Its numbers, (outs, ins) in `dtype`, its own where that is None: computed in float32, rounded once."""
        return self._sorted(self.in_order(dtype or self.dtype))

    def look_up(self, rows: Tensor) -> Tensor:
        """Rows (T,) of it, (T, ins) in its dtype."""
        return self._sorted(self.in_order(self.dtype, rows))

    def _sorted(self, values: Tensor) -> Tensor:
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)

    def in_order(self, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
        """Some rows, None: all, in `dtype`, with the inputs in the order of the codes."""
        if self.place is None or dtype not in (torch.bfloat16, torch.float32):
            parts = {name: part if rows is None else part[rows] for name, part in self.parts.items() if name != "order"}
            return expand(self.packing, parts, self.shape[1], dtype)
        chosen = None if rows is None else rows.to("cpu", torch.int64).contiguous()
        count = self.shape[0] if chosen is None else chosen.numel()
        out = torch.empty(count, self.shape[1], dtype=dtype)
        where = None if chosen is None else chosen.data_ptr()
        kind = count, dtype is torch.float32, torch.get_num_threads()
        if count and function("expand", "PPPlii", "i")(ctypes.byref(self.place), where, out.data_ptr(), *kind):
            raise MemoryError(f"no memory to expand weights of {self.shape[1]} inputs")
        return out


def give(matrix: ctypes.Structure, w: Mapping[str, Any], part: str, held: list[PackedWeight]) -> bool:
    """Whether kernels in C can take weight and bias of `part`, which `matrix` (matrices.h) then says. Packed weights,
    which must outlive it, are added to `held`."""
    weight, bias = w[f"{part}.weight"], w.get(f"{part}.bias")
    matrix.outs, matrix.ins = weight.shape
    matrix.bias = None if bias is None else bias.data_ptr()
    if not is_plain(bias):
        return False
    if not isinstance(weight, PackedWeight):
        matrix.w = weight.data_ptr()
        return is_plain(weight)
    if weight.place is None or weight.order is not None or weight.dtype is not torch.bfloat16:
        return False
    matrix.packed = ctypes.addressof(weight.place)
    held.append(weight)
    return True


def is_plain(x: Tensor | None) -> bool:
    """Whether kernels in C take it as it lies; None is nothing to take."""
    return x is None or (x.dtype is torch.bfloat16 and x.is_cpu and x.is_contiguous())


Weight = Tensor | PackedWeight
"""A tensor of weights in the dtype that is computed with, or a packed matrix."""


def look_up(table: Weight, rows: Tensor) -> Tensor:
    """Rows (T,) of a table (n, ins), (T, ins) in its dtype."""
    return table.look_up(rows) if isinstance(table, PackedWeight) else F.embedding(rows, table)


def expand(packing: Packing, parts: Mapping[str, Tensor], ins: int, dtype: torch.dtype) -> Tensor:
    """The numbers of `parts` (rows of them), (rows, ins) in `dtype`, in the order of the codes.

    By torch's operations on any device: the reference of all kernels.
    """
    scale, low = scales_and_lows(packing, parts)
    group = packing.group or ins
    values = _levels(packing, parts["codes"])
    values = values.mul_(scale.repeat_interleave(group, -1)[:, :ins])
    if low is not None:
        values = values.add_(low.repeat_interleave(group, -1)[:, :ins])
    return values.to(dtype)


def scales_and_lows(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The scale and the low of each group, (outs, groups) float32; None: all lows are 0."""
    if packing.scale == "super":
        scale = _by_block(packing, parts["scale"], parts["super_scale"])
    elif packing.scale == "e8m0":
        scale = torch.exp2(parts["scale"].float() - 127)
    elif packing.scale == "e4m3":
        scale = parts["scale"].view(torch.float8_e4m3fn).float() * parts["super_scale"]
    else:
        scale = parts["scale"].float()
    if packing.low == "none":
        return scale, None
    if packing.low == "middle":
        return scale, scale * -8
    if packing.low == "zero":
        return scale, -(parts["low"].float() * scale)
    if packing.low == "super":
        return scale, -_by_block(packing, parts["low"], parts["super_low"])
    return scale, parts["low"].float()


def _by_block(packing: Packing, small: Tensor, large: Tensor) -> Tensor:
    """Whole numbers (outs, groups) times those of their super-blocks."""
    return small.float() * large.float().repeat_interleave(SUPER // packing.group, -1)[:, : small.shape[-1]]


def _levels(packing: Packing, codes: Tensor) -> Tensor:
    """The numbers of the codes, (outs, ins) float32, newly made."""
    if packing.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    if packing.levels == "uint4":
        return codes.float()
    if packing.levels == "int8":
        return codes.view(torch.int8).float()
    return _floats(packing.levels, codes.device)[codes.long()]


@cache
def _floats(levels: str, device: torch.device) -> Tensor:
    if levels == "e4m3":
        return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    return torch.tensor(LEVELS[levels], device=device)
