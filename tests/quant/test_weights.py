"""Weights packed while loading: the codes are the nearest, and the search is never worse than the range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.quant import weights
from tests.cache.conftest import needs_native
from tests.seeds import torch_generator

SHAPES = [(7, 64), (5, 160), (3, 1024), (2, 50)]


def packed(x: torch.Tensor, packing: Packing, **how: Any) -> PackedWeight:
    made = PackedWeight.empty(packing, tuple(x.shape))
    weights.pack(x, made, **how)
    return made


def errors(x: torch.Tensor, made: PackedWeight, group: int) -> torch.Tensor:
    """Squared error per group."""
    off = (made.expanded() - x).double().square()
    return torch.nn.functional.pad(off, (0, -x.shape[1] % group)).unflatten(1, (-1, group)).sum(-1)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_four_bits(shape: tuple[int, int], group: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(weights, "library", lambda: None)
    x = torch.randn(shape, generator=torch_generator()) ** 3  # some outliers
    packing = Packing("uint4", group)
    made = packed(x, packing)
    scale, low = (made.parts[name].float().repeat_interleave(group, 1)[:, : shape[1]] for name in ("scale", "low"))
    levels = torch.stack([low + code * scale for code in range(16)], -1)
    best = (levels - x.unsqueeze(-1)).abs().amin(-1)
    torch.testing.assert_close((made.expanded() - x).abs(), best, rtol=1e-3, atol=1e-5)
    plain = packed(x, packing, search=False)
    assert (errors(x, made, group) <= errors(x, plain, group) * 1.001 + 1e-9).all()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_eight_bits(shape: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(weights, "library", lambda: None)
    x = torch.randn(shape, generator=torch_generator()).bfloat16()
    made = packed(x, Packing("int8", 64, low="none"))
    most = x.float().abs().amax(1, keepdim=True) / 127
    assert ((made.expanded() - x.float()).abs() <= 0.51 * most + 127 * most * 2**-8).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_groups_are_exact(bits: int) -> None:
    packing = Packing("uint4", 32) if bits == 4 else Packing("int8", 32, low="none")
    for value in (0.0, 0.5, -2.0):
        x = torch.full((2, 64), value)
        torch.testing.assert_close(packed(x, packing).expanded(), x, rtol=2**-8, atol=0.0)


@needs_native  # torch takes the range as it is
def test_errors_count_by_the_weights_of_their_inputs() -> None:
    x = torch.randn(6, 160, generator=torch_generator()) ** 3
    weight = torch.rand(160, generator=torch_generator(1)) ** 4
    packing = Packing("uint4", 64)
    plain, weighed = packed(x, packing), packed(x, packing, weight=weight)

    def counted(made: PackedWeight) -> torch.Tensor:
        return (weight * (made.expanded() - x).square()).sum()

    assert counted(weighed) < 0.9 * counted(plain)
    assert torch.equal(packed(x, packing, weight=torch.full((160,), 3.0)).expanded(), plain.expanded())


@needs_native  # torch takes the range as it is
def test_inputs_that_are_never_there_do_not_count() -> None:
    x = torch.arange(16.0).repeat(2, 2)
    x[:, 5] = 1000.0
    weight = torch.ones(32)
    weight[5] = 0
    made = packed(x, Packing("uint4", 32), weight=weight)
    keep = weight.bool()
    assert (made.expanded() - x)[:, keep].abs().max() < 0.6  # with the outlier a step would be 67
    nothing = packed(x, Packing("uint4", 32), weight=torch.zeros(32)).expanded()
    assert nothing.isfinite().all()
