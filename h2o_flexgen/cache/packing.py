"""Keys and values of fewer bits, as caches keep them: packed when they come in, expanded when attention reads them.

The layout is `CachePacking`'s, the numbers are those of `quant.groupwise` of a Hadamard transform, bit for bit: the
reference for what kernels pack and expand themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.config.model.packing import CACHE_GROUP, EXPANDED, CachePacking
from h2o_flexgen.kernels import pieces, triton_available
from h2o_flexgen.kernels.pieces import hadamard
from h2o_flexgen.kernels.types import Quantised
from h2o_flexgen.quant import groupwise
from h2o_flexgen.quant.groupwise import GroupFormat


def pack(x: Tensor, packing: CachePacking) -> Tensor:
    """Keys or values x (..., dim) in their pieces, (..., nbytes) uint8. What torch takes for that is bounded."""
    if triton_available.serves(x.device):
        from h2o_flexgen.kernels import triton_quant  # imports Triton, which is not there on every machine

        return _in_one(triton_quant.quantise(hadamard(x.float(), packing.block), packing.bits, CACHE_GROUP))
    if pieces.available(x.dtype, packing.dim, x.device):
        return pieces.pack(x, packing)
    if x.numel() > EXPANDED and x.dim() > 2:
        if len(x) == 1:
            return pack(x[0], packing).unsqueeze(0)
        return torch.cat([pack(half, packing) for half in x.tensor_split(2)])
    return _in_one(groupwise.quantise(hadamard(x.float(), packing.block), GroupFormat(packing.bits, CACHE_GROUP)))


def _in_one(parts: Quantised) -> Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def parts_of(packed: Tensor, packing: CachePacking) -> Quantised:
    """Views of the codes, scales and lows of `packed` (..., nbytes)."""
    codes, scale, low = packed.split([packing.code_bytes, 2 * packing.groups, 2 * packing.groups], dim=-1)
    return Quantised(codes, scale.view(torch.bfloat16), low.view(torch.bfloat16))


def expand(packed: Tensor, packing: CachePacking, dtype: torch.dtype) -> Tensor:
    """The numbers that `packed` (..., nbytes) was made of, (..., dim) in `dtype`."""
    exact = torch.float32 if packing.block else dtype
    if triton_available.serves(packed.device):
        from h2o_flexgen.kernels import triton_quant

        apart = Quantised(*(part.contiguous() for part in parts_of(packed, packing)))
        return hadamard(triton_quant.dequantise(apart, exact, packing.bits, CACHE_GROUP), packing.block).to(dtype)
    if pieces.available(dtype, packing.dim, packed.device):
        return pieces.expand(packed, packing, dtype)
    numbers = groupwise.dequantise(parts_of(packed, packing), exact, GroupFormat(packing.bits, CACHE_GROUP))
    return hadamard(numbers, packing.block).to(dtype)
