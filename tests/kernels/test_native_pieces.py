"""Packed keys and values in C: to the bit what the reference makes of them."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.cache.packing import parts_of
from h2o_flexgen.config.model.packing import CachePacking
from h2o_flexgen.kernels import native, pieces
from h2o_flexgen.kernels.pieces import hadamard
from h2o_flexgen.quant import dequantise, quantise
from tests.seeds import torch_generator

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f"no native kernels: {native.why_not()}")


def numbers(kind: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(3, 50, dim, generator=torch_generator(dim))
    found = {"normal": x, "far": 1000 + x, "tiny": x * 1e-30, "positive": x.abs(), "one": torch.full_like(x, -3.7)}
    return found[kind].to(dtype)


@pytest.mark.parametrize("kind", ["normal", "far", "tiny", "positive", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [4, 12, 32, 36, 64, 68, 80, 96, 128, 200, 256])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("rotation", [True, False])
def test_packs_and_expands_as_the_reference(rotation: bool, bits: int, dim: int, dtype: torch.dtype, kind: str) -> None:
    dim = -(-dim // 16) * 16 if bits == 3 else dim
    x, packing, form = numbers(kind, dim, dtype), CachePacking(bits, dim, rotation), (bits, 64)
    packed = pieces.pack(x, packing)
    expected = quantise(hadamard(x.float(), packing.block), *form)
    for part, other in zip(parts_of(packed, packing), expected, strict=True):
        assert torch.equal(part, other)
    lost, exact = parts_of(pieces.pack(x, packing, errors=True), packing), hadamard(x.float(), packing.block)
    mended = dequantise(expected, torch.float32, *form) + dequantise(lost, torch.float32, *form)
    steps = lost.scale.float().repeat_interleave(64, -1)[..., :dim]
    assert ((mended - exact).abs() <= 0.51 * steps + 1e-6 * exact.abs()).all(), "a code's step is halved"
    for wanted in (torch.float32, torch.bfloat16):
        back = hadamard(dequantise(expected, torch.float32, *form), packing.block).to(wanted)
        assert torch.equal(pieces.expand(packed, packing, wanted), back)


def test_vectors_may_lie_apart() -> None:
    x = torch.randn(4, 6, 7, 64, generator=torch_generator(1))
    four, eight = CachePacking(4, 64), CachePacking(8, 64)
    assert torch.equal(pieces.pack(x.transpose(1, 2), four), pieces.pack(x, four).transpose(1, 2))
    packed = pieces.pack(x, eight)
    some, every = (pieces.expand(part, eight, x.dtype) for part in (packed[:, :, :3], packed))
    assert torch.equal(some, every[:, :, :3])
