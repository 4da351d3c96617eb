"""The kernels in plain torch operations, arranged for a CPU's caches. They run on any device; Triton has its own.

Two facts decide the shape of this file (bfloat16, two AVX-512 cores). Batched GEMMs run near the peak rate as long as
their output stays in the last-level cache, while torch's fused CPU attention reaches a sixth of it and gives no column
sums. So prompts go through in chunks of queries whose logits fit the cache, and the softmax weights of a chunk serve
both the output and the column sums: memory is O(S) per head, and no second pass over Q K^T is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kernels.types import DecodeAttention, PrefillAttention

_CHUNK_ELEMENTS = 1 << 20  # float32 logits alive at once: 4 MiB
_MIN_CHUNK = 16


def _chunk_length(heads: int, length: int) -> int:
    """Queries per chunk, a multiple of 16, so that heads x chunk x length logits stay within `_CHUNK_ELEMENTS`."""
    fitting = _CHUNK_ELEMENTS // (heads * length)
    return min(length, max(_MIN_CHUNK, fitting // _MIN_CHUNK * _MIN_CHUNK))


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, column_sums: bool) -> PrefillAttention:
    """Causal attention and column sums; shapes and meaning as `reference.prefill_attention`."""
    n, heads, length, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    chunk = _chunk_length(heads, length)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu_(1)
    out = torch.empty(n, length, heads, d, dtype=q.dtype, device=q.device).transpose(1, 2)
    sums = torch.zeros(n, kv_heads, length, dtype=torch.float32, device=q.device) if column_sums else None
    for row in range(n):
        keys, values = k[row].contiguous().transpose(-1, -2), v[row].contiguous()
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            size = stop - start
            # The query heads of one KV head become more query rows: KV is never repeated.
            queries = q[row, :, start:stop].reshape(kv_heads, group * size, d)
            logits = torch.matmul(queries, keys[:, :, :stop]).float().mul_(scale)
            by_query = logits.view(kv_heads, group, size, stop)
            by_query[..., start:].masked_fill_(future[:size, :size], float("-inf"))
            probs = torch.softmax(logits, dim=-1)
            if sums is not None:
                sums[row, :, :stop] += probs.sum(1)
            mixed = torch.matmul(probs.to(v.dtype), values[:, :stop])
            out[row, :, start:stop] = mixed.view(heads, size, d)
    if sums is not None and group > 1:
        sums /= group
    return PrefillAttention(out, sums)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, want_row: bool
) -> DecodeAttention:
    """One query per sequence over the kept slots; shapes and meaning as `reference.decode_attention`."""
    b, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    logits = torch.matmul(q.view(b, kv_heads, group, d), k.transpose(-1, -2)).float().mul_(scale)
    if valid is not None:
        logits.masked_fill_(~valid.unsqueeze(2), float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    out = torch.matmul(probs.to(v.dtype), v).view(b, heads, d)
    if not want_row:
        return DecodeAttention(out, None)
    return DecodeAttention(out, probs.squeeze(2) if group == 1 else probs.mean(2))
