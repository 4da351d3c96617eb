"""Products with packed matrices by Triton, beside the numbers that the matrices stand for."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.kernels import layers
from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.kernels.triton_linear import packed_linear
from tests.kernels.test_packed_weights import PACKINGS, id_of, random_weight
from tests.seeds import torch_generator


def on_device(weight: PackedWeight) -> PackedWeight:
    parts = {name: part.to(DEVICE) for name, part in weight.parts.items()}
    return PackedWeight(weight.packing, weight.shape, parts, weight.dtype)


def check(packing: Packing, shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    random, unit = torch_generator(), 2**-7 if dtype is torch.bfloat16 else 2**-20  # the interpreter cuts bfloat16 off
    weight = random_weight(packing, shape, dtype)
    x = torch.randn(rows, 2 * shape[1], generator=random).to(dtype)[:, : shape[1]]
    bias, onto = (torch.randn(size, generator=random).to(dtype) for size in (shape[:1], (rows, shape[0])))
    numbers = weight.in_order(torch.float32).double()
    exact, size = x.double() @ numbers.t(), x.double().abs() @ numbers.abs().t() + 1
    place, there = on_device(weight), x.to(DEVICE)
    y = torch.empty(rows, shape[0], dtype=torch.float32, device=DEVICE)
    found = packed_linear(there, place, bias.to(DEVICE), y, relu=True)
    assert found is y
    assert ((found.cpu().double() - (exact + bias.double()).relu()).abs() <= unit * size).all()
    found = packed_linear(there, place, None, onto.clone().to(DEVICE), add=True)
    wanted = onto.double() + exact
    assert ((found.cpu().double() - wanted).abs() <= 2 * unit * (size + onto.double().abs())).all()


@pytest.mark.turns
@pytest.mark.parametrize("packing", PACKINGS, ids=id_of)
def test_products(packing: Packing) -> None:
    """Rows that end within a tile, a group, a super-block."""
    check(packing, (34, 288), 2, torch.bfloat16)


@pytest.mark.parametrize("rows", [17, 70])
def test_more_rows(rows: int) -> None:
    """Larger tiles, and more than one."""
    check(PACKINGS[1], (70, 64), rows, torch.float32)


def test_what_is_no_number_and_no_rows() -> None:
    weight = random_weight(PACKINGS[-1], (2, 32))
    weight.parts["codes"][1, 3] = 127
    place = on_device(weight)
    found = packed_linear(torch.ones(1, 32, device=DEVICE), place, None, torch.empty(1, 2, device=DEVICE))
    assert found.isnan().tolist() == [[False, True]]
    assert packed_linear(torch.ones(0, 32, device=DEVICE), place, None, torch.empty(0, 2, device=DEVICE)).numel() == 0


def test_linear_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton serves a device: whatever is asked of the product, and with permuted inputs."""
    weight = random_weight(next(each for each in PACKINGS if each.ordered), (9, 144))
    place, x = on_device(weight), torch.randn(3, 144, generator=torch_generator())
    wanted = x.double() @ weight.expanded().double().t()
    monkeypatch.setattr(layers, "serves", lambda device: True)
    monkeypatch.setattr(PackedWeight, "in_order", None)  # nothing is expanded
    for kind in ({}, {"wide": True}, {"relu": True}, {"onto": torch.ones(3, 9, device=DEVICE)}):
        found = linear(x.to(DEVICE), place, **kind).cpu().double()
        expected = wanted.relu() if "relu" in kind else wanted + 1 if "onto" in kind else wanted
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
