"""RMSNorm and the middle of a gated MLP in C against float64, and what is left to torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels import layers
from h2o_flexgen.kernels.layers import ACTIVATIONS, gated, rms_norm
from h2o_flexgen.kernels.native import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

HALF_A_UNIT = 2.0**-8  # of bfloat16's last place
EPS = 1e-5


def noise(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


@pytest.fixture
def native_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left to torch would pass every comparison: there is nothing to leave it to."""
    monkeypatch.setattr(layers, "_rms_norm_by_torch", None)
    monkeypatch.setattr(layers, "ACTIVATIONS", {})


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 64, 100, 768, 2049])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_the_norm(n: int, offset: float) -> None:
    for shape in ((1, n), (7, n), (130, n), (5, 3, n)):
        x, weight = noise(*shape), noise(n)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
        for w in (None, weight):
            y = rms_norm(x, w, EPS, offset)
            expected = exact if w is None else exact * (w.double() + offset)
            assert y.dtype is torch.bfloat16
            assert y.shape == x.shape
            # Rounded once more before the weight where there is no offset to it.
            units = 2 if w is not None and not offset else 1
            assert ((y.double() - expected).abs() <= 1.01 * units * HALF_A_UNIT * expected.abs() + 1e-6).all()


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_is_the_product(activation: str) -> None:
    for rows, n in ((1, 1), (1, 17), (3, 100), (70, 768)):
        both = 3 * noise(rows, 2 * n)
        up, gate = both.chunk(2, dim=-1)  # rows apart, as a fused projection leaves them
        expected = ACTIVATIONS[activation](gate.double()) * up.double()
        there = up.clone()
        y = gated(gate, up, activation)
        assert y.data_ptr() == gate.data_ptr()
        assert torch.equal(up, there)
        # The activation is rounded, and so is the product; GELU's two terms nearly cancel far below zero.
        assert ((y.double() - expected).abs() <= 2.05 * HALF_A_UNIT * expected.abs() + 1e-6 * up.double().abs()).all()


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_extremes(activation: str) -> None:
    gate = torch.tensor([[0.0, 100.0, 3e38, float("inf"), float("nan"), -100.0]]).to(torch.bfloat16)
    y = gated(gate, torch.ones_like(gate), activation)[0]
    assert y[:2].tolist() == [0.0, 100.0]
    assert y[2] > 1e38 or activation == "gelu_tanh"
    assert torch.equal(y[3:5].isfinite(), torch.tensor([False, False]))
    assert abs(y[5]) < 1e-30


def test_threads_change_nothing() -> None:
    x, weight, up = noise(300, 96), noise(96), noise(300, 96)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append((rms_norm(x, weight, EPS), gated(x.clone(), up, "silu")))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_what_is_left_to_torch() -> None:
    x, up = noise(3, 8), noise(3, 8)
    assert torch.equal(rms_norm(x.float(), None, EPS), layers._rms_norm_by_torch(x.float(), None, EPS))
    assert torch.equal(gated(x.clone(), up, "gelu"), ACTIVATIONS["gelu"](x.clone()) * up)
    assert torch.equal(gated(x.float(), up.float(), "silu"), ACTIVATIONS["silu"](x.float()) * up)
    with pytest.raises(RuntimeError):
        gated(x, noise(3, 9), "silu")
