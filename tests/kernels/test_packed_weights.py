"""Packed matrices: expanded, looked up and multiplied, beside the layout's definition written out in loops."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache

import gguf
import pytest
import torch

from h2o_flexgen.config.model.packing import LEVELS, SUPER, Packing
from h2o_flexgen.kernels import layers
from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.kernels.native import function
from h2o_flexgen.kernels.packed import PackedWeight, look_up, scales_and_lows
from tests.seeds import torch_generator

PACKINGS = [
    Packing("uint4", 64, "bfloat16", "bfloat16"),
    Packing("uint4", 32, "float16", "middle"),
    Packing("uint4", 128, "float16", "zero"),
    Packing("uint4", 128, "bfloat16", "zero", ordered=True),
    Packing("uint4", 32, "super", "super"),
    Packing("uint4", 0, "float32", "middle"),
    Packing("uint4", 16, "float16", "float16"),
    Packing("e2m1", 32, "e8m0", "none"),
    Packing("e2m1", 16, "e4m3", "none"),
    Packing("uint4", 16, "super", "middle"),
    Packing("iq4", 32, "super", "none"),
    Packing("iq3", 32, "super", "none"),
    Packing("iq3s", 32, "super", "none"),
    Packing("iq2", 16, "super", "none"),
    Packing("iq2", 32, "super", "none"),
    Packing("nf4", 64, "float32", "none"),
    Packing("fp4", 64, "float32", "none"),
    Packing("int8", 32, "float16", "none"),
    Packing("int8", 16, "super", "none"),
    Packing("int8", 64, "bfloat16", "bfloat16"),
    Packing("int8", 32, "super", "super"),
    Packing("int8", 0, "float32", "zero"),
    Packing("int8", 16, "super", "bfloat16"),
    Packing("uint4", 16, "super", "zero"),
    Packing("e4m3", 128, "float32", "none"),
    Packing("e4m3", 0, "bfloat16", "none"),
]
EVERY = [*range(1, 21), 31, 32, 33, 63, 64, 65, 127, 128, 129]  # rows
SHAPES = [(5, 32), (9, 416), (70, 640)]
SIZES = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "iq3": [1, 3, 5, 7, 9, 11, 13, 15.5],
    "iq3s": [1, 3, 5, 7, 9, 11, 13, 15],
    "iq2": [1 / 8, 7 / 8, 1, 9 / 8, 25 / 8, 43 / 8, 0, 0],
}
IQ4 = gguf.quants.IQ4_NL.kvalues
WHOLE_STEPS = {"nf4": 112, "fp4": 120}
"""Of levels that are no whole numbers times one: they are multiplied as those that differ least."""


def random_weight(packing: Packing, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> PackedWeight:
    weight, random = PackedWeight.empty(packing, shape, dtype), torch_generator()
    for name, part in weight.parts.items():
        if name == "order":
            part.copy_(torch.randperm(shape[1], generator=random))
        elif part.dtype.is_floating_point:
            part.copy_(torch.rand(part.shape, generator=random) * 0.1 + (0.01 if "scale" in name else -0.05))
        elif packing.scale == "e8m0" and name == "scale":
            part.copy_(torch.randint(120, 130, part.shape, generator=random))
        else:
            low, high = (
                (-128, 128) if part.dtype == torch.int8 else (-20, 20) if part.dtype == torch.int16 else (0, 256)
            )
            part.copy_(torch.randint(low, high, part.shape, generator=random))
    for name, kind in (("codes", packing.levels), ("scale", packing.scale)):
        if kind == "e4m3":
            codes = weight.parts[name]
            codes[(codes & 127) == 127] = 3  # not a number
    return weight


def meaning(weight: PackedWeight) -> torch.Tensor:
    """`Packing`'s docstring, number by number, in float64."""
    packing, (outs, ins) = weight.packing, weight.shape
    parts = {
        name: part.double().tolist() if part.is_floating_point() else part.tolist()
        for name, part in weight.parts.items()
    }
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    found = [[0.0] * ins for _ in range(outs)]
    for out, i in itertools.product(range(outs), range(ins)):
        group, block = i // packing.group if packing.group else 0, i // SUPER
        byte = parts["codes"][out][i // 2 if packing.bits == 4 else i]
        code = (byte >> 4 if i % 2 else byte & 15) if packing.bits == 4 else byte
        if packing.levels in SIZES:
            level = SIZES[packing.levels][code & 7] * (-1 if code & 8 else 1)
        elif packing.levels == "iq4":
            level = IQ4[code]
        elif packing.levels in WHOLE_STEPS:
            level = LEVELS[packing.levels][code]
        else:
            level = {"uint4": code, "int8": code - 256 if code > 127 else code, "e4m3": floats[code]}[packing.levels]
        scale = parts["scale"][out][group]
        if packing.scale == "e8m0":
            scale = 2.0 ** (scale - 127)
        if packing.scale == "e4m3":
            scale = floats[scale] * parts["super_scale"][out][0]
        if packing.scale == "super":
            scale *= parts["super_scale"][out][block]
        if packing.low == "none":
            low = 0.0
        elif packing.low == "middle":
            low = -8 * scale
        elif packing.low == "zero":
            low = -parts["low"][out][group] * scale
        elif packing.low == "super":
            low = -parts["low"][out][group] * parts["super_low"][out][block]
        else:
            low = parts["low"][out][group]
        found[out][parts["order"][i] if packing.ordered else i] = level * scale + low
    return torch.tensor(found, dtype=torch.float64)


@cache
def meaning_of_random(packing: Packing, shape: tuple[int, int]) -> torch.Tensor:
    """Slow, and the same for all ways to expand it."""
    return meaning(random_weight(packing, shape))


def multiplied(weight: PackedWeight) -> torch.Tensor:
    """Its numbers as products take them: (ins, outs) float64, inputs in the order of the codes."""
    steps = WHOLE_STEPS.get(weight.packing.levels)
    if steps is None or not weight.whole:
        return weight.in_order(torch.float32).double().t()
    levels = torch.tensor(LEVELS[weight.packing.levels]).mul(steps).round().div(steps)
    codes, scale = weight.parts["codes"].long(), scales_and_lows(weight.packing, weight.parts)[0]
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return (levels[pairs] * scale.repeat_interleave(weight.packing.group, -1)[:, : weight.shape[1]]).double().t()


def id_of(packing: Packing) -> str:
    return "-".join(map(str, (packing.levels, packing.group, packing.scale, packing.low)))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("packing", PACKINGS, ids=id_of)
def test_what_a_packed_matrix_stands_for(packing: Packing, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("h2o_flexgen.kernels.packed.library", lambda: None)
    for shape in SHAPES[: 3 if native else 2]:
        weight = random_weight(packing, shape)
        wanted = meaning_of_random(packing, shape)
        torch.testing.assert_close(weight.expanded().double(), wanted, rtol=3e-6, atol=2e-6)
        rounded = weight.expanded(torch.bfloat16).double()
        assert (rounded - wanted).abs().le(wanted.abs() * 2**-8 + 2e-6).all()
        chosen = torch.tensor([shape[0] - 1, 0, 2, 2])
        assert torch.equal(look_up(weight, chosen), weight.expanded()[chosen])
        assert torch.equal(weight.rows(1, 4).expanded(), weight.expanded()[1:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packing", PACKINGS, ids=id_of)
def test_products(packing: Packing, dtype: torch.dtype) -> None:
    """Each number of rows takes another way: one tile, several, blocks, panels."""
    random = torch_generator()
    unit = 2**-8 if dtype is torch.bfloat16 else 2**-20
    for shape in SHAPES:
        weight = random_weight(packing, shape, dtype)
        values = multiplied(weight) if dtype is torch.bfloat16 else weight.in_order(torch.float32).double().t()
        for rows in (1, 2, 3, 5, 33, 70, 401):
            x, bias = (
                torch.randn(rows, shape[1], generator=random).to(dtype),
                torch.randn(shape[0], generator=random).to(dtype),
            )
            taken = (x if weight.order is None else x[:, weight.order]).double()
            exact, size = taken @ values, taken.abs() @ values.abs() + 1
            found = linear(x, weight, bias, wide=True)
            assert ((found.double() - exact - bias.double()).abs() <= 4 * unit * size).all()
            onto = torch.randn(rows, shape[0], generator=random).to(dtype)
            wanted = onto.double() + exact
            added = linear(x, weight, onto=onto.clone()).double()
            assert ((added - wanted).abs() <= 4 * unit * (size + onto.double().abs())).all()
            assert (linear(x, weight, bias, relu=True) >= 0).all()


@pytest.mark.parametrize("packing", PACKINGS[::3], ids=id_of)
def test_exact_products_are_those_of_the_numbers(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, in C: none is left to torch, and no row depends on its neighbours."""
    random = torch_generator()
    for outs, ins in [(23, 96), (50, 416), (13, 1056)]:
        weight = random_weight(packing, (outs, ins))
        if weight.place is None:
            pytest.skip("no kernel takes it")
        values = weight.expanded().double()
        with monkeypatch.context() as patch:
            patch.setattr(layers.F, "linear", None)
            x = torch.randn(129, 2 * ins, generator=random)[:, ins:]
            bias = torch.randn(outs, generator=random)
            found = linear(x, weight, bias)
            for rows in EVERY:
                assert torch.equal(linear(x[:rows], weight, bias), found[:rows])
            assert torch.equal(linear(x, weight, bias, relu=True), found.relu())
            assert torch.equal(linear(x, weight, bias, onto=found.clone()), found + found)
        size = x.double().abs() @ values.abs().t() + 1
        assert ((found.double() - bias.double() - x.double() @ values.t()).abs() <= 2**-20 * size).all()


def test_rows_of_x_that_are_not_contiguous() -> None:
    weight = random_weight(PACKINGS[0], (70, 256), torch.bfloat16)
    wide = torch.randn(6, 512, generator=torch_generator()).bfloat16()
    assert torch.equal(linear(wide[:, 256:], weight), linear(wide[:, 256:].contiguous(), weight))


def rounded_in_spans(x: torch.Tensor, span: int) -> torch.Tensor:
    """x (rows, ins) as `whole.c` takes it: each `span` neighbours in 127 steps of the largest, up to either side."""
    rows, ins = x.shape
    parts = torch.nn.functional.pad(x.float(), (0, -ins % span)).view(rows, -1, span)
    top = parts.abs().amax(-1, keepdim=True)
    steps = (parts * torch.where(top > 0, torch.full_like(top, 127) / top, 0)).round()
    return (steps.double() * (top / 127).double()).view(rows, -1)[:, :ins]


@pytest.mark.parametrize("packing", [each for each in PACKINGS if each.levels != "e4m3"], ids=id_of)
def test_whole_numbers(packing: Packing) -> None:
    """A few rows, and many, against the same rounding by torch: all that is left is the order of sums."""
    random = torch_generator()
    for outs, ins in [(70, 256), (3, 96), (130, 640), (150, 2048), (64, 8192)]:
        weight = random_weight(packing, (outs, ins), torch.bfloat16)
        if not weight.whole:
            pytest.skip("this processor has no instructions for whole numbers")
        span = function("span_of", "P", "i")(ctypes.byref(weight.place))
        values = multiplied(weight)
        sizes = values.abs()
        for rows in EVERY if ins == 96 else (1, 2, 3, 4, 5, 7, 515 if ins < 2048 else 130):
            x = torch.randn(rows, ins, generator=random).bfloat16()
            x[0, : ins // 2] = 0
            x[-1, 40:60] *= 100
            taken = x if weight.order is None else x[:, weight.order]
            taken = rounded_in_spans(taken, span)
            size = taken.abs() @ sizes + 1
            assert ((linear(x, weight, wide=True) - taken @ values).abs() <= 2e-5 * size).all()


@pytest.mark.parametrize("packing", [each for each in PACKINGS if each.levels != "e4m3"], ids=id_of)
def test_the_largest_numbers_of_all_have_room(packing: Packing) -> None:
    """All codes alike, and all of x in 127 steps: sums of products of 8 bits never get lost in 16."""
    shape = (20, 256)
    weight = random_weight(packing, shape, torch.bfloat16)
    if not weight.whole:
        pytest.skip("this processor has no instructions for whole numbers")
    scale, low = scales_and_lows(packing, weight.parts)
    for code in range(16) if packing.bits == 4 else (0, 1, 127, 128, 129, 255):
        weight.parts["codes"].fill_(code * 17 if packing.bits == 4 else code)
        values = multiplied(weight)
        for rows, sign in itertools.product((1, 4, 5, 9), (-1, 1)):
            x = torch.full((rows, shape[1]), 1.5 * sign).bfloat16()
            terms = 256 * scale.abs().max() + (0 if low is None else low.abs().max())  # which may all but cancel
            off = (linear(x, weight, wide=True) - x.double() @ values).abs().max()
            assert off <= 1e-5 * shape[1] * 1.5 * terms


def test_numbers_that_are_not_finite_stay_so() -> None:
    weight = random_weight(PACKINGS[0], (70, 256), torch.bfloat16)
    for rows in (2, 9):
        x = torch.randn(rows, 256, generator=torch_generator()).bfloat16()
        x[0, 3], x[1, 200] = float("nan"), float("inf")
        finite = linear(x, weight).isfinite()
        assert not finite[:2].any()
        assert finite[2:].all()


@pytest.mark.parametrize("at", [0, 130])
def test_fp8_weights_that_are_not_numbers_stay_so(at: int) -> None:
    """Among many inputs and among the last few, with few rows and many."""
    weight = random_weight(Packing("e4m3", 128, "float32", "none"), (20, 136), torch.bfloat16)
    weight.parts["codes"][3, at], weight.parts["codes"][7, at] = 0x7F, 0xFF
    for rows in (1, 5, 9):
        finite = linear(torch.randn(rows, 136, generator=torch_generator()).bfloat16(), weight).isfinite()
        assert not finite[:, [3, 7]].any()
        assert finite[:, [0, 6, 19]].all()


def test_all_ways_to_a_product_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the order of sums: the same rows by tiles, in parts, and by panels, all at once."""
    monkeypatch.setattr(PackedWeight, "whole", False)
    weight = random_weight(PACKINGS[1], (130, 640), torch.bfloat16)
    x = torch.randn(70, 640, generator=torch_generator()).bfloat16()
    few = torch.cat([linear(part, weight, wide=True) for part in x.split(10)])
    torch.testing.assert_close(linear(x, weight, wide=True), few, rtol=1e-2, atol=1e-2)
