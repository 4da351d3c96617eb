"""Matrices of fewer bits: what they stand for, rows of them, products with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from h2o_flexgen.config.model.packing import SUPER, Packing


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix (outs, ins) in the layout of `packing`, whose tensors are `parts`, and the dtype that it is used in."""

    packing: Packing
    shape: tuple[int, int]
    parts: Mapping[str, Tensor]
    dtype: torch.dtype

    @staticmethod
    def over(packing: Packing, shape: tuple[int, ...], data: Tensor, dtype: torch.dtype) -> PackedWeight:
        """The matrix whose bytes are `data` (flat uint8, starting on a multiple of 64 bytes); nothing is copied."""
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

    def rows(self, start: int, stop: int) -> PackedWeight:
        """Outputs [start, stop): a view."""
        parts = {name: part if name == "order" else part[start:stop] for name, part in self.parts.items()}
        return PackedWeight(self.packing, (stop - start, self.shape[1]), parts, self.dtype)

    def expanded(self, dtype: torch.dtype | None = None) -> Tensor:
        """What it stands for, (outs, ins) in `dtype`, its own where that is None: computed in float32, rounded once."""
        return _expanded(self.packing, self.parts, self.shape[1], dtype or self.dtype)

    def look_up(self, rows: Tensor) -> Tensor:
        """Rows (T,) of it, (T, ins) in its dtype."""
        parts = {name: part if name == "order" else part[rows] for name, part in self.parts.items()}
        return _expanded(self.packing, parts, self.shape[1], self.dtype)


def _expanded(packing: Packing, parts: Mapping[str, Tensor], ins: int, dtype: torch.dtype) -> Tensor:
    """By torch's operations on any device: the reference of all kernels."""
    scale, low = scales_and_lows(packing, parts)
    group = packing.group or ins
    values = _levels(packing, parts["codes"])
    by_input = (each.repeat_interleave(group, -1)[:, :ins] for each in (scale, low) if each is not None)
    values = values.mul_(next(by_input))
    for each in by_input:
        values = values.add_(each)
    if packing.ordered:
        back = torch.empty_like(values)
        back[:, parts["order"].long()] = values
        values = back
    return values.to(dtype)


def scales_and_lows(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The scale and the low of each group, (outs, groups) float32; None: all lows are 0."""
    if packing.scale == "super":
        scale = _by_block(packing, parts["scale"], parts["super_scale"])
    elif packing.scale == "e8m0":
        scale = torch.exp2(parts["scale"].float() - 127)
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
    """What the codes stand for, (outs, ins) float32, newly made."""
    if packing.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    if packing.levels == "uint4":
        return codes.float()
    if packing.levels == "int8":
        return codes.view(torch.int8).float()
    return _floats(packing.levels, codes.device)[codes.long()]


@cache
def _floats(levels: str, device: torch.device) -> Tensor:
    """The numbers that small floats stand for, by code."""
    if levels == "e4m3":
        return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return torch.tensor(positive + [-number for number in positive], device=device)
