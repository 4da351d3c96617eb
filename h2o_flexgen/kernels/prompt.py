"""Attention of prompts by whichever kernel serves the device: Triton's, the one in C, or torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.native import prompt as native
from h2o_flexgen.kernels.types import KeysValues, PrefillAttention

_MAX_DIM = 256
"""Of Triton's kernel."""


def by_triton(device: torch.device, dim: int) -> bool:
    """Whether prompts on `device` are attended to by Triton's kernels, with `dim` numbers per head."""
    return dim <= _MAX_DIM and triton_available.serves(device)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    column_sums: bool,
    *,
    past: KeysValues | None = None,
    window: int | None = None,
) -> PrefillAttention:
    """Causal attention and column sums; shapes and meaning as `reference.prefill_attention`."""
    if q.numel() and by_triton(q.device, q.shape[-1]):
        from h2o_flexgen.kernels import triton_prompt  # imports Triton, which is not there on every machine

        return triton_prompt.prefill_attention(q, k, v, scale, column_sums, past=past, window=window)
    return native.prefill_attention(q, k, v, scale, column_sums, past=past, window=window)
