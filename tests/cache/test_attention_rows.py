"""The rows of attention that policies look at, against attention that is fully materialised."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.cache.eviction.base import AttendedPrompts, attention_rows, summed_rows
from h2o_flexgen.kernels import torch_attention
from h2o_flexgen.kernels.types import Logits
from tests.cache.conftest import by_torch
from tests.seeds import torch_generator

pytestmark = by_torch


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("past", [0, 9])
def test_all_rows_add_up_to_the_column_sums(
    window: int | None, sinks: bool, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch_generator(past)
    q = torch.randn(2, 4, past + 12, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, past + 12, 8, generator=generator)
    k[1, :, :past], v[1, :, :past] = k[0, :, :past], v[0, :, :past]
    logits = torch.randn(4, generator=generator) if sinks else None
    expected = torch_attention.prefill_attention(q, k, v, Logits(0.3, sinks=logits), True, window=window).column_sums
    shared = (k[0, :, :past], v[0, :, :past], k[0, :, :past]) if past else None
    own = (x[:, :, past:] for x in (k, v, k))
    prompts = AttendedPrompts(*own, Logits(0.3, sinks=logits), shared, q)
    monkeypatch.setattr(base, "ROW_LOGITS", 500)  # several chunks of queries
    torch.testing.assert_close(summed_rows(prompts, prompts.length, window), expected, atol=1e-5, rtol=1e-5)
    last = [rows for _, rows in attention_rows(prompts, 1, window)]
    assert [tuple(rows.shape) for rows in last] == [(2, 2, 2, 1, past + 12)]
