"""Keys and values of fewer bits, as caches keep them: packed when they come in, expanded when attention reads them.

The layout is `CachePacking`'s, the numbers are those of `quant.groupwise`, bit for bit: the reference for what kernels
pack and expand themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.config.model.packing import CACHE_GROUP, EXPANDED, CachePacking
from h2o_flexgen.kernels import pieces
from h2o_flexgen.kernels.types import Quantised
from h2o_flexgen.quant import groupwise
from h2o_flexgen.quant.groupwise import GroupFormat


def pack(x: Tensor, packing: CachePacking) -> Tensor:
    """Keys or values x (..., dim) in their pieces, (..., nbytes) uint8. What torch takes for that is bounded."""
    if pieces.available(x.dtype, packing.dim, x.device):
        return pieces.pack(x, packing.bits, packing.nbytes)
    if x.numel() > EXPANDED and x.dim() > 2:
        if len(x) == 1:
            return pack(x[0], packing).unsqueeze(0)
        return torch.cat([pack(half, packing) for half in x.tensor_split(2)])
    found = groupwise.quantise(x, GroupFormat(packing.bits, CACHE_GROUP))
    return torch.cat([part.view(torch.uint8) for part in found], dim=-1)


def parts_of(packed: Tensor, packing: CachePacking) -> Quantised:
    """Views of the codes, scales and lows of `packed` (..., nbytes)."""
    codes, scale, low = packed.split([packing.code_bytes, 2 * packing.groups, 2 * packing.groups], dim=-1)
    return Quantised(codes, scale.view(torch.bfloat16), low.view(torch.bfloat16))


def expand(packed: Tensor, packing: CachePacking, dtype: torch.dtype) -> Tensor:
    """What `packed` (..., nbytes) stands for, (..., dim) in `dtype`."""
    if pieces.available(dtype, packing.dim, packed.device):
        return pieces.expand(packed, packing.bits, packing.dim, dtype)
    return groupwise.dequantise(parts_of(packed, packing), dtype, GroupFormat(packing.bits, CACHE_GROUP))
