"""What attention kernels return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KeysValues(NamedTuple):
    """Keys and values of the same tokens, (..., kv_heads, tokens, d)."""

    k: Tensor
    v: Tensor


class PrefillAttention(NamedTuple):
    """`out` (n, heads, S, d) in q's dtype; `column_sums` (n, kv_heads, P + S) float32, or None if not asked for."""

    out: Tensor
    column_sums: Tensor | None


class DecodeAttention(NamedTuple):
    """`out` (b, heads, d) in the dtype of q; `row` (b, kv_heads, N) float32, or None if not asked for."""

    out: Tensor
    row: Tensor | None
