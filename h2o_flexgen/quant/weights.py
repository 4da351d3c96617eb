"""Weights packed while they are loaded: 4 bits with a scale and a low per group, 8 bits with a scale.

4 bits: scale and low of the least squared error per group, searched for (`kernels/native/quantise.c`), in which inputs
may weigh more or less; without native kernels those of the least and the greatest number, as FlexGen has it (Sheng et
al. 2023, section 5). 8 bits: symmetric.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.kernels.native import function, library
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.quant.groupwise import quantise


def pack(values: Tensor, out: PackedWeight, weight: Tensor | None = None, *, search: bool = True) -> None:
    """Fills `out` (rows, ins), of a packing that `ModelSpec.with_bits` makes, with `values` of that shape, any float.

    weight (ins): float32, what the squared error of an input counts with 4 bits; None: all the same. search: whether
    these have the scales of the least error rather than those of the range.
    """
    packing, parts = out.packing, out.parts
    x = values.float().contiguous()
    group = packing.group or x.shape[1]
    if out.device.type == "cpu" and x.is_cpu and library() is not None:
        low = parts["low"].data_ptr() if "low" in parts else None
        counts = None if weight is None else weight.float().contiguous()
        places = x.data_ptr(), None if counts is None else counts.data_ptr()
        made = parts["codes"].data_ptr(), parts["scale"].data_ptr(), low
        kind = *x.shape, group, packing.bits, search, torch.get_num_threads()
        function("quantise", "PPPPPllliii")(*places, *made, *kind)
    elif packing.bits == 4:
        packed = quantise(x, 4, 1 << (group - 1).bit_length())
        for name, part in (("codes", packed.codes), ("scale", packed.scale), ("low", packed.low)):
            parts[name].copy_(part)
    else:
        _pack_eight(x, packing, parts["codes"], parts["scale"])


def _pack_eight(x: Tensor, packing: Packing, codes: Tensor, scale: Tensor) -> None:
    group = packing.group or x.shape[1]
    missing = -x.shape[1] % group
    grouped = torch.nn.functional.pad(x, (0, missing)).unflatten(1, (-1, group))
    scale.copy_(grouped.abs().amax(-1) / 127)
    step = scale.float().unsqueeze(-1)
    whole = (grouped / torch.where(step > 0, step, 1)).round_().clamp_(-127, 127)
    codes.copy_(whole.flatten(1)[:, : x.shape[1]].to(torch.int8).view(torch.uint8))
