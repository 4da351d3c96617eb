"""Attention of whole prompts on a GPU, and how much of it each key received, in memory O(S).

Imports Triton; see `triton_available`. The output is torch's flash attention wherever that has what is needed, which is
half precision, heads of a multiple of 8, no window; else a kernel of ours. Both say the logarithm of each query's sum
of exponentials, and with it one more pass gives the column sums: a program per tile of keys computes its logits once
more and adds up the probabilities, without atomics. Past keys, which all rows share, are read where they lie.

Operations: 2 n heads S (P + S / 2) d for the sums, half of what the output takes. Bytes, n rows, E per number: the sums
read each key once and the queries of a head once per tile of 64 keys, which come from the second-level cache where
S d E of a head fits there; they write 4 n kv_heads (P + S). Neither writes anything of size S x S.

Measured so far: nothing. These kernels were compiled for NVIDIA's architecture 9.0 and run in Triton's interpreter.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.kernels.triton_prompt_kernels import Asked, Keys, Shape, Sums, forward_kernel, sums_kernel
from h2o_flexgen.kernels.types import KeysValues, PrefillAttention

_HALF = (torch.float16, torch.bfloat16)
_FLASH_MULTIPLE = 8  # of numbers per head, on a GPU
_LOG2_E = math.log2(math.e)


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
    """Causal attention and column sums; shapes and meaning as `reference.prefill_attention`. d: at most 256.

    The numbers of a head lie side by side in all of them, or are copied so that they do.
    """
    q, k, v = (_dense(x) for x in (q, k, v))
    if past is not None:
        past = KeysValues(*(_dense(x) for x in past)) if past.k.shape[1] else None
    before = 0 if past is None else past.k.shape[1]
    if window is not None and window >= before + q.shape[2]:
        window = None
    whole_vectors = q.dtype in _HALF and q.shape[-1] % _FLASH_MULTIPLE == 0
    if window is None and (whole_vectors or q.device.type == "cpu"):
        out, lse = flash(q, k, v, scale, past)
    else:
        out, lse = forward(q, k, v, scale, past=past, window=window)
    if not column_sums:
        return PrefillAttention(out, None)
    return PrefillAttention(out, sum_columns(q, k, lse, scale, past=None if past is None else past.k, window=window))


def sum_columns(
    q: Tensor, k: Tensor, lse: Tensor, scale: float, *, past: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Sums over the queries of each key's softmax probability, (n, kv_heads, P + S) float32.

    q (n, heads, S, d), k (n, kv_heads, S, d), past (kv_heads, P, d) keys; lse (n, heads, S) float32: of each query the
    natural logarithm of the sum of the exponentials of its scaled logits, as flash attention gives it. Causal; `window`
    as in `prefill_attention`. Averaged over the query heads that share a KV head.
    """
    n, _, length, _ = q.shape
    kv_heads, before = k.shape[1], 0 if past is None else past.shape[1]
    sums = torch.empty(n, kv_heads, before + length, dtype=torch.float32, device=q.device)
    asked = _asked(q, lse.contiguous(), None)
    span = before + length if window is None else window
    shape, warps = _shape(q, kv_heads, large=False)
    parts = [(k, before)] if past is None else [(past.unsqueeze(0).expand(n, -1, -1, -1), 0), (k, before)]
    for own, first in parts:
        keys = _keys(own, own, first)
        to = Sums(sums[:, :, first:], *sums.stride()[:2])
        grid = (n * kv_heads, triton.cdiv(keys.length, shape.seen))
        sums_kernel[grid](asked, keys, to, before, span, scale * _LOG2_E, shape, num_warps=warps)
    return sums


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, past: KeysValues | None = None, window: int | None = None
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
    shape, warps = _shape(q, kv_heads, large=True)
    grid = (n * heads, triton.cdiv(length, shape.asked))
    own = _keys(k, v, before)
    forward_kernel[grid](asked, shared, own, before, span, scale * _LOG2_E, shape, num_warps=warps)
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


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _asked(q: Tensor, lse: Tensor, out: Tensor | None) -> Asked:
    row, head, token, _ = q.stride()
    return Asked(q, row, head, token, q.shape[2], lse, out)


def _keys(k: Tensor, v: Tensor, first: int) -> Keys:
    (row, head, token, _), (v_row, v_head, v_token, _) = k.stride(), v.stride()
    return Keys(k, v, row, head, token, v_row, v_head, v_token, k.shape[2], first)


def _shape(q: Tensor, kv_heads: int, *, large: bool) -> tuple[Shape, int]:
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
    return Shape(kv_heads, heads // kv_heads, dim, d, asked, seen, 2, interpreting()), warps
