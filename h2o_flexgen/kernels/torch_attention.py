"""Attention in plain torch operations, on any device, arranged for a CPU's caches.

Two facts decide its form (bfloat16, two AVX-512 cores). Batched GEMMs run near the peak rate as long as
their output stays in the last-level cache, while torch's fused CPU attention reaches a sixth of it and gives no column
sums. So prompts go through in chunks of queries whose logits fit the cache, and the softmax weights of a chunk serve
both the output and the column sums: memory is O(S) per head, and no second pass over Q K^T is needed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from h2o_flexgen.kernels.native.tiers import torch_widens
from h2o_flexgen.kernels.types import DecodeAttention, KeysValues, Logits, PrefillAttention, Seen

_CHUNK_ELEMENTS = 1 << 20  # float32 logits alive at once: 4 MiB
_CHUNK_ELEMENTS_ON_GPU = 1 << 24  # 64 MiB: of fewer, starting the kernels would take longer than they do
_MIN_CHUNK = 16


def _block_shape(n: int, heads: int, length: int, total: int, device: torch.device) -> tuple[int, int]:
    """Rows and queries whose heads x rows x queries x `total` logits are as many as suits the device, at most.

    Whole rows where their queries fit, else one row and a multiple of 16 of its queries.
    """
    fitting = (_CHUNK_ELEMENTS if device.type == "cpu" else _CHUNK_ELEMENTS_ON_GPU) // (heads * total)
    if fitting >= length:
        return min(n, fitting // length), length
    return 1, min(length, max(_MIN_CHUNK, fitting // _MIN_CHUNK * _MIN_CHUNK))


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logits: Logits,
    column_sums: bool,
    *,
    past: KeysValues | None = None,
    window: int | None = None,
    seen: Seen | None = None,
) -> PrefillAttention:
    """Causal attention and column sums; shapes and meaning as `prompt.prefill_attention`. `seen`: which keys."""
    n, heads, length, d = q.shape
    kv_heads = k.shape[1]
    group, before = heads // kv_heads, 0 if past is None else past[0].shape[1]
    rows, queries = _block_shape(n, heads, length, before + length, q.device)
    out = torch.empty(n, length, heads, d, dtype=q.dtype, device=q.device).transpose(1, 2)
    size = (n, kv_heads, before + length)
    sums = torch.zeros(size, dtype=torch.float32, device=q.device) if column_sums else None
    for row in range(0, n, rows):
        own = KeysValues(k[row : row + rows].contiguous(), v[row : row + rows].contiguous())
        for start in range(0, length, queries):
            stop = min(start + queries, length)
            # The query heads of one KV head become more query rows: KV is never repeated.
            asked = q[row : row + rows, :, start:stop].reshape(-1, kv_heads, group * (stop - start), d)
            asked, left = _scaled(asked, logits.scale)
            first = 0 if window is None else max(0, before + start + 1 - window)
            held = _held(past, own, first, before, stop)
            found = capped(_logits(asked, *held).mul_(left), logits.soft_cap)
            by_query = found.view(-1, kv_heads, group, stop - start, found.shape[-1])
            _mask(by_query, before + start - first, window)
            if seen is not None:
                here = seen(slice(row, row + len(by_query)), start, stop)[..., first:]
                by_query.masked_fill_(~here[:, None, None], float("-inf"))
            sinks = None if logits.sinks is None else logits.sinks.view(1, kv_heads, group, 1)
            probs = softmax(found, None if sinks is None else sinks.expand(by_query.shape[:-1]).flatten(2))
            if sums is not None:
                sums[row : row + rows, :, first : before + stop] += probs.sum(2)
            out[row : row + rows, :, start:stop] = _mix(probs.to(v.dtype), *held).view(-1, heads, stop - start, d)
    if sums is not None and group > 1:
        sums /= group
    return PrefillAttention(out, sums)


def _scaled(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q, and the scale that its products with keys are still to be multiplied by.

    Products are stored in q's dtype, and in float16 those of real models pass 65,504 before they are scaled. The power
    of two in `scale` can go first: it changes no digit.
    """
    if q.dtype != torch.float16:
        return q, scale
    shift = 2.0 ** (math.frexp(scale)[1] - 1)
    return q * shift, scale / shift


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """The logits, none of them beyond `soft_cap` either way (Gemma 2), in place."""
    return logits if soft_cap is None else logits.div_(soft_cap).tanh_().mul_(soft_cap)


def _held(
    past: KeysValues | None, own: KeysValues, first: int, before: int, stop: int
) -> tuple[KeysValues | None, KeysValues]:
    """The keys and values from position `first` up to own token `stop`, as far as there are any."""
    start = max(0, first - before)
    own = KeysValues(own.k[:, :, start:stop], own.v[:, :, start:stop])
    if past is None or first >= before:
        return None, own
    return past if first == 0 else KeysValues(past.k[:, first:], past.v[:, first:]), own


def _mask(by_query: Tensor, offset: int, window: int | None) -> None:
    """Hides from query i, whose position among the keys is `offset` + i, what comes after it or left its window."""
    size, width = by_query.shape[-2:]
    first = offset if window is None else 0  # before the first of the queries every one of them sees everything
    key = torch.arange(first, width, device=by_query.device)
    query = torch.arange(offset, offset + size, device=by_query.device).unsqueeze(1)
    hidden = key > query if window is None else (key > query) | (key <= query - window)
    by_query[..., first:].masked_fill_(hidden, float("-inf"))


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension, with one logit more that is no token's: `sinks`, of the other dimensions."""
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    return torch.softmax(torch.cat([logits, sinks.unsqueeze(-1)], -1), dim=-1)[..., :-1]


def product(a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul: on a CPU that torch multiplies bfloat16 numbers slowly on, of float32 ones, rounded at the end."""
    if a.dtype is torch.bfloat16 and a.is_cpu and torch_widens():
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    return torch.matmul(a, b)


def _logits(q: Tensor, past: KeysValues | None, own: KeysValues) -> Tensor:
    """q (r, kv_heads, m, d) times all keys, (r, kv_heads, m, keys) float32: past ones, which the rows share, first."""
    logits = product(q, own.k.transpose(-1, -2))
    if past is None:
        return logits.float()
    rows, kv_heads, m, d = q.shape
    shared = product(q.transpose(0, 1).reshape(kv_heads, rows * m, d), past.k.transpose(-1, -2))
    before, width = past.k.shape[1], logits.shape[-1]
    both = torch.empty(rows, kv_heads, m, before + width, dtype=torch.float32, device=q.device)
    both[..., :before] = shared.view(kv_heads, rows, m, before).transpose(0, 1)
    both[..., before:] = logits
    return both


def _mix(probs: Tensor, past: KeysValues | None, own: KeysValues) -> Tensor:
    """probs (r, kv_heads, m, keys) times all values, (r, kv_heads, m, d)."""
    if past is None:
        return product(probs, own.v)
    before, (rows, kv_heads, m, _) = past.k.shape[1], probs.shape
    mixed = product(probs[..., before:], own.v)
    shared = product(probs[..., :before].transpose(0, 1).reshape(kv_heads, rows * m, before), past.v)
    return mixed.add_(shared.view(kv_heads, rows, m, -1).transpose(0, 1))


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, logits: Logits, valid: Tensor | None, want_row: bool
) -> DecodeAttention:
    """One query per sequence over the kept slots.

    q: (b, heads, d); k, v: (b, kv_heads, N, d); valid: (b, kv_heads, N) bool, or None where every slot is occupied.
    `row` is the softmax probability of each slot, averaged over the query heads of its KV head, 0 where not valid.
    """
    b, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    asked, left = _scaled(q.view(b, kv_heads, group, d), logits.scale)
    found = capped(product(asked, k.transpose(-1, -2)).float().mul_(left), logits.soft_cap)
    if valid is not None:
        found.masked_fill_(~valid.unsqueeze(2), float("-inf"))
    sinks = None if logits.sinks is None else logits.sinks.view(1, kv_heads, group).expand(b, -1, -1)
    probs = softmax(found, sinks)
    out = product(probs.to(v.dtype), v).view(b, heads, d)
    if not want_row:
        return DecodeAttention(out, None)
    return DecodeAttention(out, probs.squeeze(2) if group == 1 else probs.mean(2))
