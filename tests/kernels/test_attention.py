"""The fast kernels against the slow, obvious ones, and both against transformers' eager softmax by construction."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.kernels import torch_attention
from h2o_flexgen.kernels.types import KeysValues, Logits
from tests.oracles import attention as reference
from tests.pairs import pairs

BOTH = (torch_attention, reference)
SHAPES = [(1, 4, 4), (2, 4, 2), (3, 8, 1), (1, 6, 6)]


@pytest.mark.parametrize(("n", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 300])
def test_prefill_equals_the_reference(n: int, heads: int, kv_heads: int, length: int, monkeypatch) -> None:
    monkeypatch.setattr(torch_attention, "_CHUNK_ELEMENTS", 16 * heads * 64)  # several chunks also for short prompts
    q, k, v = torch.randn(n, heads, length, 8), torch.randn(n, kv_heads, length, 8), torch.randn(n, kv_heads, length, 8)
    fast, slow = (kernel.prefill_attention(q, k, v, Logits(0.3), True) for kernel in BOTH)
    torch.testing.assert_close(fast.out, slow.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast.column_sums, slow.column_sums, atol=1e-4, rtol=1e-4)
    assert torch_attention.prefill_attention(q, k, v, Logits(0.3), False).column_sums is None


@pytest.mark.parametrize(
    ("shape", "lengths", "window", "budget"),
    pairs(SHAPES, [(0, 40), (1, 1), (7, 40), (64, 3), (40, 64)], [None, 1, 5, 40, 1000], [1, 500, 1 << 20]),
    ids=str,
)
def test_prefill_after_a_past_and_within_a_window(
    shape: tuple[int, int, int], lengths: tuple[int, int], window: int | None, budget: int, monkeypatch
) -> None:
    (n, heads, kv_heads), (before, length) = shape, lengths
    monkeypatch.setattr(torch_attention, "_CHUNK_ELEMENTS", budget)
    q, k, v = torch.randn(n, heads, length, 8), torch.randn(n, kv_heads, length, 8), torch.randn(n, kv_heads, length, 8)
    past = KeysValues(*torch.randn(2, kv_heads, before, 8)) if before else None
    fast, slow = (kernel.prefill_attention(q, k, v, Logits(0.3), True, past=past, window=window) for kernel in BOTH)
    torch.testing.assert_close(fast.out, slow.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast.column_sums, slow.column_sums, atol=1e-4, rtol=1e-4)
    assert slow.column_sums.sum() == pytest.approx(n * kv_heads * length, rel=1e-4)


def test_a_prompt_in_two_parts_equals_the_whole() -> None:
    q, k, v = (torch.randn(1, 4, 50, 8) for _ in range(3))
    whole = torch_attention.prefill_attention(q, k, v, Logits(0.3), True)
    first = torch_attention.prefill_attention(q[:, :, :30], k[:, :, :30], v[:, :, :30], Logits(0.3), True)
    past = KeysValues(k[0, :, :30], v[0, :, :30])
    second = torch_attention.prefill_attention(q[:, :, 30:], k[:, :, 30:], v[:, :, 30:], Logits(0.3), True, past=past)
    torch.testing.assert_close(torch.cat([first.out, second.out], dim=2), whole.out)
    sums = second.column_sums.clone()
    sums[..., :30] += first.column_sums
    torch.testing.assert_close(sums, whole.column_sums)


@pytest.mark.parametrize(("b", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("slots", [1, 63, 64, 65])
@pytest.mark.parametrize("masked", [False, True])
def test_decode_equals_the_reference(b: int, heads: int, kv_heads: int, slots: int, masked: bool) -> None:
    q, k, v = torch.randn(b, heads, 8), torch.randn(b, kv_heads, slots, 8), torch.randn(b, kv_heads, slots, 8)
    valid = torch.rand(b, kv_heads, slots) < 0.5 if masked else None
    if valid is not None:
        valid[..., 0] = True
    fast, slow = (kernel.decode_attention(q, k, v, Logits(0.3), valid, True) for kernel in BOTH)
    torch.testing.assert_close(fast.out, slow.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast.row, slow.row, atol=1e-5, rtol=1e-5)
    if valid is not None:
        assert not fast.row[~valid].any()


@pytest.mark.parametrize("scale", [0.125, 0.11])
def test_products_that_float16_cannot_hold_before_they_are_scaled(scale: float) -> None:
    """64 x 33 x 33 is beyond 65,504, its eighth is not; llama.cpp and transformers know of models like that."""
    q, k = torch.full((1, 2, 5, 64), 33.0).half(), torch.full((1, 2, 5, 64), 33.0).half()
    v = torch.randn(1, 2, 5, 64).half()
    past = KeysValues(k[0, :, :3], v[0, :, :3])
    for before in (None, past):
        fast, slow = (kernel.prefill_attention(q, k, v, Logits(scale), True, past=before) for kernel in BOTH)
        assert fast.out.isfinite().all()
        torch.testing.assert_close(fast.out.float(), slow.out.float(), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(fast.column_sums, slow.column_sums, atol=1e-3, rtol=1e-3)
    step, wanted = (kernel.decode_attention(q[:, :, 0], k, v, Logits(scale), None, True) for kernel in BOTH)
    torch.testing.assert_close(step.out.float(), wanted.out.float(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(step.row, wanted.row, atol=1e-3, rtol=1e-3)


def test_prefill_memory_does_not_grow_with_the_square_of_the_length() -> None:
    heads = 4
    for n, length in ((1, 1000), (3, 4000), (2, 16000), (64, 10)):
        rows, queries = torch_attention._block_shape(n, heads, length, length, torch.device("cpu"))
        assert rows <= n
        assert rows * heads * queries * length <= max(torch_attention._CHUNK_ELEMENTS, heads * 16 * length)


def test_bfloat16_stays_close_to_float32() -> None:
    q, k, v = (torch.randn(1, 4, 200, 64) for _ in range(3))
    exact = reference.prefill_attention(q, k, v, Logits(0.125), True)
    half = torch_attention.prefill_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), Logits(0.125), True)
    assert half.out.dtype == torch.bfloat16
    assert half.column_sums.dtype == torch.float32
    torch.testing.assert_close(half.out.float(), exact.out, atol=0.03, rtol=0.03)
    torch.testing.assert_close(half.column_sums, exact.column_sums, atol=0.05, rtol=0.05)
