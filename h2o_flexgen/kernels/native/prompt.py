"""Attention of prompts by `prompt.c`: bfloat16 on a CPU. Everything else goes to torch."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from h2o_flexgen.kernels import torch_cpu
from h2o_flexgen.kernels.large import LARGE
from h2o_flexgen.kernels.native import build
from h2o_flexgen.kernels.types import KeysValues, PackedPrompts, PrefillAttention

_TILE = 6  # rows of queries that are multiplied together (4 with AVX2): a block fills whole ones
_ROWS = 24  # of a block: each reads the keys and values once, and all of them see what the last one sees
_MOST_ROWS = 48
_LANES, _MAX_DIM = 16, 256  # a head's dimensions: a multiple, and at most
_TASKS = 32  # wanted, where a few long prompts have less heads than that
_BLOCKS = 8  # in a task, at least: it packs the keys and values for itself
_ALIGNMENT = 64
_SCRATCH_PER_LOGIT, _LOGITS, _LOGITS_PER_KEY = 14, 1 << 20, 16
"""Bytes of scratch for all workers: what torch's kernel has alive of as many logits, see `schedule/workspace.py`."""


class _Prompt(ctypes.Structure):
    """The arguments of `prompt_attention`, as prompt_task.h describes them."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "past_k", "past_v", "out", "sums", "scratch")),
        *((f"{name}_{step}", c_int64) for name in ("q", "k", "v") for step in ("row", "head", "token")),
        *((f"{name}_{step}", c_int64) for name in ("past_k", "past_v") for step in ("head", "token")),
        *((name, c_int64) for name in ("rows", "kv_heads", "group", "length", "before", "d", "window", "queries")),
        *((name, c_int64) for name in ("parts", "workers", "prompts")),
        ("scale", c_double),
        ("packed", c_void_p),
    )


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
    """Causal attention and column sums; shapes and meaning as `reference.prefill_attention`.

    Any strides will do where the last dimension is contiguous. Weights are rounded to bfloat16 before they multiply the
    values, column sums come from what they were in float32: as torch's kernel has it. Equal inputs give equal bits,
    whatever the number of threads.
    """
    library = _library() if _fits(q, k, v, scale, past) else None
    if library is None:
        return torch_cpu.prefill_attention(q, k, v, scale, column_sums, past=past, window=window)
    n, heads, length, d = q.shape
    task = _shape(q, k, v, past, window)
    out = LARGE.empty(n, length, heads, d, dtype=q.dtype)
    size = task.parts, n, task.kv_heads, task.before + length
    sums = LARGE.empty(*size, dtype=torch.float32) if column_sums else None
    task.out, task.sums, task.scale = out.data_ptr(), None if sums is None else sums.data_ptr(), scale
    _run(library, task, n * length, 4 * sums.numel() if sums is not None and task.parts > 1 else 0)
    joined = None if sums is None else sums[0] if task.parts == 1 else sums.sum(0)
    return PrefillAttention(out.transpose(1, 2), joined)


def takes_packed(q: Tensor, k: Tensor, v: Tensor, scale: float, prompts: PackedPrompts) -> bool:
    """Whether `packed_attention` computes this, and there is nothing in it that is better divided."""
    if not _fits(q, k, v, scale, None) or _library() is None:
        return False
    return _parts(prompts.longest, _queries(q.shape[1] // k.shape[1]), len(prompts.table) * k.shape[1]) == 1


def packed_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    prompts: PackedPrompts,
    scale: float,
    column_sums: bool,
    out: Tensor,
    *,
    window: int | None = None,
) -> Tensor | None:
    """Attention of many prompts to themselves in one call, to the bit what `prefill_attention` gives for each.

    qkv: q (T, heads, d), k and v (T, kv_heads, d) of packed tokens, with which `takes_packed` agrees. out: takes what
    they see, contiguous, like q; tokens of no prompt are left alone. Returns the column sums, (T kv_heads,) float32:
    (kv_heads, length) of a prompt from its `first` x kv_heads on; None if they are not asked for. ValueError where
    there is no kernel, or `out` is of another kind.
    """
    library, q = _library(), qkv[0]
    if library is None or out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(
            f"q {tuple(q.shape)}, out {tuple(out.shape)} {out.dtype}: no kernel for prompts packed like that"
        )
    if min(len(x) for x in qkv) < prompts.tokens:
        raise ValueError(f"{[len(x) for x in qkv]} tokens, and prompts up to the {prompts.tokens}th")
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in qkv]
    task = _shape(heads_first[0], heads_first[1], heads_first[2], None, window)
    task.length, task.parts, task.prompts = prompts.longest, 1, len(prompts.table)
    task.packed = prompts.table.data_ptr()
    sums = LARGE.empty(len(q) * task.kv_heads, dtype=torch.float32) if column_sums else None
    task.out, task.sums, task.scale = out.data_ptr(), None if sums is None else sums.data_ptr(), scale
    _run(library, task, prompts.tokens, 0)
    return sums


def _run(library: ctypes.CDLL, task: _Prompt, tokens: int, taken: int) -> None:
    """Computes `task`, in scratch memory of what `tokens` queries are allowed less `taken` bytes."""
    each = library.prompt_scratch(byref(task))
    tasks = task.prompts * task.rows * task.kv_heads * task.parts
    task.workers = max(1, min(torch.get_num_threads(), tasks, (_allowed(task, tokens) - taken) // each))
    scratch = LARGE.empty(task.workers * each + _ALIGNMENT, dtype=torch.uint8)
    task.scratch = -(-scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    library.prompt_attention(byref(task))


@cache
def _library() -> ctypes.CDLL | None:
    library = build.library()
    if library is not None:
        library.prompt_scratch.restype, library.prompt_scratch.argtypes = c_int64, (c_void_p,)
        library.prompt_attention.restype, library.prompt_attention.argtypes = None, (c_void_p,)
    return library


def _fits(q: Tensor, k: Tensor, v: Tensor, scale: float, past: KeysValues | None) -> bool:
    """Whether prompt.c computes this."""
    tensors = (q, k, v, *(past or ()))
    return (
        all(t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.stride(-1) == 1 for t in tensors)
        and q.numel() > 0
        and k.shape == v.shape
        and (len(k), k.shape[2:]) == (len(q), q.shape[2:])
        and q.shape[-1] % _LANES == 0
        and q.shape[-1] <= _MAX_DIM
        and scale > 0
    )


def _shape(q: Tensor, k: Tensor, v: Tensor, past: KeysValues | None, window: int | None) -> _Prompt:
    """What is asked, how it lies in memory, and how it is divided."""
    n, heads, length, d = q.shape
    task = _Prompt(q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr())
    task.q_row, task.q_head, task.q_token, _ = q.stride()
    task.k_row, task.k_head, task.k_token, _ = k.stride()
    task.v_row, task.v_head, task.v_token, _ = v.stride()
    if past is not None:
        task.past_k, task.past_v, task.before = past[0].data_ptr(), past[1].data_ptr(), past[0].shape[1]
        task.past_k_head, task.past_k_token, _ = past[0].stride()
        task.past_v_head, task.past_v_token, _ = past[1].stride()
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


def _allowed(task: _Prompt, tokens: int) -> int:
    """Bytes that the scratch of all workers may take for so many queries, if one alone does not need more."""
    keys = task.kv_heads * task.group * (task.before + task.length)
    return _SCRATCH_PER_LOGIT * min(max(_LOGITS, _LOGITS_PER_KEY * keys), tokens * keys)
