"""Attention, slow and obvious, that every kernel is compared with: float32 and fully materialised."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kernels.types import DecodeAttention, KeysValues, Logits, PrefillAttention


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by: Logits,
    column_sums: bool,
    *,
    past: KeysValues | None = None,
    window: int | None = None,
) -> PrefillAttention:
    """Causal attention of whole prompts, or ends of prompts, of one length, and how much attention each key received.

    q: (n, heads, S, d); k, v: (n, kv_heads, S, d); past: keys and values (kv_heads, P, d) of P earlier tokens that all
    n rows have in common. Query i has position P + i and sees the keys up to there, with a window only the last
    `window` of them. `column_sums` (n, kv_heads, P + S): the sum over these S queries of the softmax probability of
    each key, averaged over the query heads that share a KV head (H2O section 3; accumulated score). `by` has no sinks.
    """
    if past is not None:
        k, v = (torch.cat([p.expand(len(own), -1, -1, -1), own], dim=2) for p, own in zip(past, (k, v), strict=True))
    n, heads, length, _ = q.shape
    kv_heads, total = k.shape[1:3]
    group = heads // kv_heads
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = capped(q.float() @ keys.transpose(-1, -2) * by.scale, by.soft_cap)
    distance = torch.arange(total - length, total).unsqueeze(1) - torch.arange(total)
    hidden = (distance < 0) | (distance >= (total if window is None else window))
    probs = logits.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1)
    sums = probs.sum(2).view(n, kv_heads, group, total).mean(2) if column_sums else None
    return PrefillAttention((probs @ values).to(q.dtype), sums)


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """What logits count."""
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, by: Logits, valid: Tensor | None, want_row: bool
) -> DecodeAttention:
    """One query per sequence over the kept slots.

    q: (b, heads, d); k, v: (b, kv_heads, N, d); valid: (b, kv_heads, N) bool, or None where every slot is occupied.
    `row` is the softmax probability of each slot, averaged over the query heads of its KV head, 0 where not valid.
    """
    b, heads, d = q.shape
    kv_heads = k.shape[1]
    queries = q.float().view(b, kv_heads, heads // kv_heads, d)
    logits = capped(queries @ k.float().transpose(-1, -2) * by.scale, by.soft_cap)
    if valid is not None:
        logits = logits.masked_fill(~valid.unsqueeze(2), float("-inf"))
    probs = logits.softmax(-1)
    out = (probs @ v.float()).view(b, heads, d).to(q.dtype)
    return DecodeAttention(out, probs.mean(2) if want_row else None)
