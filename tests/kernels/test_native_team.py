"""The team of threads behind the native kernels: callers at the same time, more of them than it serves, and forks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from h2o_flexgen.kernels import layers
from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.kernels.native import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

CALLERS = 20  # more than the team has places for
SIZES = [(1, 768, 64), (9, 64, 2048), (70, 256, 300), (200, 130, 64)]  # rows, outs, ins


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)  # on any number of cores
    yield
    torch.set_num_threads(before)


@pytest.fixture
def native_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.F, "linear", None)
    monkeypatch.setattr(layers, "MOST_ROWS", 1 << 62)  # also where a matrix unit would take many rows to torch


def whole(rows: int, outs: int, ins: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and their product, of small whole numbers: exact in float32, whatever the order."""
    x, weight = (torch.randint(-2, 3, size).float() for size in ((rows, ins), (outs, ins)))
    return x.bfloat16(), weight.bfloat16(), x @ weight.T


@pytest.mark.usefixtures("native_only")
def test_callers_at_the_same_time_get_their_own() -> None:
    cases = [whole(*SIZES[i % len(SIZES)]) for i in range(CALLERS)]

    def call(index: int) -> bool:
        torch.set_num_threads(4)  # it is each thread's own
        x, weight, expected = cases[index]
        return all(torch.equal(linear(x, weight, wide=True), expected) for _ in range(40))

    with ThreadPoolExecutor(CALLERS) as pool:
        assert all(pool.map(call, range(CALLERS)))


@pytest.mark.usefixtures("native_only")
def test_many_short_calls_in_turn_with_long_ones() -> None:
    short, long = whole(1, 768, 256), whole(130, 768, 256)
    for i in range(400):
        x, weight, expected = long if i % 50 == 0 else short
        assert torch.equal(linear(x, weight, wide=True), expected)


@pytest.mark.usefixtures("native_only")
def test_a_forked_child_has_a_team_of_its_own() -> None:
    x, weight, expected = whole(9, 768, 256)
    assert torch.equal(linear(x, weight, wide=True), expected)  # helpers are there, but not in the child
    child = os.fork()
    if child == 0:
        os._exit(0 if all(torch.equal(linear(x, weight, wide=True), expected) for _ in range(20)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(linear(x, weight, wide=True), expected)
