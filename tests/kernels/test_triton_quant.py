"""Group-wise quantisation by Triton against torch's, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.kernels import triton_quant
from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.quant import dequantise, quantise
from tests.seeds import torch_generator

pytestmark = pytest.mark.turns


@pytest.mark.parametrize("form", [(4, 64), (8, 64), (4, 16), (8, 128)], ids=str)
@pytest.mark.parametrize("size", [2, 62, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_ways(form: tuple[int, int], size: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 23, size, generator=torch_generator(size)).to(dtype)
    x[0] += 100
    x[1, :9] = 0.25
    ours, theirs = triton_quant.quantise(x.to(DEVICE), *form), quantise(x, *form)
    for name, a, b in zip(theirs._fields, ours, theirs, strict=True):
        assert torch.equal(a.cpu(), b), name
    back = triton_quant.dequantise(ours, dtype, *form).cpu()
    if dtype is torch.bfloat16 and interpreting():  # where numbers become bfloat16 by losing their lower bits
        torch.testing.assert_close(back, dequantise(theirs, dtype, *form), rtol=2**-7, atol=0)
    else:
        assert torch.equal(back, dequantise(theirs, dtype, *form))


def test_a_view_and_nothing() -> None:
    x = torch.randn(64, 5)
    for a, b in zip(triton_quant.quantise(x.to(DEVICE).t()), quantise(x.t()), strict=True):
        assert torch.equal(a.cpu(), b)
    assert triton_quant.quantise(x[:0].to(DEVICE), bits=8).codes.shape == (0, 5)


def test_what_is_refused() -> None:
    x = torch.randn(2, 7, device=DEVICE)
    for bits, group in ((4, 64), (3, 64), (8, 48)):
        with pytest.raises(ValueError, match="needed 4 or 8 bits"):
            triton_quant.quantise(x, bits, group)
