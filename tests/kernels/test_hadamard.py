"""The Hadamard transform against its matrix, by every implementation."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.config.model.packing import CachePacking
from h2o_flexgen.kernels.pieces import hadamard
from tests.oracles.packed import walsh
from tests.seeds import torch_generator


@pytest.mark.parametrize("dim", [1, 2, 6, 12, 16, 36, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_matrix(dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, dim, generator=torch_generator(dim)).to(dtype)
    found, wanted = hadamard(x, dim & -dim), x.double() @ walsh(dim)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_a_block_is_the_largest_power_of_two() -> None:
    assert [CachePacking(4, dim).block for dim in (64, 80, 96, 4)] == [64, 16, 32, 4]
    assert CachePacking(4, 64, rotation=False).block == 0


def test_no_product_changes_and_twice_is_nothing() -> None:
    x, y = torch.randn(2, 7, 128, generator=torch_generator(1))
    a, b = hadamard(x, 128), hadamard(y, 128)
    torch.testing.assert_close(a @ b.T, x @ y.T, rtol=0, atol=1e-4)
    torch.testing.assert_close(hadamard(a, 128), x, rtol=0, atol=1e-5)
    assert hadamard(x, 0) is x


def test_outliers_cost_less() -> None:
    """What it is for: one number of each vector is fifty times the others."""
    from h2o_flexgen.cache.packing import expand, pack

    x = torch.randn(50, 64, generator=torch_generator(2))
    x[:, 7] = 50
    errors = []
    for rotation in (True, False):
        packing = CachePacking(4, 64, rotation)
        errors.append(float((expand(pack(x, packing), packing, torch.float32) - x).square().mean()))
    assert errors[0] < errors[1] / 4
