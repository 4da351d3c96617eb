"""The slow, obvious kernels that every other implementation is compared with: float32 and fully materialised."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kernels.types import DecodeAttention, PrefillAttention


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, column_sums: bool) -> PrefillAttention:
    """Causal attention over whole prompts of one length, and how much attention each key received.

    q: (n, heads, S, d); k, v: (n, kv_heads, S, d). `column_sums[j]` is the sum over all queries i >= j of the softmax
    probability of key j, averaged over the query heads that share a KV head (H2O section 3; accumulated score).
    """
    n, heads, length, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = q.float() @ keys.transpose(-1, -2) * scale
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    probs = logits.masked_fill(future, float("-inf")).softmax(-1)
    sums = probs.sum(2).view(n, kv_heads, group, length).mean(2) if column_sums else None
    return PrefillAttention((probs @ values).to(q.dtype), sums)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, want_row: bool
) -> DecodeAttention:
    """One query per sequence over the kept slots.

    q: (b, heads, d); k, v: (b, kv_heads, N, d); valid: (b, kv_heads, N) bool, or None where every slot is occupied.
    `row` is the softmax probability of each slot, averaged over the query heads of its KV head, 0 where not valid.
    """
    b, heads, d = q.shape
    kv_heads = k.shape[1]
    queries = q.float().view(b, kv_heads, heads // kv_heads, d)
    logits = queries @ k.float().transpose(-1, -2) * scale
    if valid is not None:
        logits = logits.masked_fill(~valid.unsqueeze(2), float("-inf"))
    probs = logits.softmax(-1)
    out = (probs @ v.float()).view(b, heads, d).to(q.dtype)
    return DecodeAttention(out, probs.mean(2) if want_row else None)
