"""The decode step of a KV cache on the CPU, in C: write the new token, attend, add to the scores, free a slot."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.native.build import library

DTYPES = (torch.float32, torch.bfloat16)
"""Of keys, values and queries."""
MAX_DIM = 256
"""Numbers per head."""

_Pointer, _Count = ctypes.c_void_p, ctypes.c_int64


class SlotRule(NamedTuple):
    """What the slots of a row follow from, beside the step: `Row` in attend.c."""

    held: int
    """Tokens kept of the prompt; they lie in the first slots, later ones in the next."""
    limit: int
    """Slots that the row ever occupies."""
    prompt: int
    """Tokens of the prompt."""
    ring: int
    """The slot that follows the last one, where no score decides."""
    sinks: int
    """First positions, which never go."""
    hides: int
    """How many of these are not seen once they have left the window."""
    recent: int
    """Last positions, which do not go."""
    evicts: int
    """The first step at whose end a token goes by its score."""


class Ranking(NamedTuple):
    """State of slots that are ranked by score; steps change all of it in place."""

    score: Tensor
    """(rows, kv_heads, capacity) float32, never negative; +inf for sinks and slots that are not occupied."""
    pos: Tensor
    """(rows, kv_heads, capacity) int32: positions."""
    free: Tensor
    """(rows * kv_heads,) int64: the slot of the next token, counted from the first slot of all rows."""


class _Vectors(ctypes.Structure):
    _fields_ = (("at", _Pointer), ("row", _Count), ("head", _Count))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _Count) for name in ("rows", "kv_heads", "group", "capacity", "dim", "bf16", "threads")),
        *((name, _Count) for name in ("step", "window", "adds")),
        ("scale", ctypes.c_double),
        *((name, _Pointer) for name in ("k", "v", "out")),
        *((name, _Vectors) for name in ("new_q", "new_k", "new_v")),
        *((name, _Pointer) for name in ("rule", "used", "given", "probs")),
        ("width", _Count),
        *((name, _Pointer) for name in ("next", "score", "pos", "fresh")),
    )


def available(dtype: torch.dtype, dim: int, device: torch.device) -> bool:
    """Whether the kernel can be had, and takes K and V of this kind."""
    return device.type == "cpu" and dtype in DTYPES and dim <= MAX_DIM and library("attend") is not None


class NativeAttend:
    """The decode steps of one cache. Holds the tensors that the C code has pointers to.

    Used by one thread; the work is spread over torch's threads, by row and KV head, and no result depends on how many.
    """

    def __init__(
        self,
        rules: Sequence[SlotRule],
        size: tuple[int, int, int, int],
        *,
        window: int | None = None,
        ranking: Ranking | None = None,
        adds: bool = False,
    ) -> None:
        """`size`: rows, kv_heads, capacity, dim. `window`: tokens that a query sees, itself included.

        Without a `ranking` slots are taken in order of arrival. `adds`: scores grow by the probabilities, in the mean
        over the query heads that share a KV head.
        """
        found = library("attend")
        if found is None or len(rules) != size[0] or size[3] > MAX_DIM:
            raise ValueError(f"no kernel for {len(rules)} rules and a cache of {size}: see `available`")
        self._call = found.attend_step
        self._call.argtypes, self._call.restype = (ctypes.POINTER(_Step),), ctypes.c_int
        rows, kv_heads, self.capacity, dim = size
        self._rules = torch.tensor(rules, dtype=torch.int64)
        self._ranking = ranking
        self.used = torch.zeros(rows, kv_heads, dtype=torch.int64)
        """The slot of the last step's token."""
        self._new, self._rows = (rows, kv_heads, dim), rows
        self._step = _Step(rows=rows, kv_heads=kv_heads, capacity=self.capacity, dim=dim)
        self._step.rule, self._step.used = self._rules.data_ptr(), self.used.data_ptr()
        self._step.window, self._step.adds = window or 0, adds
        if ranking is not None:
            self._step.score, self._step.pos = ranking.score.data_ptr(), ranking.pos.data_ptr()
            self._step.next = ranking.free.data_ptr()
        self._kv: tuple[Tensor, Tensor] | None = None
        self._dtype = torch.float32
        self._strides: object = None
        self._pointer = ctypes.pointer(self._step)

    def attach(self, k: Tensor, v: Tensor) -> None:
        """K and V, contiguous (rows, kv_heads, capacity, dim), from now on. ValueError for a dtype not in `DTYPES`."""
        if k.dtype not in DTYPES or v.dtype != k.dtype:
            raise ValueError(f"K is {k.dtype} and V {v.dtype}: needed one of {DTYPES}")
        self._dtype, self._strides = k.dtype, None
        self._step.bf16 = k.dtype == torch.bfloat16
        self._kv = k, v
        self._step.k, self._step.v = k.data_ptr(), v.data_ptr()

    def detach(self) -> None:
        """Let go of K and V."""
        self._kv = None

    def step(
        self,
        number: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        scale: float,
        *,
        fresh: Tensor | None = None,
        slots: Tensor | None = None,
        probs: Tensor | None = None,
    ) -> Tensor:
        """Step `number`, 0 for the first after the prompts: what the queries see, (rows, heads, dim) in K's dtype.

        qkv: q (rows, heads, dim), k and v (rows, kv_heads, dim) of the new tokens. fresh: the scores they start with,
        float32 (rows, kv_heads); None: 0. slots: where they go, as `Ranking.free`, if the caller decides that. probs:
        takes the probabilities, float32 (rows, kv_heads, width), 0 where no token is seen. All three contiguous.
        MemoryError where a few KiB are not to be had.
        """
        q, k, v = (self._fit(x) for x in qkv)
        heads, step = q.shape[1], self._step
        if self._kv is None:
            raise RuntimeError("no K and V are attached")
        if q.shape != (self._rows, heads, self._new[2]) or heads % self._new[1] or not k.shape == v.shape == self._new:
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} for new tokens {self._new}")
        strides = (q.stride(), k.stride(), v.stride())
        if strides != self._strides:
            self._strides = strides
            for vectors, stride in zip((step.new_q, step.new_k, step.new_v), strides, strict=True):
                vectors.row, vectors.head = (count * self._dtype.itemsize for count in stride[:2])
        out = torch.empty(q.shape, dtype=self._dtype)
        step.new_q.at, step.new_k.at, step.new_v.at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        step.out, step.step, step.group, step.scale = out.data_ptr(), number, heads // self._new[1], scale
        step.threads = torch.get_num_threads()
        step.fresh = None if fresh is None else fresh.data_ptr()
        step.given = None if slots is None else slots.data_ptr()
        step.probs = None
        if probs is not None:
            step.probs, step.width = probs.data_ptr(), probs.shape[-1]
        if self._call(self._pointer):
            raise MemoryError("no memory for the logits of a decode step")
        return out

    def _fit(self, x: Tensor) -> Tensor:
        """In K's dtype, with the numbers of a head side by side."""
        if x.dtype is not self._dtype:
            x = x.to(self._dtype)
        return x if x.stride(-1) == 1 else x.contiguous()
