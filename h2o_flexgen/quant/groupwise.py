"""Group-wise quantisation (Sheng et al. 2023, "FlexGen", section 5) in torch operations, on any device: the reference.

Layout. Neighbours along the last dimension form groups of 64; the last group may be shorter. A group is kept as whole
numbers ("codes") from 0 to 2 ** bits - 1 and two bfloat16 numbers: x is about low + code * scale. With 4 bits byte j
holds element 2 j in its lower and element 2 j + 1 in its upper half; with 8 bits byte j is element j. With 3 bits the
lower two of all elements come first, from element 4 j on in byte j, the first lowest, then the upper ones, from element
8 j on. Codes, scales and lows are three tensors, each contiguous. Bits per number: 3.5, 4.5 and 8.5.

`low` is the smallest number of the group rounded down and `scale` its range over the largest code rounded up, so that
every number of the group lies between the least and the greatest that can be expressed, and the error is at most half a
scale. A product of a code and a bfloat16 number is exact in float32. So dequantising rounds once, and gives the same
bits with and without fused multiply-add.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from h2o_flexgen.kernels.types import Quantised

_LOWER_HALF = 0xFFFF  # the bits of a float32 that bfloat16 lacks


def quantise(x: Tensor, bits: int = 4, group: int = 64) -> Quantised:
    """x (..., d), finite floats of any dtype, as codes. `group`: numbers that share a scale, a power of two from 2 on,
    since the kernels take groups apart by halving. ValueError for others, and where d codes do not end with a byte.

    Numbers and ranges of groups must be finite in float32, which is not checked.
    """
    size, top = x.shape[-1], (1 << bits) - 1
    if bits not in (3, 4, 8):
        raise ValueError(f"{bits} bits per number: needed 3, 4 or 8")
    if group < 2 or group & (group - 1):
        raise ValueError(f"groups of {group}: needed a power of two, 2 or more")
    if size % 8 if bits == 3 else size * bits % 8:
        needed = "a multiple of 8" if bits == 3 else "an even count"
        raise ValueError(f"{size} numbers of {bits} bits do not fill their last byte: needed {needed}")
    # The last element stands for those that the last group lacks: it changes neither its least nor its greatest.
    groups = -(-size // group)
    missing = groups * group - size
    values = x.float()
    if missing:
        values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], missing)], dim=-1)
    values = values.unflatten(-1, (groups, group))
    low = _to_bfloat16(values.amin(-1), up=False)
    scale = _to_bfloat16((values.amax(-1) - low) / top, up=True)
    step = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(-1)
    codes = ((values - low.unsqueeze(-1)) / step + 0.5).floor_().clamp_(0, top).to(torch.uint8)
    codes = codes.flatten(-2)[..., :size]
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    elif bits == 3:
        codes = torch.cat([_side_by_side(codes & 3, 2), _side_by_side(codes >> 2, 1)], dim=-1)
    return Quantised(codes.contiguous(), scale.bfloat16(), low.bfloat16())


def dequantise(packed: Quantised, dtype: torch.dtype, bits: int = 4, group: int = 64) -> Tensor:
    """The numbers of `packed`, (..., d) in `dtype`: computed in float32, then rounded."""
    codes = packed.codes
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    elif bits == 3:
        lower, upper = codes.split([codes.shape[-1] // 3 * 2, codes.shape[-1] // 3], dim=-1)
        codes = _apart(lower, 2) | _apart(upper, 1) << 2
    size, groups = codes.shape[-1], packed.scale.shape[-1]
    if groups != -(-size // group):
        raise ValueError(f"{groups} scales for {size} numbers: needed one per {group}")
    codes = functional.pad(codes, (0, groups * group - size)).unflatten(-1, (groups, group))
    values = packed.low.float().unsqueeze(-1) + codes.float() * packed.scale.float().unsqueeze(-1)
    return values.flatten(-2)[..., :size].to(dtype)


def _side_by_side(x: Tensor, bits: int) -> Tensor:
    """Numbers of so many bits, uint8 (..., d), as bytes (..., d bits / 8), the first lowest."""
    each = x.unflatten(-1, (-1, 8 // bits))
    return (each << torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)).sum(-1, dtype=torch.uint8)


def _apart(x: Tensor, bits: int) -> Tensor:
    """The numbers of `_side_by_side`."""
    each = x.unsqueeze(-1) >> torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)
    return (each & (1 << bits) - 1).flatten(-2)


def _to_bfloat16(x: Tensor, *, up: bool) -> Tensor:
    """x (float32) as the nearest number that bfloat16 has and that is not below x, or with `up` false not above it."""
    bits = x.contiguous().view(torch.int32)
    # Cutting bits off goes towards zero; to go away from zero, count one up in what is left.
    away = (bits >= 0) if up else (bits < 0)
    bits = torch.where(away, bits + _LOWER_HALF, bits).bitwise_and_(~_LOWER_HALF)
    return bits.view(torch.float32)
