"""The likeliest allowed token in C, against looking at one after the other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from h2o_flexgen.kernels.layers import largest, likeliest, takes_scores
from h2o_flexgen.kernels.native import library
from tests.seeds import torch_generator

pytestmark = pytest.mark.skipif(library() is None, reason="there are no native kernels here")


def bits_of(allowed: list[bool]) -> torch.Tensor:
    """As xgrammar has them; bits of tokens that are not there are set."""
    padded = np.array([*allowed, *[True] * (-len(allowed) % 32)], dtype=np.bool_)
    return torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int32).copy())


def slowly(scores: list[float], allowed: list[bool]) -> int:
    best = -1
    for token, score in enumerate(scores):
        if allowed[token] and score > (scores[best] if best >= 0 else -math.inf):
            best = token
    return best


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 33, 300, 4096, 4097, 8192 + 5])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 0.5, 1.0])
def test_the_likeliest_of_those_allowed(size: int, share: float) -> None:
    draw = torch_generator(size)
    for levels in (3, 1000):
        scores = torch.randint(-levels, levels, (size,), generator=draw).float()
        allowed = (torch.rand(size, generator=draw) < share).tolist()
        assert likeliest(scores, bits_of(allowed)) == slowly(scores.tolist(), allowed)


@pytest.mark.parametrize("size", [40, 5000])
def test_what_is_minus_infinity_is_no_token(size: int) -> None:
    scores = torch.full((size,), -math.inf)
    assert likeliest(scores, bits_of([True] * size)) == -1
    scores[size - 1] = -1e30
    assert likeliest(scores, bits_of([True] * size)) == size - 1
    assert likeliest(scores, bits_of([True] * (size - 1) + [False])) == -1


def test_rows_of_a_larger_tensor() -> None:
    logits = torch.randn(3, 1000, generator=torch_generator(1))[:, :777]
    assert takes_scores(logits)
    assert not takes_scores(logits.bfloat16())
    assert not takes_scores(logits.T)
    for row in logits:
        assert likeliest(row, bits_of([True] * 777)) == int(row.argmax())


@pytest.mark.parametrize("size", [1, 15, 16, 33, 4097, 8192 + 5])
def test_the_largest_of_each_row_as_torch_finds_it(size: int) -> None:
    draw = torch_generator(size)
    scores = torch.randint(-3, 3, (7, size + 3), generator=draw).float()[:, :size]
    scores[1], scores[2, size // 2], scores[3, size - 1], scores[4, 0] = -math.inf, math.inf, math.nan, -math.inf
    scores[5, size // 3 :] = math.nan
    for found, wanted in zip(largest(scores), torch.max(scores, dim=-1), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
