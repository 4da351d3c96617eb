"""What the tokens of a cache are compared by, in C: rules that take torch many passes over keys or scores."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import fields, function, library


class _Ranks(ctypes.Structure):
    """The argument of `ranks_of`, as ranks.c describes it."""

    _fields_ = fields(
        "q rows kv_heads count dim bf16 threads row head key_row key_head",
        "P keys chosen pos rank",
    )


def serves(like: Tensor) -> bool:
    """Whether the kernels take tensors of this device and dtype."""
    return like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16) and library() is not None


def differences(keys: Tensor, pos: Tensor | None) -> Tensor:
    """keydiff's: one less the cosine of each key (b, kv_heads, N, d) with the mean direction of all that are held.

    pos: int32 (b, kv_heads, N), -1 where none is; None: all are. Returns float32 (b, kv_heads, N). Keys are read twice,
    as they are. MemoryError where a few KiB are not to be had.
    """
    if keys.stride(-1) != 1 or keys.stride(-2) != keys.shape[-1]:
        keys = keys.contiguous()
    task = _task(keys, pos)
    task.keys, task.dim, task.bf16 = keys.data_ptr(), keys.shape[-1], keys.dtype is torch.bfloat16
    task.key_row, task.key_head = keys.stride(0), keys.stride(1)
    return _run(task, keys.shape[:3])


def likeness(keys: Tensor, chosen: Tensor) -> Tensor:
    """rkv's: the mean cosine of each key with those `chosen`, (b, kv_heads, N); 0 for others.

    keys: float32 (b, kv_heads, N, d). chosen: bool (b, kv_heads, N). A key's cosine with itself counts as 0, and so
    does in its row the latest one above a half, or the first of those chosen.
    """
    keys, chosen = keys.contiguous(), chosen.contiguous()
    task = _task(keys, None)
    task.keys, task.dim, task.chosen = keys.data_ptr(), keys.shape[-1], chosen.data_ptr()
    task.key_row, task.key_head = keys.stride(0), keys.stride(1)
    return _run(task, keys.shape[:3])


def _task(like: Tensor, pos: Tensor | None) -> _Ranks:
    rows, kv_heads, count = like.shape[:3]
    task = _Ranks(rows=rows, kv_heads=kv_heads, count=count, threads=torch.get_num_threads())
    if pos is not None:
        task.pos, task.row, task.head = pos.data_ptr(), pos.stride(0), pos.stride(1)
    return task


def _run(task: _Ranks, size: torch.Size) -> Tensor:
    ranks = torch.empty(size)
    task.rank = ranks.data_ptr()
    if function("ranks_of", "P", "i")(ctypes.byref(task)):
        raise MemoryError("no memory to rank the tokens of a cache")
    return ranks
