"""Tokens drawn and log-probabilities in C, against transformers' processors and a sum over the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from h2o_flexgen.kernels.layers import SOME_OF_EQUAL, drawn, logprobs, takes_scores
from h2o_flexgen.kernels.native import library
from tests.kernels.test_native_likeliest import bits_of
from tests.seeds import torch_generator

pytestmark = pytest.mark.skipif(library() is None, reason="there are no native kernels here")

ALL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Shares that no whole number of equal scores has: rounding would decide.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 1},
    {"top_k": 7},
    {"top_k": 50, "top_p": 0.9137},
    {"top_k": 3000, "temperature": 0.7},
    {"top_p": 0.0},
    {"top_p": 0.5219, "temperature": 1.7},
    {"top_p": 0.9531},
    {"top_p": 0.999, "min_p": 0.001},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.6073, "min_p": 0.2},
]


def shares(scores: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """The probabilities that transformers leaves, (n, vocab) float64."""
    made = {**ALL, **settings}
    left = TemperatureLogitsWarper(float(made["temperature"]))(None, scores)
    if 0 < made["top_k"] < scores.shape[1]:
        left = TopKLogitsWarper(made["top_k"])(None, left)
    if made["top_p"] < 1:
        ordered, order = left.sort(stable=True)
        tail = ordered.softmax(-1).cumsum(-1) <= 1 - made["top_p"]
        tail[:, -1] = False
        left = left.masked_fill(tail.scatter(1, order, tail), -math.inf)
        assert settings.get("top_k") or torch.equal(left.isfinite().sum(-1), counted(scores, made))
    if made["min_p"] > 0:
        left = MinPLogitsWarper(made["min_p"])(None, left)
    return left.double().softmax(-1)


def counted(scores: torch.Tensor, made: dict[str, Any]) -> torch.Tensor:
    """How many tokens transformers leaves by temperature and top_p."""
    warm = TemperatureLogitsWarper(float(made["temperature"]))(None, scores)
    return TopPLogitsWarper(made["top_p"])(None, warm).isfinite().sum(-1)


def takes_all_equal(scores: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Whether of equal scores all are left or none is, (n,)."""
    least = scores.masked_fill(left == 0, math.inf).amin(-1, keepdim=True)
    return ((scores == least) == ((scores == least) & (left > 0))).all(-1)


def check(scores: torch.Tensor, settings: dict[str, Any], numbers: torch.Tensor) -> None:
    """Each token is allowed, and where its number says, but for rounding of sums in float32."""
    before = scores.clone()
    tokens = drawn(scores, range(len(scores)), numbers, [None] * len(numbers), **{**ALL, **settings})
    assert torch.equal(scores, before)
    left = shares(scores, settings)
    known = tokens != SOME_OF_EQUAL
    assert known.all() or not takes_all_equal(scores, left)[~known].any()
    tokens, left, numbers = tokens[known], left[known], numbers[known]
    reached = left.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    own = left.gather(1, tokens[:, None])[:, 0]
    assert (own > 0).all(), "a token that is not allowed"
    assert (numbers < reached + 1e-4).all()
    assert (numbers > reached - own - 1e-4).all()


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 255, 256, 257, 4097, 50_000])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_drawn_from_what_transformers_leaves(size: int, settings: dict[str, Any]) -> None:
    draw = torch_generator(size)
    numbers = torch.rand(9, dtype=torch.float64, generator=draw)
    numbers[0], numbers[1] = 0, math.nextafter(1, 0)
    scores = torch.randn(9, size + 3, generator=draw)[:, :size] * 4
    check(scores, settings, numbers)
    scores[3:, size // 2 :] = -math.inf  # as a grammar has it
    scores[:, 0] = 1.0
    check(scores, settings, numbers)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equal_scores(settings: dict[str, Any]) -> None:
    """Of which all stay, none, or none is drawn."""
    draw = torch_generator(1)
    for size in (5, 40, 700):
        numbers = torch.rand(30, dtype=torch.float64, generator=draw)
        check(torch.randint(-3, 3, (30, size), generator=draw).float(), settings, numbers)
        check(torch.zeros(30, size), settings, numbers)


def test_scores_in_any_order_and_a_vocabulary_of_each_size() -> None:
    numbers = torch.linspace(0, 0.999, 4, dtype=torch.float64)
    for size in range(1, 70):
        for scores in (torch.arange(size).float(), -torch.arange(size).float()):
            check(scores.expand(4, -1), {"top_k": 3, "top_p": 0.7031}, numbers)
            check(scores.expand(4, -1) / 9, {"top_p": 0.7031}, numbers)


def test_rows_without_a_finite_score_have_no_token() -> None:
    scores = (torch.arange(900) % 301).float().view(3, 300) / 20
    scores[1] = -math.inf
    assert takes_scores(scores)
    for settings in SETTINGS:
        tokens = drawn(scores, range(3), torch.zeros(3, dtype=torch.float64), [None] * 3, **{**ALL, **settings})
        assert tokens[1] == -1, settings
        assert tokens[0] >= 0, settings


def test_some_of_the_rows() -> None:
    scores, numbers = torch.randn(5, 300, generator=torch_generator(2)) * 4, torch.rand(3, dtype=torch.float64)
    found = drawn(scores, [0, 3, 4], numbers, [None] * len(numbers), **ALL)
    assert torch.equal(found, drawn(scores[[0, 3, 4]], range(3), numbers, [None] * len(numbers), **ALL))


@pytest.mark.parametrize("size", [1, 15, 17, 255, 257, 4097, 50_000])
def test_log_probabilities_and_the_likeliest_tokens(size: int) -> None:
    scores = torch.randn(6, size, generator=torch_generator(size)) * 4
    scores[2, size // 2 :] -= 200
    rows, tokens = [0, 2, 5], [size - 1, 0, size // 3]
    wanted = scores[rows].double().log_softmax(-1)
    for count in (0, 1, 5, 20):
        found, places = logprobs(scores, rows, tokens, count := min(count, size))
        best = wanted.topk(count)
        torch.testing.assert_close(found[:, 0].double(), wanted[range(3), tokens], rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(found[:, 1:].double(), best.values, rtol=1e-6, atol=2e-6)
        assert torch.equal(places, best.indices)


def test_of_equal_scores_the_first_ones_are_the_likeliest() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0] * 60])
    found, places = logprobs(scores, [0], [0], 4)
    assert places.tolist() == [[1, 2, 4, 7]]
    assert (found[0, 1:] == found[0, 1]).all()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_that_a_grammar_does_not_allow_are_not_drawn(settings: dict[str, Any]) -> None:
    draw = torch_generator(3)
    for size in (1, 31, 33, 5000):
        scores, numbers = torch.randn(4, size, generator=draw) * 4, torch.rand(4, dtype=torch.float64, generator=draw)
        allowed = torch.rand(4, size, generator=draw) < 0.3
        allowed[:, size // 2] = True
        masks = [None, *(bits_of(row.tolist()) for row in allowed[1:])]
        barred = scores.masked_fill(~allowed, -math.inf)
        barred[0] = scores[0]
        wanted = drawn(barred, range(4), numbers, [None] * 4, **{**ALL, **settings})
        assert torch.equal(drawn(scores, range(4), numbers, masks, **{**ALL, **settings}), wanted)


def test_settings_and_numbers_at_their_limits() -> None:
    numbers = torch.tensor([0, 0.5, math.nextafter(1, 0)], dtype=torch.float64)
    scores = torch.randn(1, 5000, generator=torch_generator(4)).expand(3, -1) * 4
    check(scores, {"top_k": 1 << 60}, numbers)
    check(scores, {"top_k": 4999}, numbers)
    last = scores.clone()
    last[:, 700:] = -math.inf
    assert drawn(last, range(3), numbers, [None] * 3, **ALL).tolist()[2] == 699
    equal = torch.zeros(3, 5000)
    assert drawn(equal, range(3), numbers, [None] * 3, **{**ALL, "top_p": 0.0}).tolist() == [SOME_OF_EQUAL] * 3
