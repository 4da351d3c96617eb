"""Ranks of a cache's tokens by keydiff and rkv, in C, as torch takes many passes; and the recall of evicted tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.config.recall import FIRST, MOST, NEAR, index_blocks, index_packing
from h2o_flexgen.kernels.decode import MAX_PACKED_DIM
from h2o_flexgen.kernels.native import function, structure
from h2o_flexgen.kernels.states import serves
from h2o_flexgen.kernels.types import KeysValues, Logits, Ranking, fit

_Ranks = structure("ranks.c", "Ranks")
_Recall, _Filling = structure("recall.c", "Recall"), structure("recall.c", "Filling")


def differences(keys: Tensor, pos: Tensor | None) -> Tensor:
    """keydiff's: one less the cosine of each key (b, kv_heads, N, d) with the mean direction of all that are held.

    pos: int32 (b, kv_heads, N), -1 where none is; None: all are. Returns float32 (b, kv_heads, N). Keys are read twice,
    as they are. MemoryError where a few KiB are not to be had.
    """
    if keys.stride(-1) != 1 or keys.stride(-2) != keys.shape[-1]:
        keys = keys.contiguous()
    return _ranked(keys, pos, None)


def likeness(keys: Tensor, chosen: Tensor) -> Tensor:
    """rkv's: the mean cosine of each key with those `chosen`, (b, kv_heads, N); 0 for others.

    keys: float32 (b, kv_heads, N, d). chosen: bool (b, kv_heads, N). A key's cosine with itself counts as 0, and so
    does in its row the latest one above a half, or the first of those chosen.
    """
    return _ranked(keys.contiguous(), None, chosen.contiguous())


def _ranked(keys: Tensor, pos: Tensor | None, chosen: Tensor | None) -> Tensor:
    (rows, kv_heads, count, dim), ranks = keys.shape, torch.empty(keys.shape[:3])
    task = _Ranks(rows=rows, kv_heads=kv_heads, count=count, dim=dim, threads=torch.get_num_threads())
    task.point(keys=keys, rank=ranks, pos=pos, chosen=chosen)
    task.bf16, task.key_row, task.key_head = keys.dtype is torch.bfloat16, keys.stride(0), keys.stride(1)
    if pos is not None:
        task.row, task.head = pos.stride(0), pos.stride(1)
    if function("ranks_of", "P", "i")(ctypes.byref(task)):
        raise MemoryError("no memory to rank the tokens of a cache")
    return ranks


class ShelvedKeys(NamedTuple):
    """Of a row all tokens so far, each at its position: keys and values (kv_heads, length, dim), if they are in memory,
    and the keys of the index as `NativeRecall.index` makes it."""

    held: KeysValues | None
    packed: Tensor
    length: int
    recent: int
    """Last tokens that do not leave."""
    most: int
    """Tokens that may come back at once."""
    first: int
    """Position of the token of step 0."""
    taken: int
    """Steps before that."""


class Recalled(NamedTuple):
    """Sums over rows and KV heads for a step of recall: tokens that went to shelves, looks, tokens that came back; of
    rated looks the worth of the tokens kept after each, and the greatest worth of as many tokens."""

    written: int
    looks: int = 0
    recalled: int = 0
    held: float = 0.0
    best: float = 0.0


def _pointers(held: KeysValues | None) -> tuple[int, int]:
    return (0, 0) if held is None else (held.k.data_ptr(), held.v.data_ptr())


class NativeRecall:
    """The recall of one cache in host memory, in C: see cache/recall.py. Used by one thread; no result depends on how
    many torch has.

    Of shelves that are not there as well it tells what is to come back: `moves`, int32 (rows, kv_heads, 64, 2), the
    slot of its head that a token goes into and its position, -1 behind the last one.
    """

    def __init__(
        self, rows: Sequence[ShelvedKeys | None], dim: int, every: int, rates: int, window: int | None
    ) -> None:
        """rows: None for those without a shelf. every: after its first steps a row looks in the first of so many.
        rates: of so many looks one is rated."""
        self._rows = rows
        table = [[0] * 8 if row is None else [*_pointers(row.held), row.packed.data_ptr(), *row[2:]] for row in rows]
        kv_heads = next((len(row.packed) for row in rows if row is not None), 0)
        self.moves = torch.empty(len(rows), kv_heads, MOST, 2, dtype=torch.int32)
        self._table = torch.tensor(table, dtype=torch.int64)
        self._task = _Recall(rows=len(rows), first=FIRST, every=every, rates=rates, window=window or 0, near=NEAR)
        self._task.block = index_packing(dim).block
        moves = any(row is not None and row.held is None for row in rows)
        self._task.point(row=self._table, moves=self.moves if moves else None)
        self._pointer, self._call = ctypes.byref(self._task), function("recall_step", "P", "i")
        self._asked = self._task.q, self._task.new_k, self._task.new_v
        self._kept, self._dtype = tuple[Tensor, ...](), torch.float32
        self._strides: object = None

    @staticmethod
    def serves(like: Tensor) -> bool:
        """Whether there is a kernel for caches and shelves as `like` (..., dim)."""
        return serves(like) and like.shape[-1] <= MAX_PACKED_DIM

    @staticmethod
    def index(kv_heads: int, length: int, dim: int) -> Tensor:
        """An empty index of keys: uint8 (kv_heads, blocks, bytes) of 16 tokens each, as recall.c has them."""
        return torch.empty(kv_heads, *index_blocks(length, dim), dtype=torch.uint8)

    def step(
        self, number: int, qkv: tuple[Tensor, Tensor, Tensor], logits: Logits, held: KeysValues, ranking: Ranking
    ) -> Recalled:
        """Before the tokens of step `number` attend: q (b, heads, dim), k and v (b, kv_heads, dim), which go to
        shelves. Recalled tokens go into slots of `held` (b, kv_heads, capacity, dim), unless these are packed, and of
        `ranking`. MemoryError where a few KiB are not to be had."""
        task, kept = self._task, (*held, *ranking)
        if len(kept) != len(self._kept) or not all(map(is_, kept, self._kept)):
            self._attach(held, ranking, qkv)
        q, k, v = (fit(x, self._dtype) for x in qkv)
        strides = q.stride(), k.stride(), v.stride()
        if strides != self._strides:
            self._strides, size = strides, self._dtype.itemsize
            for vectors, stride in zip(self._asked, strides, strict=True):
                vectors.row, vectors.head = stride[0] * size, stride[1] * size
        for vectors, x in zip(self._asked, (q, k, v), strict=True):
            vectors.at = x.data_ptr()
        task.step, task.threads = number, torch.get_num_threads()
        task.scale, task.cap = logits.scale, logits.soft_cap or 0
        if self._call(self._pointer):
            raise MemoryError("no memory to look through what waits")
        if not task.looks:
            return Recalled(task.written)
        return Recalled(task.written, task.looks, task.recalled, task.held, task.best)

    def _attach(self, held: KeysValues, ranking: Ranking, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
        """These are what steps change; kept, so that they are the same as long as they are the same tensors."""
        like, task = qkv[1] if held.k.dtype is torch.uint8 else held.k, self._task
        rows, task.kv_heads, task.capacity, _ = held.k.shape
        if rows != len(self._rows) or not (held.k.is_contiguous() and held.v.is_contiguous()):
            raise ValueError(f"caches of {tuple(held.k.shape)}: needed {len(self._rows)} rows, contiguous")
        task.dim, task.group = qkv[0].shape[-1], qkv[0].shape[1] // task.kv_heads
        task.point(k=held.k, v=held.v, score=ranking.score, pos=ranking.pos, next=ranking.free)
        task.bf16 = like.dtype is torch.bfloat16
        self._kept, self._dtype, self._strides = (*held, *ranking), like.dtype, None

    @staticmethod
    def fill(new: KeysValues, start: int, shelf: KeysValues | None, packed: Tensor, length: int) -> None:
        """New tokens (kv_heads, n, dim) go to a shelf (kv_heads, length, dim), if it is in memory, and into the `index`
        `packed`, from position `start` on."""
        k, v = (fit(x, (new.k if shelf is None else shelf.k).dtype) for x in new)
        (heads, count, dim), size = k.shape, k.itemsize
        task = _Filling(heads, count, start, length, dim, k.dtype is torch.bfloat16, index_packing(dim).block)
        task.threads = torch.get_num_threads()
        task.k_head, task.k_token, task.v_head, task.v_token = (step * size for x in (k, v) for step in x.stride()[:2])
        task.point(new_k=k, new_v=v, index=packed)
        task.k, task.v = _pointers(shelf)
        function("recall_fill", "P")(ctypes.byref(task))
