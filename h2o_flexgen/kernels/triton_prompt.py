"""Attention of whole prompts on a GPU, and how much of it each key received, in memory O(S).

Imports Triton; see `triton_available`. The output is torch's flash attention wherever that has what is needed, which is
half precision, heads of a multiple of 8, no window; else a kernel of ours. Both say the logarithm of each query's sum
of exponentials, and with it one more pass gives the column sums: a program per tile of keys computes its logits once
more and adds up the probabilities, without atomics. Past keys, which all rows share, are read where they lie.

Operations: 2 n heads S (P + S / 2) d for the sums, half of what the output takes. Bytes, n rows, E per number: the sums
read each key once and the queries of a head once per tile of 64 keys, which come from the second-level cache where
S d E of a head fits there; they write 4 n kv_heads (P + S). Neither writes anything of size S x S.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.kernels.triton_decode_kernels import capped, product
from h2o_flexgen.kernels.types import KeysValues, Logits, PrefillAttention, fit

_HALF = (torch.float16, torch.bfloat16)
_FLASH_MULTIPLE = 8  # of numbers per head, on a GPU


class Asked(NamedTuple):
    """Queries (rows, heads, queries, dim) and what is said of them, (rows, heads, queries) and contiguous.

    The strides of q are in elements. `lse`: natural logarithms of the sums of exponentials.
    """

    q: Any
    row: int
    head: int
    token: int
    queries: int
    lse: Any
    out: Any


class Keys(NamedTuple):
    """Keys and values (rows, kv_heads, length, dim) of the positions from `first` on; strides in elements."""

    k: Any
    v: Any
    row: int
    head: int
    token: int
    v_row: int
    v_head: int
    v_token: int
    length: int
    first: int


class Sums(NamedTuple):
    """Column sums (rows, kv_heads, keys) float32; elements from one to the next."""

    at: Any
    row: int
    head: int


class PromptForm(NamedTuple):
    """The sizes and options that a kernel is compiled for."""

    kv_heads: int
    group: int  # query heads per KV head
    dim: int
    d: int  # dim, as a power of two
    asked: int  # queries per tile
    seen: int  # keys per tile
    stages: int  # tiles on the way
    wide: bool  # see `product`


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, logits: Logits, column_sums: bool, past: KeysValues | None, window: int | None
) -> PrefillAttention:
    """Causal attention and column sums; shapes and meaning as `prompt.prefill_attention`. d: at most 256.

    The numbers of a head lie side by side in all of them, or are copied so that they do.
    """
    q, k, v = (fit(x) for x in (q, k, v))
    if past is not None:
        past = KeysValues(*(fit(x) for x in past)) if past.k.shape[1] else None
    before = 0 if past is None else past.k.shape[1]
    if window is not None and window >= before + q.shape[2]:
        window = None
    whole_vectors = q.dtype in _HALF and q.shape[-1] % _FLASH_MULTIPLE == 0
    if window is None and logits.soft_cap is None and (whole_vectors or q.device.type == "cpu"):
        out, lse = flash(q, k, v, logits.scale, past)
    else:
        out, lse = forward(q, k, v, logits, past, window)
    if not column_sums:
        return PrefillAttention(out, None)
    shared = None if past is None else past.k
    return PrefillAttention(out, sum_columns(q, k, lse, logits, shared, window))


def sum_columns(
    q: Tensor, k: Tensor, lse: Tensor, logits: Logits, past: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Sums over the queries of each key's softmax probability, (n, kv_heads, P + S) float32.

    q (n, heads, S, d), k (n, kv_heads, S, d), past (kv_heads, P, d) keys; lse (n, heads, S) float32: of each query the
    natural logarithm of the sum of the exponentials of its logits, as flash attention gives it. Causal; the others as
    in `prefill_attention`. Averaged over the query heads that share a KV head.
    """
    n, _, length, _ = q.shape
    kv_heads, before = k.shape[1], 0 if past is None else past.shape[1]
    sums = torch.empty(n, kv_heads, before + length, dtype=torch.float32, device=q.device)
    asked = _asked(q, lse.contiguous(), None)
    span = before + length if window is None else window
    form, warps = _form(q, kv_heads, large=False)
    parts = [(k, before)] if past is None else [(past.unsqueeze(0).expand(n, -1, -1, -1), 0), (k, before)]
    for own, first in parts:
        keys = _keys(own, own, first)
        to = Sums(sums[:, :, first:], *sums.stride()[:2])
        grid = (n * kv_heads, triton.cdiv(keys.length, form.seen))
        sums_kernel[grid](asked, keys, to, before, span, *logits.in_base_2, form, num_warps=warps)
    return sums


def forward(
    q: Tensor, k: Tensor, v: Tensor, logits: Logits, past: KeysValues | None = None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by a kernel of ours: output (n, heads, S, d) in q's dtype and lse (n, heads, S) float32.

    Arguments as `prefill_attention`. Key tiles that a window hides from all queries of a tile are not read.
    """
    n, heads, length, dim = q.shape
    kv_heads, before = k.shape[1], 0 if past is None else past.k.shape[1]
    out = torch.empty(n, heads, length, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(n, heads, length, dtype=torch.float32, device=q.device)
    asked = _asked(q, lse, out)
    shared = None
    if past is not None:
        shared = _keys(past.k.unsqueeze(0).expand(n, -1, -1, -1), past.v.unsqueeze(0).expand(n, -1, -1, -1), 0)
    span = before + length if window is None else window
    form, warps = _form(q, kv_heads, large=True)
    grid = (n * heads, triton.cdiv(length, form.asked))
    own = _keys(k, v, before)
    forward_kernel[grid](asked, shared, own, before, span, *logits.in_base_2, form, num_warps=warps)
    return out, lse


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, past: KeysValues | None) -> tuple[Tensor, Tensor]:
    """As `forward`, by torch's flash attention, without a window.

    With a past that is two calls: to the past, which is the same for all rows, so that they become one row of more
    queries; and to the own keys. The two are weighed by their sums of exponentials.
    """
    out, lse = _torch_flash(q, k, v, scale, causal=True)
    if past is None:
        return out, lse
    n, heads, length, dim = q.shape
    # The queries as one row are gone after the call, and only the sum of the outputs is float32: there may be many.
    shared = past.k.unsqueeze(0), past.v.unsqueeze(0), scale
    out_past, lse_past = _torch_flash(q.transpose(0, 1).reshape(1, heads, -1, dim), *shared, causal=False)
    out_past = out_past.view(heads, n, length, dim).transpose(0, 1)
    lse_past = lse_past.view(heads, n, length).transpose(0, 1)
    both = torch.logaddexp(lse, lse_past)
    own, other = (torch.exp(part - both).unsqueeze(-1) for part in (lse, lse_past))
    return (out * own).addcmul_(out_past, other).to(q.dtype), both


def _torch_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(n, heads, S, d) of heads that share KV heads, and (n, heads, S): natural logarithms."""
    if q.device.type == "cpu":
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return cpu[0], cpu[1]
    gpu = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return gpu[0], gpu[1]


def _asked(q: Tensor, lse: Tensor, out: Tensor | None) -> Asked:
    row, head, token, _ = q.stride()
    return Asked(q, row, head, token, q.shape[2], lse, out)


def _keys(k: Tensor, v: Tensor, first: int) -> Keys:
    (row, head, token, _), (v_row, v_head, v_token, _) = k.stride(), v.stride()
    return Keys(k, v, row, head, token, v_row, v_head, v_token, k.shape[2], first)


def _form(q: Tensor, kv_heads: int, *, large: bool) -> tuple[PromptForm, int]:
    """Tiles for `forward` (large) or for the sums, and warps per program.

    The sums keep a tile of keys and its logits in registers: 64 by 64 leaves room for two programs on a processor.
    """
    _, heads, _, dim = q.shape
    d = max(triton.next_power_of_2(dim), 16)
    half = q.dtype in _HALF
    if half:
        asked, seen, warps = (128, 64, 8) if large and d <= 128 else (64, 64, 8 if large else 4)
    else:  # each number in three parts for the tensor cores: three times the registers
        asked, seen, warps = (32, 32, 4) if d <= 64 else (16, 32, 4) if d <= 128 else (16, 16, 4)
    return PromptForm(kv_heads, heads // kv_heads, dim, d, asked, seen, 2, interpreting()), warps


# ---- device code; logits are in base 2


@triton.jit
def sums_kernel(asked, keys, sums, past, window, scale, cap, form: tl.constexpr):
    """Column sums of one tile of keys of one row and KV head, over all queries that see any of them.

    The tile is read once and kept; query tiles of all heads of the group go by. No sum leaves the program before it is
    complete, so that it does not depend on the order in which programs run.
    """
    task, block = tl.program_id(0), tl.program_id(1)
    row, head = (task // form.kv_heads).to(tl.int64), task % form.kv_heads
    dims, key = tl.arange(0, form.d), block * form.seen + tl.arange(0, form.seen)
    inside = (key < keys.length)[:, None] & (dims < form.dim)[None, :]
    at = keys.k + row * keys.row + head * keys.head + key.to(tl.int64)[:, None] * keys.token + dims[None, :]
    k = tl.load(at, mask=inside, other=0.0)
    # Queries from the first that comes after the tile's first key to the last whose window holds its last.
    lowest = keys.first + block * form.seen - past
    begin = tl.maximum(lowest, 0) // form.asked * form.asked
    end = tl.minimum(asked.queries, lowest + form.seen - 1 + window)
    tiles = tl.maximum(end - begin + form.asked - 1, 0) // form.asked
    total = tl.full((form.seen,), 0.0, tl.float32)
    for turn in tl.range(0, tiles * form.group, num_stages=form.stages):
        of = row * (form.kv_heads * form.group) + head * form.group + turn // tiles
        token = begin + turn % tiles * form.asked + tl.arange(0, form.asked)
        q = _queries(asked, of, token, form)
        lse = tl.load(asked.lse + of * asked.queries + token, mask=token < asked.queries, other=float("inf"))
        x = capped(product(k, tl.trans(q), form.wide) * scale, cap)
        # How far a query is behind a key; a query that sees none of the tile gets nothing but zeros.
        behind = (past + token)[None, :] - (keys.first + key)[:, None]
        seen = (behind >= 0) & (behind < window)
        total += tl.sum(tl.where(seen, tl.exp2(x - (lse * 1.4426950408889634)[None, :]), 0.0), 1)
    tl.store(sums.at + row * sums.row + head * sums.head + key, total / form.group, mask=key < keys.length)


@triton.jit
def forward_kernel(asked, before, own, past, window, scale, cap, form: tl.constexpr):
    """Attention of one tile of queries of one row and head to the keys `before`, if any, and to `own`."""
    head_of, block = tl.program_id(0), tl.program_id(1)
    of = head_of.to(tl.int64)
    row, head = of // (form.kv_heads * form.group), of % (form.kv_heads * form.group) // form.group
    start = block * form.asked
    token, dims = start + tl.arange(0, form.asked), tl.arange(0, form.d)
    q = _queries(asked, of, token, form)
    state = (
        tl.full((form.asked,), float("-inf"), tl.float32),
        tl.full((form.asked,), 0.0, tl.float32),
        tl.full((form.asked, form.d), 0.0, tl.float32),
    )
    if before is not None:
        begin = tl.maximum(past + start + 1 - window, 0) // form.seen * form.seen
        state = _take_in(q, state, before, (row, head, begin, before.length), past + token, window, (scale, cap), form)
    begin = tl.maximum(start + 1 - window, 0) // form.seen * form.seen
    end = tl.minimum(start + form.asked, own.length)
    top, total, mixed = _take_in(q, state, own, (row, head, begin, end), past + token, window, (scale, cap), form)
    inside = token < asked.queries
    total = tl.where(total == 0, 1.0, total)  # of a query beyond the last, in whose window nothing may be
    at = asked.out + (of * asked.queries + token.to(tl.int64))[:, None] * form.dim + dims[None, :]
    mixed = (mixed / total[:, None]).to(asked.out.dtype.element_ty)
    tl.store(at, mixed, mask=inside[:, None] & (dims < form.dim)[None, :])
    lse = (tl.where(inside, top, 0.0) + tl.log2(total)) * 0.6931471805599453
    tl.store(asked.lse + of * asked.queries + token, lse, mask=inside)


@triton.jit
def _take_in(q, state, keys, where, position, window, counted, form: tl.constexpr):
    """The softmax of queries q at `position` (asked,), carried on over keys from `begin` to `end`."""
    top, total, mixed = state
    scale, cap = counted
    row, head, begin, end = where
    dims = tl.arange(0, form.d)
    for start in tl.range(begin, end, form.seen, num_stages=form.stages):
        key = start + tl.arange(0, form.seen)
        inside = (key < keys.length)[:, None] & (dims < form.dim)[None, :]
        wide = key.to(tl.int64)[:, None]
        at = keys.k + row * keys.row + head * keys.head + wide * keys.token + dims[None, :]
        k = tl.load(at, mask=inside, other=0.0)
        at = keys.v + row * keys.v_row + head * keys.v_head + wide * keys.v_token + dims[None, :]
        v = tl.load(at, mask=inside, other=0.0)
        behind = position[:, None] - (keys.first + key)[None, :]
        seen = (behind >= 0) & (behind < window) & (key < keys.length)[None, :]
        x = tl.where(seen, capped(product(q, tl.trans(k), form.wide) * scale, cap), float("-inf"))
        peak = tl.maximum(top, tl.max(x, 1))
        # A query that has seen nothing yet has -inf, from which nothing can be subtracted.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        p, shrink = tl.exp2(x - base[:, None]), tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + product(p.to(v.dtype), v, form.wide)
        top = peak
    return top, total, mixed


@triton.jit
def _queries(asked, of, token, form: tl.constexpr):
    """Queries (asked, d) of head `of`, counted through all rows; 0 beyond the last."""
    heads: tl.constexpr = form.kv_heads * form.group
    dims = tl.arange(0, form.d)
    at = asked.q + of // heads * asked.row + of % heads * asked.head
    at = at + token.to(tl.int64)[:, None] * asked.token + dims[None, :]
    return tl.load(at, mask=(token < asked.queries)[:, None] & (dims < form.dim)[None, :], other=0.0)
