"""LayerNorm in C against float64, and what is left to torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels import layers
from h2o_flexgen.kernels.layers import layer_norm
from h2o_flexgen.kernels.native import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

EPS = 1e-5


def noise(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def exact(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """In float64, term by term."""
    wide = x.double()
    off = wide - wide.mean(-1, keepdim=True)
    y = off / (off.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y * (1 if weight is None else weight.double()) + (0 if bias is None else bias.double())


def near(y: Tensor, expected: Tensor) -> bool:
    """Within half a unit in the last of 8 bits, and what float32 may lose where bias and product cancel."""
    return bool(((y.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2e-5).all())


@pytest.fixture
def native_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left to torch would pass every comparison: there is nothing to leave it to."""
    monkeypatch.setattr(layers.F, "layer_norm", None)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 64, 100, 768, 2049])
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_it_is_the_norm(n: int, shift: float) -> None:
    for rows in (1, 2, 7, 130):
        x = noise(rows, n) + shift
        for weight, bias in ((None, None), (noise(n), None), (None, noise(n)), (noise(n), noise(n))):
            y, expected = layer_norm(x, weight, bias, EPS), exact(x, weight, bias)
            assert y.dtype is torch.bfloat16
            assert y.shape == x.shape
            assert near(y, expected)


@pytest.mark.usefixtures("native_only")
def test_rows_apart_and_rows_alike() -> None:
    """Half of a wider tensor, around which nothing is read: nan. A constant row is its bias."""
    around = torch.full((9, 3 * 70), float("nan"), dtype=torch.bfloat16)
    x, weight, bias = around[:, 70:140], noise(70), noise(70)
    x.copy_(noise(9, 70))
    x[4] = 2.5
    y = layer_norm(x, weight, bias, EPS)
    assert torch.equal(y[4], bias)
    assert near(y, exact(x, weight, bias))
    x[3, 1] = float("nan")
    assert layer_norm(x, weight, bias, EPS).isnan().any(-1).tolist() == [row == 3 for row in range(9)]


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads: int) -> None:
    x, weight = noise(300, 96), noise(96)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = layer_norm(x, weight, None, EPS)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(whole, torch.cat([layer_norm(row, weight, None, EPS) for row in x.split(1)]))


def test_what_is_left_to_torch() -> None:
    x, weight = noise(3, 8), noise(8)
    for arguments in ((x.float(), weight.float(), None), (noise(8, 3).T, weight, None), (x[:0], weight, weight)):
        expected = torch.nn.functional.layer_norm(arguments[0], (8,), arguments[1], arguments[2], EPS)
        assert torch.equal(layer_norm(*arguments, EPS), expected)
    with pytest.raises(RuntimeError):
        layer_norm(x, noise(9), None, EPS)
