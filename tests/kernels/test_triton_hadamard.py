"""The Hadamard transform by Triton against torch's, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.kernels import triton_quant
from h2o_flexgen.kernels.pieces import hadamard
from tests.seeds import torch_generator


@pytest.mark.parametrize(("dim", "block"), [(2, 2), (12, 4), (64, 64), (80, 16), (96, 32), (256, 256)])
def test_equals_torch(dim: int, block: int) -> None:
    x = torch.randn(3, 37, dim, generator=torch_generator(dim))
    assert torch.equal(triton_quant.hadamard(x.to(DEVICE), block).cpu(), hadamard(x, block))


def test_a_view_and_nothing() -> None:
    x = torch.randn(5, 4, 16, generator=torch_generator(3))
    assert torch.equal(triton_quant.hadamard(x.transpose(0, 1).to(DEVICE), 16).cpu(), hadamard(x.transpose(0, 1), 16))
    assert triton_quant.hadamard(x[:0].to(DEVICE), 16).shape == (0, 4, 16)
