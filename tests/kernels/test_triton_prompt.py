"""Prompt attention and column sums on a GPU, or in Triton's interpreter, against the slow kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.kernels import triton_prompt
from h2o_flexgen.kernels.types import KeysValues, Logits, PrefillAttention
from tests.oracles import attention as reference
from tests.seeds import torch_generator

pytestmark = pytest.mark.turns

SCALE = 0.3


class Prompts:
    """Random queries, keys and values of `rows` prompts, and a past of `before` tokens if that is not 0."""

    def __init__(
        self, rows: int, kv_heads: int, group: int, length: int, before: int = 0, dim: int = 16, dtype=torch.float32
    ) -> None:
        random = torch_generator(length)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=random).to(dtype)

        self.qkv = draw(rows, kv_heads * group, length, dim), *(draw(rows, kv_heads, length, dim) for _ in "kv")
        self.past = KeysValues(draw(kv_heads, before, dim), draw(kv_heads, before, dim)) if before else None

    def on_device(self) -> tuple[tuple[Tensor, ...], KeysValues | None]:
        """Laid out as the engine does: tokens before heads."""
        qkv = tuple(x.to(DEVICE).transpose(1, 2).contiguous().transpose(1, 2) for x in self.qkv)
        return qkv, None if self.past is None else KeysValues(*(x.to(DEVICE) for x in self.past))

    def exact(self, window: int | None, soft_cap: float | None) -> tuple[PrefillAttention, Tensor]:
        """What the slow kernel says, and each query's sum of exponentials, as logarithms."""
        q, k, v = (x.float() for x in self.qkv)
        past = None if self.past is None else KeysValues(*(x.float() for x in self.past))
        known = reference.prefill_attention(q, k, v, Logits(SCALE, soft_cap), True, past=past, window=window)
        keys = k if past is None else torch.cat([past.k.expand(len(k), -1, -1, -1), k], 2)
        logits = q @ keys.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * SCALE
        logits = reference.capped(logits, soft_cap)
        length, total = logits.shape[-2:]
        behind = torch.arange(total - length, total).unsqueeze(1) - torch.arange(total)
        hidden = (behind < 0) | (behind >= (total if window is None else window))
        return known, logits.masked_fill(hidden, -torch.inf).logsumexp(-1)

    def check(self, window: int | None, close: float = 2e-5, soft_cap: float | None = None) -> None:
        """All that there is, against `exact`."""
        known, lse = self.exact(window, soft_cap)
        logits = Logits(SCALE, soft_cap)
        (q, k, v), past = self.on_device()
        sums = triton_prompt.sum_columns(q, k, lse.to(DEVICE), logits, None if past is None else past.k, window)
        spread = known.column_sums.max().item()
        torch.testing.assert_close(sums.cpu(), known.column_sums, atol=close * spread, rtol=close)
        out, own_lse = triton_prompt.forward(q, k, v, logits, past, window)
        torch.testing.assert_close(out.cpu().float(), known.out, atol=close, rtol=close)
        torch.testing.assert_close(own_lse.cpu(), lse, atol=close, rtol=close)
        if window is not None:
            return
        # What chooses between these and torch's flash attention; in the interpreter one look at the sums is enough.
        whole = triton_prompt.prefill_attention(q, k, v, logits, DEVICE != "cpu", past, window)
        assert whole.out.dtype == q.dtype
        torch.testing.assert_close(whole.out.cpu().float(), known.out, atol=close, rtol=close)
        if whole.column_sums is not None:
            torch.testing.assert_close(whole.column_sums.cpu(), known.column_sums, atol=close * spread, rtol=close)


@pytest.mark.parametrize(("length", "window"), [(1, None), (1, 1), (63, 40), (64, None), (64, 40), (65, None), (65, 1)])
def test_odd_lengths(length: int, window: int | None) -> None:
    Prompts(1, 2, 1, length).check(window)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
@pytest.mark.parametrize(("window", "before"), [(None, 0), (20, 7), (None, 40)])
def test_soft_caps(soft_cap: float, window: int | None, before: int) -> None:
    Prompts(2, 1, 2, 50, before).check(window, soft_cap=soft_cap)


@pytest.mark.slow
def test_a_long_prompt() -> None:
    Prompts(1, 1, 1, 1000, dtype=torch.float16).check(None, 4e-3)
    Prompts(1, 1, 1, 1000, dtype=torch.float16).check(100, 4e-3)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_every_group_size(group: int) -> None:
    Prompts(2, 1, group, 40).check(None)


@pytest.mark.parametrize(("before", "length"), [(1, 1), (7, 40), (64, 3), (40, 65)])
@pytest.mark.parametrize("window", [None, 20])
def test_after_a_past_that_rows_share(before: int, length: int, window: int | None) -> None:
    Prompts(2, 1, 2, length, before).check(window)


@pytest.mark.parametrize("dim", [16, 80, 256])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_every_dimension_and_dtype(dim: int, dtype: torch.dtype, close: float) -> None:
    Prompts(1, 1, 2, 50, 9, dim, dtype).check(None, close)
    Prompts(1, 1, 2, 50, 9, dim, dtype).check(20, close)


@pytest.mark.slow
def test_sums_are_those_of_the_queries_alone() -> None:
    """A prompt in two parts gives the sums of the whole; without column sums there are none."""
    prompts = Prompts(1, 2, 2, 90)
    (q, k, v), _ = prompts.on_device()
    whole = triton_prompt.prefill_attention(q, k, v, Logits(SCALE), True, None, None)
    cut = slice(50), slice(50, None)
    first, second = (tuple(x[:, :, part] for x in (q, k, v)) for part in cut)
    past = KeysValues(k[0, :, :50], v[0, :, :50])
    early = triton_prompt.prefill_attention(*first, Logits(SCALE), True, None, None)
    late = triton_prompt.prefill_attention(*second, Logits(SCALE), True, past, None)
    torch.testing.assert_close(torch.cat([early.out, late.out], 2), whole.out, atol=1e-5, rtol=1e-5)
    window = triton_prompt.prefill_attention(q, k, v, Logits(SCALE), True, None, 30)
    known = reference.prefill_attention(*(x.cpu() for x in (q, k, v)), Logits(SCALE), True, window=30)
    torch.testing.assert_close(window.column_sums.cpu(), known.column_sums, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(window.out.cpu(), known.out, atol=1e-5, rtol=1e-5)
    late.column_sums[..., :50] += early.column_sums
    torch.testing.assert_close(late.column_sums, whole.column_sums, atol=1e-5, rtol=1e-5)
    assert triton_prompt.prefill_attention(q, k, v, Logits(SCALE), False, None, None).column_sums is None
