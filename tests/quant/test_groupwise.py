"""Group-wise quantisation against the definition, number by number."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from h2o_flexgen.quant import Quantised, dequantise, quantise
from tests.pairs import pairs
from tests.seeds import torch_generator


class Form(NamedTuple):
    bits: int = 4
    group: int = 64


FORMATS = [Form(4), Form(8), Form(4, 16), Form(8, 128), Form(3)]


def by_hand(packed: Quantised, form: Form, size: int) -> list[list[Fraction]]:
    """What the bytes stand for by the documented layout, exactly."""
    rows = []
    for codes, scale, low in zip(*(part.flatten(0, -2).tolist() for part in packed), strict=True):
        row = []
        for i in range(size):
            if form.bits == 3:
                code = (codes[i // 4] >> 2 * (i % 4) & 3) + 4 * (codes[size // 4 + i // 8] >> i % 8 & 1)
            else:
                code = codes[i] if form.bits == 8 else codes[i // 2] >> 4 * (i % 2) & 15
            group = i // form.group
            row.append(Fraction(low[group]) + code * Fraction(scale[group]))
        rows.append(row)
    return rows


def numbers(kind: str, size: int) -> Tensor:
    x = torch.randn(2, 3, size, generator=torch_generator(size))
    return {"normal": x, "far": 1000 + x, "tiny": x * 1e-30, "positive": x.abs(), "huge": x * 1e30}[kind]


@pytest.mark.parametrize(
    ("form", "size", "kind"),
    pairs(FORMATS, [2, 16, 62, 64, 66, 200], ["normal", "far", "tiny", "positive", "huge"]),
    ids=str,
)
def test_every_number_comes_back_within_half_a_step(form: Form, size: int, kind: str) -> None:
    size = -(-size // 8) * 8 if form.bits == 3 else size
    x = numbers(kind, size)
    packed = quantise(x, *form)
    groups = -(-size // form.group)
    assert packed.codes.shape == (2, 3, size * form.bits // 8)
    assert packed.scale.shape == packed.low.shape == (2, 3, groups)
    assert packed.nbytes == 6 * (size * form.bits // 8 + 4 * groups)
    back = dequantise(packed, torch.float32, *form)
    for row, (exact, stored) in enumerate(zip(x.flatten(0, 1).tolist(), by_hand(packed, form, size), strict=True)):
        for i, (value, meant) in enumerate(zip(exact, stored, strict=True)):
            step = Fraction(packed.scale.flatten(0, 1)[row, i // form.group].item())
            rounding = Fraction(abs(value) + abs(float(meant))) / 2**22
            assert abs(Fraction(value) - meant) <= step / 2 + rounding
            assert back.flatten(0, 1)[row, i].item() == pytest.approx(float(meant), rel=1e-6, abs=0)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_step_is_hardly_wider_than_the_range_needs(form: Form) -> None:
    x = torch.randn(100, 64)
    groups = x.unflatten(-1, (-1, min(form.group, 64)))
    needed = (groups.amax(-1) - groups.amin(-1)) / (2**form.bits - 1)
    scale = quantise(x, *form).scale.float()
    assert (scale >= needed).all()
    assert (scale <= needed * 1.02).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, math.pi, -1e-20])
def test_equal_numbers(form: Form, value: float) -> None:
    x = torch.full((1, 72), value)
    back = dequantise(quantise(x, *form), torch.float32, *form)
    torch.testing.assert_close(back, x, rtol=2**-11, atol=0)


def test_numbers_on_the_grid_are_exact() -> None:
    x = torch.arange(16.0).repeat(4).view(1, 64) * 0.25 - 2
    assert torch.equal(dequantise(quantise(x), torch.float32), x)
    x = torch.arange(256.0).view(1, 256) * 0.5 - 64
    form = Form(8, 256)
    assert torch.equal(dequantise(quantise(x, *form), torch.float32, *form), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out(dtype: torch.dtype) -> None:
    x = torch.randn(3, 96).to(dtype)
    packed = quantise(x)
    assert torch.equal(packed.codes, quantise(x.float()).codes)
    assert torch.equal(dequantise(packed, dtype), dequantise(packed, torch.float32).to(dtype))


def test_a_view_that_is_not_contiguous() -> None:
    x = torch.randn(64, 5).t()
    for view, copy in zip(quantise(x), quantise(x.contiguous()), strict=True):
        assert torch.equal(view, copy)
        assert view.is_contiguous()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bits"):
        quantise(torch.randn(2, 16), 5)
    with pytest.raises(ValueError, match="12 numbers of 3 bits do not fill their last byte: needed a multiple of 8"):
        quantise(torch.randn(2, 12), 3)
    with pytest.raises(ValueError, match="groups of 48"):
        quantise(torch.randn(2, 16), 4, 48)
    with pytest.raises(ValueError, match="even count"):
        quantise(torch.randn(2, 7))
    with pytest.raises(ValueError, match="2 scales"):
        dequantise(quantise(torch.randn(2, 128)), torch.float32, 4, 128)
    assert quantise(torch.randn(2, 7), 8).codes.shape == (2, 7)
