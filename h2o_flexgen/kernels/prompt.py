"""Attention of prompts, by Triton, in C or by torch, whichever serves; and the choice of tokens that stay, in C."""

from __future__ import annotations

from ctypes import Structure, byref
from functools import cache

import torch
from torch import Tensor

from h2o_flexgen.config.model.packing import CachePacking
from h2o_flexgen.huge import LARGE
from h2o_flexgen.kernels import torch_attention, triton_available
from h2o_flexgen.kernels.native import function, library, structure
from h2o_flexgen.kernels.types import KeysValues, Logits, PackedPrompts, PrefillAttention, RoundingErrors

_TRITON_MAX_DIM = 256
_TILE = 6  # rows of queries that are multiplied together: a block fills whole ones
_ROWS = 24  # of a block: each reads the keys and values once, and all of them see what the last one sees
_MOST_ROWS = 48
_LANES, _MAX_DIM = 16, 256  # a head's dimensions in C: a multiple, and at most
_TASKS = 32  # wanted, where a few long prompts have less heads than that
_BLOCKS = 8  # in a task, at least: it packs the keys and values for itself
_ALIGNMENT = 64
_SCRATCH_PER_LOGIT, _LOGITS, _LOGITS_PER_KEY = 14, 1 << 20, 16
"""Scratch of all workers: bytes per logit (torch's, see `schedule/workspace.py`), logits at least, logits per key."""


_Prompt, _Keep = structure("prompt.c", "Prompt"), structure("keep.c", "Keep")
_KeyScales = structure("key_scales.c", "KeyScales")


def by_triton(device: torch.device, dim: int) -> bool:
    """Whether Triton's kernels attend to prompts on `device`, with `dim` numbers per head."""
    return dim <= _TRITON_MAX_DIM and triton_available.serves(device)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logits: Logits,
    column_sums: bool,
    *,
    past: KeysValues | None = None,
    window: int | None = None,
) -> PrefillAttention:
    """Causal attention of whole prompts, or ends of prompts, of one length, and how much attention each key received.

    q: (n, heads, S, d); k, v: (n, kv_heads, S, d); past: keys and values (kv_heads, P, d) of P earlier tokens that all
    n rows have in common. Query i has position P + i and sees the keys up to there, with a window only the last
    `window` of them. `column_sums` (n, kv_heads, P + S): the sum over these S queries of the softmax probability of
    each key, averaged over the query heads that share a KV head (H2O section 3; accumulated score).

    In C, any strides will do where the last dimension is contiguous. Weights are rounded to bfloat16 before they
    multiply the values, column sums come from what they were in float32: as torch's kernel has it. Equal inputs give
    equal bits, whatever the number of threads.
    """
    if logits.sinks is None and q.numel() and by_triton(q.device, q.shape[-1]):
        from h2o_flexgen.kernels import triton_prompt  # imports Triton, which is not there on every machine

        return triton_prompt.prefill_attention(q, k, v, logits, column_sums, past, window)
    if not _fits(q, k, v, logits.scale, past):
        return torch_attention.prefill_attention(q, k, v, logits, column_sums, past=past, window=window)
    n, heads, length, d = q.shape
    task = _task(q, k, v, logits, past, window)
    out = LARGE.empty(n, length, heads, d, dtype=q.dtype)
    size = task.parts, n, task.kv_heads, task.before + length
    sums = LARGE.empty(*size, dtype=torch.float32) if column_sums else None
    _run(task, out, sums, n * length)
    joined = None if sums is None else sums[0] if task.parts == 1 else sums.sum(0)
    return PrefillAttention(out.transpose(1, 2), joined)


def takes_packed(q: Tensor, k: Tensor, v: Tensor, scale: float, prompts: PackedPrompts) -> bool:
    """Whether `packed_attention` computes this, and there is nothing in it that is better divided."""
    if not _fits(q, k, v, scale, None):
        return False
    return _parts(prompts.longest, _queries(q.shape[1] // k.shape[1]), len(prompts.table) * k.shape[1]) == 1


def packed_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    prompts: PackedPrompts,
    logits: Logits,
    column_sums: bool,
    out: Tensor,
    *,
    window: int | None = None,
) -> Tensor | None:
    """Attention of many prompts to themselves in one call, to the bit what `prefill_attention` gives for each.

    qkv: q (T, heads, d), k and v (T, kv_heads, d) of packed tokens, which `takes_packed` must accept. out: receives the
    answers, contiguous, like q; tokens of no prompt are left alone. Returns the column sums, (T kv_heads,) float32:
    (kv_heads, length) of a prompt from its `first` x kv_heads on; None if they are not asked for. Raises ValueError
    where there is no kernel, or `out` is of another kind.
    """
    q = qkv[0]
    if library() is None or out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"q {tuple(q.shape)}, out {tuple(out.shape)} {out.dtype}: no kernel for prompts packed like that"
        )
    if min(len(x) for x in qkv) < prompts.tokens:
        raise ValueError(f"{[len(x) for x in qkv]} tokens, and prompts up to the {prompts.tokens}th")
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in qkv]
    task = _task(heads_first[0], heads_first[1], heads_first[2], logits, None, window)
    task.length, task.parts, task.prompts = prompts.longest, 1, len(prompts.table)
    task.packed = prompts.table.data_ptr()
    sums = LARGE.empty(len(q) * task.kv_heads, dtype=torch.float32) if column_sums else None
    _run(task, out, sums, prompts.tokens)
    return sums


def _run(task: Structure, out: Tensor, sums: Tensor | None, tokens: int) -> None:
    """Computes `task` into `out` and `sums`, in scratch memory of what `tokens` queries are allowed, sums of parts
    included."""
    each = function("prompt_scratch", "P", "q")(byref(task))
    taken = sums.nbytes if sums is not None and task.parts > 1 else 0
    tasks = task.prompts * task.rows * task.kv_heads * task.parts
    task.workers = max(1, min(torch.get_num_threads(), tasks, (_allowed(task, tokens) - taken) // each))
    scratch = LARGE.empty(task.workers * each + _ALIGNMENT, dtype=torch.uint8)
    task.scratch = -(-scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    task.point(out=out, sums=sums)
    function("prompt_attention", "P")(byref(task))


def _fits(q: Tensor, k: Tensor, v: Tensor, scale: float, past: KeysValues | None) -> bool:
    tensors = (q, k, v, *(past or ()))
    return (
        all(t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.stride(-1) == 1 for t in tensors)
        and q.numel() > 0
        and k.shape == v.shape
        and (len(k), k.shape[2:]) == (len(q), q.shape[2:])
        and q.shape[-1] % _LANES == 0
        and q.shape[-1] <= _MAX_DIM
        and scale > 0
        and library() is not None
    )


def _task(q: Tensor, k: Tensor, v: Tensor, logits: Logits, past: KeysValues | None, window: int | None) -> Structure:
    """The prompts, how they lie in memory, and how it is divided."""
    n, heads, length, d = q.shape
    task = _Prompt(scale=logits.scale, cap=logits.soft_cap or 0)
    task.point(q=q, k=k, v=v, sinks=logits.sinks)
    task.q_row, task.q_head, task.q_token, _ = q.stride()
    task.k_row, task.k_head, task.k_token, _ = k.stride()
    task.v_row, task.v_head, task.v_token, _ = v.stride()
    if past is not None:
        task.point(past_k=past.k, past_v=past.v)
        task.before = past.k.shape[1]
        task.past_k_head, task.past_k_token, _ = past.k.stride()
        task.past_v_head, task.past_v_token, _ = past.v.stride()
    task.rows, task.kv_heads, task.length, task.d = n, k.shape[1], length, d
    # C counts in 32 bits from a window's edge, and one that nothing has left hides nothing.
    task.window = window if window is not None and window < task.before + length else 0
    task.group, task.prompts = heads // task.kv_heads, 1
    task.queries = _queries(task.group)
    task.parts = _parts(length, task.queries, n * task.kv_heads)
    return task


def _parts(length: int, queries: int, heads: int) -> int:
    """Into how many tasks the blocks of `queries` tokens of a prompt are divided, where so many heads are computed."""
    return max(1, min(-(-_TASKS // heads), -(-length // queries) // _BLOCKS))


@cache
def _queries(group: int) -> int:
    """Tokens of a block: `_ROWS` rows or a little more, such that few are needed to fill whole tiles."""
    fewest = -(-_ROWS // group)
    counts = range(fewest, max(fewest, _MOST_ROWS // group) + 1)
    return min(counts, key=lambda count: -(-count * group // _TILE) * _TILE / (count * group))


def _allowed(task: Structure, tokens: int) -> int:
    """Bytes that the scratch of all workers may take for so many queries, if one alone does not need more."""
    keys = task.kv_heads * task.group * (task.before + task.length)
    return _SCRATCH_PER_LOGIT * min(max(_LOGITS, _LOGITS_PER_KEY * keys), tokens * keys)


def keeps(*tensors: Tensor) -> bool:
    """Whether `keep_prompts` can be had, and takes these keys and values, or those of a cache."""
    return library() is not None and all(x.device.type == "cpu" and x.stride(-1) == 1 for x in tensors)


def keep_prompts(
    prompts: PackedPrompts,
    packed: KeysValues,
    cache: KeysValues,
    window: int | None,
    sums: Tensor | None = None,
    ranks: tuple[Tensor, Tensor] | None = None,
    packings: tuple[CachePacking, CachePacking] | None = None,
    scales: tuple[Tensor, Tensor | None] | None = None,
    errors: RoundingErrors | None = None,
) -> None:
    """Chooses the tokens of `prompts` that stay, and moves them into the first slots of a cache's rows, in time order.

    packed: K and V (T, kv_heads, d), the last dimension contiguous; cache: K and V (rows, kv_heads, capacity, d) of the
    same dtype, contiguous; slots behind these tokens are left alone. With `packings` the cache is uint8, and its last
    dimension the bytes of a packed key, or value. window: tokens that a query sees, itself included.
    sums (T kv_heads,) float32: scores, (kv_heads, length) of a prompt from its `first` x kv_heads on; None: none has
    heavy tokens to choose. ranks, with sums: score and position of every slot, (rows, kv_heads, capacity) float32 and
    int32; in these rows both are overwritten, with +inf and -1 in empty slots, and +inf for sinks. scales, with
    packings: factors of keys, and means that keys are less before; errors: the rounding errors of the newest tokens
    and the first, which are overwritten in these rows.

    Raises ValueError where that does not fit together, MemoryError where a few KiB are not to be had.
    """
    rows, kv_heads, capacity, piece = cache.k.shape
    dim, kept = (piece, cache.k.dtype) if packings is None else (packed.k.shape[-1], packed.k.dtype)
    pieces = (piece, piece) if packings is None else tuple(packing.nbytes for packing in packings)
    fits = all(x.shape[1:] == (kv_heads, dim) and x.dtype == kept for x in packed)
    slots = rows, kv_heads, capacity
    alike = all(x.shape == (*slots, each) for x, each in zip(cache, pieces, strict=True))
    alike = alike and cache.v.dtype == cache.k.dtype
    if library() is None or not (fits and alike) or min(map(len, packed)) < prompts.tokens:
        raise ValueError(f"K {tuple(packed.k.shape)} for a cache of {tuple(cache.k.shape)}, {prompts.tokens} tokens")
    if prompts.places > rows or prompts.slots > capacity or (sums is None) != (ranks is None):
        raise ValueError(f"{prompts.slots} slots of {prompts.places} rows for a cache of {tuple(cache.k.shape)}")
    if sums is not None and (sums.dtype != torch.float32 or sums.numel() < prompts.tokens * kv_heads):
        raise ValueError(f"{sums.numel()} sums of {sums.dtype} for {prompts.tokens} tokens of {kv_heads} heads")
    if ranks is not None and any(rank.shape != cache.k.shape[:3] for rank in ranks):
        raise ValueError(f"ranks {[tuple(rank.shape) for rank in ranks]} for a cache of {tuple(cache.k.shape)}")
    (k, v), size, (score, pos) = packed, packed.k.itemsize, ranks or (None, None)
    task = _Keep(count=len(prompts.table), kv_heads=kv_heads, capacity=capacity, dim=dim, wide=size == 4)
    task.point(k=k, v=v, to_k=cache.k, to_v=cache.v, rows=prompts.table, sums=sums, score=score, pos=pos)
    task.k_token, task.k_head = (step * size for step in k.stride()[:2])
    task.v_token, task.v_head = (step * size for step in v.stride()[:2])
    if packings is not None:
        task.k_bits, task.v_bits = (packing.bits for packing in packings)
        task.block = packings[0].block
    if scales is not None:
        task.point(scales=scales[0], means=scales[1])
    if errors is not None:
        task.newest, task.mended = errors.newest, errors.count
        task.point(lost_k=errors.lost.k, lost_v=errors.lost.v, lost_slots=errors.slots)
    task.window, task.threads = window or 0, torch.get_num_threads()
    if function("keep_prompts", "P", "i")(byref(task)):
        raise MemoryError("no memory for the positions that stay")


def settle_key_scales(
    prompts: PackedPrompts, q: Tensor, k: Tensor, scales: Tensor, means: Tensor | None, last: int, most: int
) -> None:
    """Sets scales and means (rows, kv_heads, d) of the rows of `prompts`, by q (T, heads, d) and k (T, kv_heads, d) of
    packed tokens, all of one dtype: see `KeyScales`.

    last: queries and keys, at the end, that scales follow from; most: of an exponent. Raises ValueError where that does
    not fit together, or there is no kernel.
    """
    heads, dim = k.shape[1:]
    given = [scales] if means is None else [scales, means]
    fits = all(x.is_contiguous() and x.dtype == k.dtype == q.dtype and x.shape[1:] == k.shape[1:] for x in given)
    if library() is None or not fits or q.shape[1] % heads or min(len(q), len(k)) < prompts.tokens:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} {k.dtype} for scales {tuple(scales.shape)}")
    if prompts.places > len(scales):
        raise ValueError(f"{prompts.places} rows have no place among {len(scales)}")
    size, task = k.itemsize, _KeyScales(kv_heads=heads, group=q.shape[1] // heads, dim=dim, last=last, most=most)
    task.point(q=q, k=k, scales=scales, means=means, rows=prompts.table)
    task.q_token, task.q_head = (step * size for step in q.stride()[:2])
    task.k_token, task.k_head = (step * size for step in k.stride()[:2])
    task.count, task.wide, task.threads = len(prompts.table), size == 4, torch.get_num_threads()
    function("key_scales", "P")(byref(task))
