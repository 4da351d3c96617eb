"""Products in C against products in float64, and what is left to torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.kernels import layers
from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.kernels.native.tiers import has_only_avx2
from tests.pairs import pairs

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ROWS = [*range(1, 21), 31, 32, 33, 63, 64, 65, 70]
OUTS = [1, 15, 16, 17, 768]
INS = [1, 2, 31, 32, 33, 64, 768, 2049]

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch computes with, and so the kernel."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def native_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that was left to torch would pass every comparison: it has none."""
    monkeypatch.setattr(layers.F, "linear", None)
    monkeypatch.setattr(layers, "MOST_ROWS", 1 << 62)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products were left to torch: as many as there are items."""
    found: list[int] = []
    original = F.linear
    monkeypatch.setattr(layers.F, "linear", lambda *args: (found.append(1), original(*args))[1])
    return found


def test_torch_has_the_many_rows_where_it_has_a_matrix_unit(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MOST_ROWS", 16)
    linear(noise(16, 64), noise(8, 64))
    assert not calls
    linear(noise(17, 64), noise(8, 64))
    assert calls == [1]


def noise(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def exactly(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64, and the same of absolute values."""
    x, weight = x.double(), weight.double().T
    return x @ weight, x.abs() @ weight.abs()


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_rows(y, exactly(x, weight), bias)


def check_rows(y: Tensor, product: tuple[Tensor, Tensor], bias: Tensor | None) -> None:
    """y is the first rows of the product: sums are as exact as float32 is at their size, bfloat16 results are the
    nearest to them."""
    exact, size = (each[: len(y)] for each in product)
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    nearest = 0 if y.dtype is torch.float32 else 2.0**-8 * exact.abs()  # half a unit in the last of 8 bits
    error = (y.double() - exact).abs() - nearest
    assert (error <= 1e-6 * size).all(), f"{tuple(y.shape)}: {(error / size).max():.1e} of the terms"


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize(("ins", "wide", "threads"), pairs(INS, [False, True], [1, 2]), indirect=["threads"])
def test_it_is_the_product(ins: int, wide: bool, threads: int) -> None:
    for outs in OUTS:
        weight, bias = noise(outs, ins), noise(outs)
        x = noise(max(ROWS), ins)
        product = exactly(x, weight)
        for rows in ROWS:
            for added in (None, bias):
                y = linear(x[:rows], weight, added, wide=wide)
                assert y.shape == (rows, outs)
                assert y.dtype is (torch.float32 if wide else torch.bfloat16)
                check_rows(y, product, added)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("rows", [127, 128, 129, 261, 1445, 3001])
def test_many_rows_are_cut_into_parts(rows: int, threads: int) -> None:
    x, weight, bias = noise(rows, 96), noise(101, 96), noise(101)
    check(linear(x, weight, bias, wide=True), x, weight, bias)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize(
    ("ins", "wide", "threads"),
    pairs([2, 30, 32, 34, 190, 192, 194, 770], [False, True], [1, 2]),
    indirect=["threads"],
)
def test_many_rows(ins: int, wide: bool, threads: int) -> None:
    for outs in (1, 16, 63, 64, 65, 200):
        weight, bias = noise(outs, ins), noise(outs)
        x = noise(301, ins)
        product = exactly(x, weight)
        for rows in (129, 132, 191, 192, 193, 301):
            check_rows(linear(x[:rows], weight, wide=wide), product, None)
            check_rows(linear(x[:rows], weight, bias, wide=wide), product, bias)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("rows", [1, 7, 33, 128, 131, 200])
@pytest.mark.parametrize("ins", [64, 98])
def test_relu_and_what_it_is_added_to(rows: int, ins: int, threads: int) -> None:
    """As in torch, from the same product: what is rounded first, and when, decides about the last bit."""
    x, weight, bias = noise(rows, ins), noise(75, ins), noise(75)
    x[-1], bias[3] = 0.0, NAN
    whole = noise(rows, 2 * 75)
    plain, sides = linear(x, weight, bias), whole.clone()
    cut = plain.clone().relu_()
    assert torch.equal(linear(x, weight, bias, relu=True).nan_to_num(7.0), cut.nan_to_num(7.0))
    for relu, y in ((False, plain), (True, cut)):
        onto = whole.clone()[:, 75:]
        assert linear(x, weight, bias, relu=relu, onto=onto) is onto
        assert torch.equal(onto.nan_to_num(7.0), (sides[:, 75:] + y).nan_to_num(7.0))
    half = whole[:, :75]
    linear(x, weight, bias, onto=half)
    assert torch.equal(whole[:, 75:], sides[:, 75:])


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("rows", [2, 5, 33, 130, 145])
def test_strides_and_odd_addresses(rows: int) -> None:
    """Rows apart, as in half of a wider tensor; weights in the middle of a file. What lies around is not read: nan."""
    around = torch.full((rows, 3 * 70), NAN, dtype=torch.bfloat16)
    x = around[:, 70:140]
    x.copy_(noise(rows, 70))
    file = torch.full((50 * 70 + 50 + 80,), NAN, dtype=torch.bfloat16)
    weight, bias = file[13 : 13 + 50 * 70].view(50, 70), file[13 + 50 * 70 + 7 :][:50]
    weight.copy_(noise(50, 70))
    bias.copy_(noise(50))
    assert not x.is_contiguous()
    check(linear(x, weight, bias), x, weight, bias)


def placed(x: Tensor, behind: int, stride: int) -> Tensor:
    """x at an address that is `behind` modulo 4 KiB, rows `stride` apart; around them is nan, which is not read."""
    file = torch.full((4096 + len(x) * stride,), NAN, dtype=torch.bfloat16)
    start = (behind - file.data_ptr()) % 4096 // 2
    rows = file[start : start + len(x) * stride].view(len(x), stride)[:, : x.shape[1]]
    return rows.copy_(x)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize(
    ("ins", "outs", "rows", "threads"),
    pairs([1024, 2048, 4096], [70, 1030], [1, 3, 9, 40], [1, 2]),
    indirect=["threads"],
)
def test_results_do_not_depend_on_where_numbers_lie(ins: int, outs: int, rows: int, threads: int) -> None:
    """Rows that compete with those of the weights for places in the first cache are copied: no number changes."""
    x, weight = noise(rows, ins), noise(outs, ins)
    y = linear(x, weight)
    check(y, x, weight, None)
    for weights_at in (0, 2, 2048, 4094):
        there = placed(weight, weights_at, ins)
        for behind in (0, 64, 1022, 1024, 2048, 3074, 4032):
            for stride in (ins, ins + 2048, ins + 6):
                assert torch.equal(linear(placed(x, weights_at + behind, stride), there), y), (weights_at, behind)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("ins", [40, 64])
@pytest.mark.parametrize("rows", [1, 6, 20, 130])
@pytest.mark.parametrize("wide", [False, True])
def test_inf_and_nan_stay_in_their_rows(ins: int, rows: int, wide: bool) -> None:
    x, weight, bias = noise(rows, ins), noise(30, ins), noise(30)
    for place in (0, ins - 1):
        x[0, place], weight[:, place] = INF, 2.0
        weight[3, place], weight[4, place], weight[5, place] = -1.0, 0.0, NAN
        y = linear(x, weight, bias, wide=wide)
        expected = torch.full((30,), INF)
        expected[3], expected[4], expected[5] = -INF, NAN, NAN
        torch.testing.assert_close(y[0].float(), expected, equal_nan=True)
        assert y[1:, 5].isnan().all()
        assert y[1:, [*range(5), *range(6, 30)]].isfinite().all()
        x[0, place], weight[:, place] = 1.0, 1.0


@pytest.mark.usefixtures("native_only")
def test_results_too_large_are_inf_and_ties_go_to_even() -> None:
    huge = torch.tensor([[3.3e38, 3.3e38]]).to(torch.bfloat16)
    assert linear(huge, torch.ones(1, 2).to(torch.bfloat16)).item() == INF
    x = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8]]).to(torch.bfloat16)  # halfway between two neighbours
    y = linear(x, torch.ones(1, 2).to(torch.bfloat16))
    assert y.flatten().tolist() == [1.0, 1.0 + 2.0**-6]


@pytest.mark.usefixtures("native_only")
def test_a_row_hardly_depends_on_how_many_go_together(threads: int) -> None:
    x, weight, bias = noise(70, 768), noise(100, 768), noise(100)
    whole = linear(x, weight, bias, wide=True)
    for rows in ROWS:
        torch.testing.assert_close(linear(x[:rows], weight, bias, wide=True), whole[:rows], atol=1e-4, rtol=1e-5)


def test_what_is_left_to_torch(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_WIDE_ROWS", 2)  # of float32 numbers
    x, weight, bias = noise(3, 64), noise(10, 64), noise(10)
    assert not linear(x, weight, bias).isnan().any()
    assert not calls
    others = [
        (x.float(), weight.float(), bias.float()),
        (noise(64, 3).T, weight, bias),
        (x, noise(64, 10).T, bias),
        (x[:0], weight, bias),
        (x.view(3, 1, 64), weight, bias),
        (x, weight, noise(20)[::2]),
        (noise(3, 0), noise(10, 0), bias),
    ]
    for count, arguments in enumerate(others, start=1):
        torch.testing.assert_close(linear(*arguments), _plain(*arguments))
        assert len(calls) == count
    onto = noise(3, 20)
    for each in (onto[:, ::2], onto[:, :10].float()):
        expected = each + _plain(x, weight, bias)
        torch.testing.assert_close(linear(x, weight, bias, onto=each), expected)
    assert len(calls) == len(others) + 2


@pytest.mark.skipif(not has_only_avx2(), reason="elsewhere torch has all of them")
def test_few_rows_of_float32_numbers_are_not_left_to_torch(calls: list[int]) -> None:
    for rows, left in ((1, 0), (32, 0), (33, 1)):
        linear(noise(rows, 64).float(), noise(8, 64).float())
        assert len(calls) == left


def _plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x.float() @ weight.float().T + bias.float()).to(x.dtype)


def test_shapes_that_do_not_fit_are_refused() -> None:
    for arguments in ((noise(2, 8), noise(4, 9)), (noise(2, 8), noise(4, 8), noise(5))):
        with pytest.raises(RuntimeError):
            linear(*arguments)


def test_without_native_kernels_it_is_torch(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr(layers, "library", lambda: None)
    x, weight = noise(2, 8), noise(4, 8)
    y = linear(x, weight, wide=True)
    assert len(calls) == 1
    assert y.dtype is torch.float32
    assert torch.equal(y, y.to(torch.bfloat16).float())
