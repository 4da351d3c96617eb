"""Every test of the cache runs with torch's kernels, and again with those in C where they can be had; a spy on both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.cache import kv_cache
from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.kernels.decode import NativeAttend, available
from h2o_flexgen.kernels.torch_attention import decode_attention
from h2o_flexgen.kernels.types import DecodeAttention, Logits
from tests.cache import harness

needs_native = pytest.mark.skipif(
    not available(torch.float32, 4, torch.device("cpu")), reason="no compiler, or a processor without AVX-512 bfloat16"
)


by_torch = pytest.mark.parametrize("kernel", ["torch"], indirect=True)
"""For tests that take no decode step, or whose steps run on torch's kernels everywhere: once is enough."""


@pytest.fixture(autouse=True, params=["torch", pytest.param("native", marks=needs_native)])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of what decode steps run on. Its patch is its own: tests may undo theirs."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(FusedStep, "of", lambda *_: None)
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def _traces() -> Iterator[None]:
    """No other module asks for what its oracles said, and Python's collector need not look through it any longer."""
    yield
    harness._TRACES.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[DecodeAttention]:
    """What every decode attention returned, the row included even where the policy asked for none."""
    seen: list[DecodeAttention] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, logits: Logits, valid: Tensor | None, want_row: bool) -> DecodeAttention:
        result = decode_attention(q, k, v, logits, valid, True)
        seen.append(result)
        return result if want_row else DecodeAttention(result.out, None)

    def native_spy(kernel: NativeAttend, number: int, qkv: Any, logits: Logits, **options: Any) -> Tensor:
        rows, kv_heads, _ = qkv[1].shape
        row = options.setdefault("probs", torch.empty(rows, kv_heads, kernel.capacity))
        out = native_step(kernel, number, qkv, logits, **options)
        seen.append(DecodeAttention(out, row))
        return out

    native_step = NativeAttend.step
    monkeypatch.setattr(NativeAttend, "step", native_spy)
    monkeypatch.setattr(kv_cache, "decode_attention", spy)
    return seen
