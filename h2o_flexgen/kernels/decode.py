"""The decode step of a KV cache on the CPU, in C: write the new token, attend, add to the scores, free a slot."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_flexgen.config.model.packing import CachePacking
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.native import function, library, structure
from h2o_flexgen.kernels.types import RULES, Logits, Ranking, RankRule, RoundingErrors, SlotRule, fit

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
"""Of keys, values and queries."""
MAX_DIM, MAX_PACKED_DIM = 640, 256
"""Numbers per head, and where they are packed; DeepSeek's latents are 576."""


_Step, _Ranks = structure("attend.h", "Step"), structure("attend.c", "Ranks")


def available(dtype: torch.dtype, dim: int, device: torch.device, packed: bool = False) -> bool:
    """Whether the kernel can be had, and takes K and V of this kind."""
    most = MAX_PACKED_DIM if packed else MAX_DIM
    return device.type == "cpu" and dtype in DTYPES and dim <= most and library() is not None


class NativeAttend:
    """A `DecodeStep` for caches in host memory. Holds the tensors that the C code has pointers to.

    Used by one thread; the work is spread over torch's threads, by row and KV head, long ones by parts. No result
    depends on how many threads there are.
    """

    def __init__(
        self,
        rules: Sequence[SlotRule] | Tensor,
        size: tuple[int, int, int, int],
        *,
        window: int | None = None,
        ranking: Ranking | None = None,
        adds: bool = False,
        masks: Tensor | None = None,
        rule: RankRule | None = None,
        packings: tuple[CachePacking, CachePacking] | None = None,
        errors: RoundingErrors | None = None,
    ) -> None:
        """As `DecodeStep` says; rules may be (rows, 8) int64. ValueError where there is no kernel, see `available`.

        masks: positions, as a ranking has them, where slots may hold tokens that have left the window, beside the sinks
        that rules hide.

        rule: how slots of a ranking are compared; None: by their scores. With `packings` K and V are packed so, uint8
        (rows, kv_heads, capacity, bytes of a piece). errors: the rounding errors of the newest tokens, which each step
        updates, and of the first.
        """
        if library() is None or len(rules) != size[0] or size[3] > MAX_DIM:
            raise ValueError(f"no kernel for {len(rules)} rules and a cache of {size}: see `available`")
        self._call, self._pick = function("attend_step", "P", "i"), function("next_slots", "P")
        rows, kv_heads, self.capacity, dim = size
        self._rules = rules if isinstance(rules, Tensor) else torch.tensor(rules, dtype=torch.int64)
        self.used = torch.zeros(rows, kv_heads, dtype=torch.int64)
        self._size, self._new, self._rows = tuple(size), (rows, kv_heads, dim), rows
        step = self._step = _Step(rows=rows, kv_heads=kv_heads, capacity=self.capacity, dim=dim, window=window or 0)
        step.adds, step.masks = adds, masks is not None and window is not None
        step.point(rule=self._rules, used=self.used, pos=masks)
        self._packings, self._errors, self._held = packings, errors, (ranking, masks, rule)
        if packings is not None:
            step.k_bits, step.v_bits = (packing.bits for packing in packings)
            step.block = packings[0].block
        if ranking is not None:
            step.point(score=ranking.score, pos=ranking.pos, next=ranking.free)
        if rule is not None:
            step.by = RULES.index(rule.by)
            step.point(squares=rule.squares, scopes=rule.scopes)
        if errors is not None:
            step.mended = errors.count
            step.point(lost_k=errors.lost.k, lost_v=errors.lost.v, lost_slots=errors.slots)
        self._scales: list[Tensor] = []
        self._kv: tuple[Tensor, Tensor] | None = None
        self._dtype = torch.float32
        self._strides: object = None
        self._asked, self._new_k, self._new_v = self._step.new_q, self._step.new_k, self._step.new_v
        self._pointer = ctypes.pointer(self._step)

    def attach(self, k: Tensor, v: Tensor) -> None:
        """See `DecodeStep`. ValueError for a dtype not in `DTYPES`, another size, and what is not contiguous."""
        sizes, dtypes = [self._size] * 2, DTYPES
        if self._packings is not None:
            sizes, dtypes = [(*self._size[:3], packing.nbytes) for packing in self._packings], (torch.uint8,)
        if k.dtype not in dtypes or v.dtype != k.dtype:
            raise ValueError(f"K is {k.dtype} and V {v.dtype}: needed one of {dtypes}")
        for name, x, size in zip("KV", (k, v), sizes, strict=True):
            if x.shape != size or not x.is_contiguous():
                raise ValueError(f"{name} is {tuple(x.shape)}: needed {tuple(size)}, contiguous")
        if self._packings is None:
            self._compute_in(k.dtype)
        self._kv = k, v
        self._step.point(k=k, v=v)

    def scale_keys(self, scales: Tensor, means: Tensor | None) -> None:
        """Packed keys are kept less `means`, unless None, times `scales`, powers of two that queries are divided by.

        Both (rows, kv_heads, d), contiguous, in the dtype of the steps' q, k and v, which the caller leaves unscaled.
        """
        self._scales = [x for x in (scales, means) if x is not None]
        for x in self._scales:
            if x.shape != self._new or not x.is_contiguous() or self._packings is None:
                raise ValueError(f"{tuple(x.shape)}: needed {self._new}, contiguous, for packed keys")
        self._step.point(key_scales=scales, key_means=means)

    def _compute_in(self, dtype: torch.dtype) -> None:
        """The dtype that numbers are in, or are expanded to."""
        self._dtype, self._strides = dtype, None
        self._step.bf16 = dtype == torch.bfloat16

    def detach(self) -> None:
        self._kv = None

    def step(
        self,
        number: int | Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        logits: Logits,
        *,
        fresh: Tensor | None = None,
        slots: Tensor | None = None,
        probs: Tensor | None = None,
    ) -> Tensor:
        """See `DecodeStep`. `number` is a whole number. MemoryError where a few KiB are not to be had."""
        if isinstance(number, Tensor):
            raise TypeError("this kernel is told its step: it takes no tensor for it")
        if self._packings is not None and qkv[0].dtype is not self._dtype and qkv[0].dtype in DTYPES:
            self._compute_in(qkv[0].dtype)
        q, k, v = (fit(x, self._dtype) for x in qkv)
        heads, step = q.shape[1], self._step
        if any(x.dtype != self._dtype for x in self._scales):
            raise ValueError(f"q is {self._dtype}, and keys are scaled in another dtype")
        if self._errors is not None:
            step.newest_at = self._errors.at
        required(self._kv, "no K and V are attached")
        if q.shape != (self._rows, heads, self._new[2]) or heads % self._new[1] or not k.shape == v.shape == self._new:
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} for new tokens {self._new}")
        strides = (q.stride(), k.stride(), v.stride())
        if strides != self._strides:
            self._strides, size = strides, self._dtype.itemsize
            for vectors, stride in zip((self._asked, self._new_k, self._new_v), strides, strict=True):
                vectors.row, vectors.head = stride[0] * size, stride[1] * size
        out = q.new_empty(q.shape)  # takes half of the time of torch.empty
        self._asked.at, self._new_k.at, self._new_v.at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        step.out, step.step, step.group = out.data_ptr(), number, heads // self._new[1]
        step.threads, (step.scale, soft_cap, sinks) = torch.get_num_threads(), logits
        step.cap, step.sinks = soft_cap or 0, None if sinks is None else sinks.data_ptr()
        step.fresh = None if fresh is None else fresh.data_ptr()
        step.given = None if slots is None else slots.data_ptr()
        step.probs = None
        if probs is not None:
            occupied = int(torch.minimum(self._rules[:, 0] + number + 1, self._rules[:, 1]).max())
            if probs.shape[-1] < occupied:
                raise ValueError(f"room for {probs.shape[-1]} probabilities of a row: {occupied} are occupied")
            step.probs, step.width = probs.data_ptr(), probs.shape[-1]
        if self._call(self._pointer):
            raise MemoryError("no memory for the logits of a decode step")
        return out

    def pick(self, number: int, ranks: Tensor, pos: Tensor, free: Tensor) -> None:
        """The end of step `number`, whose ranks the caller has made: `free` becomes the next tokens' slots, in place.

        ranks: float32 (rows, kv_heads, occupied or more), the last dimension contiguous, never negative; sinks are not
        looked at. pos, free: as in a `Ranking`; `free` is where the step's tokens are.
        """
        rows, kv_heads, _ = self._new
        if ranks.stride(-1) != 1:
            ranks = ranks.contiguous()
        task = _Ranks(rows, kv_heads, self.capacity, number, self._step.window, ranks.stride(0), ranks.stride(1))
        task.point(rule=self._rules, rank=ranks, pos=pos, next=free)
        self._pick(ctypes.byref(task))
