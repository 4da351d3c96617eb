"""What stays of packed prompts, chosen and moved into a cache in host memory in one call, by `keep.c`."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.kernels.native.build import library
from h2o_flexgen.kernels.types import KeysValues, PackedPrompts

_Pointer, _Count = ctypes.c_void_p, ctypes.c_int64


class _Keep(ctypes.Structure):
    """The arguments of `keep_prompts`, as keep.c describes them."""

    _fields_ = (
        ("k", _Pointer),
        ("v", _Pointer),
        *((name, _Count) for name in ("k_token", "k_head", "v_token", "v_head")),
        *((name, _Pointer) for name in ("to_k", "to_v", "sums", "score", "pos", "rows")),
        *((name, _Count) for name in ("count", "kv_heads", "capacity", "bytes", "window", "threads")),
    )


def keeps(*tensors: Tensor) -> bool:
    """Whether the kernel can be had, and takes these keys and values, or those of a cache."""
    return _native() is not None and all(x.device.type == "cpu" and x.stride(-1) == 1 for x in tensors)


def keep_prompts(
    prompts: PackedPrompts,
    packed: KeysValues,
    cache: KeysValues,
    window: int | None,
    sums: Tensor | None = None,
    ranks: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Chooses what stays of `prompts`, and moves it into the first slots of their rows of a cache, in time order.

    packed: K and V (T, kv_heads, d), the last dimension contiguous; cache: K and V (rows, kv_heads, capacity, d) of the
    same dtype, contiguous; nothing is written behind what stays. window: tokens that a query sees, itself included.
    sums (T kv_heads,) float32: scores, (kv_heads, length) of a prompt from its `first` x kv_heads on; None: none has
    heavy tokens to choose. ranks, with sums: score and position of every slot, (rows, kv_heads, capacity) float32 and
    int32; those of these rows are overwritten, with +inf and -1 in empty slots, and +inf for sinks.

    ValueError where that does not fit together, MemoryError where a few KiB are not to be had.
    """
    call = _native()
    rows, kv_heads, capacity, dim = cache.k.shape
    fits = all(x.shape[1:] == (kv_heads, dim) and x.dtype == cache.k.dtype for x in packed)
    alike = cache.v.shape == cache.k.shape and cache.v.dtype == cache.k.dtype
    if call is None or not (fits and alike) or min(map(len, packed)) < prompts.tokens:
        raise ValueError(f"K {tuple(packed.k.shape)} for a cache of {tuple(cache.k.shape)}, {prompts.tokens} tokens")
    if prompts.places > rows or prompts.slots > capacity or (sums is None) != (ranks is None):
        raise ValueError(f"{prompts.slots} slots of {prompts.places} rows for a cache of {tuple(cache.k.shape)}")
    if sums is not None and (sums.dtype != torch.float32 or sums.numel() < prompts.tokens * kv_heads):
        raise ValueError(f"{sums.numel()} sums of {sums.dtype} for {prompts.tokens} tokens of {kv_heads} heads")
    if ranks is not None and any(rank.shape != cache.k.shape[:3] for rank in ranks):
        raise ValueError(f"ranks {[tuple(rank.shape) for rank in ranks]} for a cache of {tuple(cache.k.shape)}")
    k, v = packed
    size = k.itemsize
    task = _Keep(k=k.data_ptr(), v=v.data_ptr(), to_k=cache.k.data_ptr(), to_v=cache.v.data_ptr())
    task.k_token, task.k_head = (step * size for step in k.stride()[:2])
    task.v_token, task.v_head = (step * size for step in v.stride()[:2])
    if sums is not None and ranks is not None:
        task.sums, task.score, task.pos = sums.data_ptr(), ranks[0].data_ptr(), ranks[1].data_ptr()
    task.rows, task.count = prompts.table.data_ptr(), len(prompts.table)
    task.kv_heads, task.capacity = kv_heads, capacity
    task.bytes, task.window, task.threads = dim * size, window or 0, torch.get_num_threads()
    if call(ctypes.byref(task)):
        raise MemoryError("no memory for the positions that stay")


@cache
def _native() -> Any:
    found = library()
    if found is None:
        return None
    found.keep_prompts.argtypes, found.keep_prompts.restype = (ctypes.POINTER(_Keep),), ctypes.c_int
    return found.keep_prompts
