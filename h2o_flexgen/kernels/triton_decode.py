"""The decode step of a KV cache on a GPU: write the new token, attend, add to the scores, free a slot. In one launch.

Imports Triton; see `triton_available`. What it takes and does is what `native.attend` takes and does on a CPU.

One program does the step of one row and KV head. Where these are fewer than the GPU has processors, and slots are many,
several programs share the slots of each, and a second launch joins their parts ("flash-decoding").

Nothing of a launch depends on the step, if that is a tensor: so that a CUDA graph can repeat it. Programs and scratch
are for the slots that will ever be occupied; each program reads as far as they are now, and one whose share is not
reached yet ends at once. Caches at a budget are full soon. A full cache that still has to grow does with fewer programs
until it has, which costs something only where rows are few, and there the weights take most of a step.

Bytes per step, row and KV head, with n slots occupied, dimension d, E bytes per number, G query heads per KV head: K
and V, 2 n d E (packed in 4 bits: n d x 1.125); with scores 12 n (score twice, position once); where scores or
probabilities are wanted logits, 8 n G, which stay in the second-level cache; probabilities 4 n. The new token, the
queries and the answers are 2 d E (2 + G). With d = 128, bfloat16, G = 4 and scores: 556 n, of which 512 n are K and V.
No slot is read that is not occupied and seen. A split step moves 8 G d more for each part.

Measured so far: nothing. These kernels were compiled for NVIDIA's architecture 9.0 and run in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.kernels.triton_decode_kernels import New, Results, join_kernel, split_kernel, step_kernel
from h2o_flexgen.kernels.triton_quant import Packed
from h2o_flexgen.kernels.triton_slots import Extent, Slots
from h2o_flexgen.kernels.triton_tiles import QUANT_GROUP, Form, Held
from h2o_flexgen.kernels.triton_tune import Config, fastest

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of queries and of new keys and values; K and V have the same one unless packed."""
MAX_DIM, PACKED_MULTIPLE, MAX_GROUP = 256, 16, 16
MIN_SPLIT = 256  # slots for which another program is worth its launch
PROCESSORS_INTERPRETED = 4
_NO_WINDOW = 1 << 30
_TILE_BYTES = 16384  # of K, and of V: with two of each on the way, 64 KiB of shared memory


class TritonAttend:
    """A `DecodeStep` on one device (of several GPUs torch's current one), in the order of one stream.

    As `DecodeStep` says, and `splits`: programs per row and KV head; None: chosen by their number. `tune`: time a few
    block sizes at the first step of a kind.
    """

    def __init__(
        self,
        rules: Sequence[Sequence[int]],
        size: tuple[int, int, int, int],
        device: torch.device | str,
        *,
        window: int | None = None,
        ranking: tuple[Tensor, Tensor, Tensor] | None = None,
        adds: bool = False,
        splits: int | None = None,
        tune: bool = True,
    ) -> None:
        rows, kv_heads, _, dim = size
        if len(rules) != rows or not 0 < dim <= MAX_DIM:
            raise ValueError(f"no kernel for {len(rules)} rules and a cache of {size}: at most {MAX_DIM} per head")
        if adds and ranking is None:
            raise ValueError("scores that grow, but no ranking")
        self._size, self._device, self._adds = size, torch.device(device), adds
        self._tune = tune and not interpreting()
        self._growth = sorted({(rule[0], rule[1]) for rule in rules})
        self._most = max(limit for _, limit in self._growth)
        self._splits = splits or _programs_wanted(rows * kv_heads, self._most, self._device)
        self._window = _NO_WINDOW if window is None else window
        self.used = torch.zeros(rows, kv_heads, dtype=torch.int64, device=device)
        table = torch.tensor([list(rule) for rule in rules], dtype=torch.int64, device=device)
        self._slots = Slots(table, self.used)
        if ranking is not None:
            score, pos, free = ranking
            self._slots = Slots(table, self.used, score, score, pos, free, free)
        self._held: Held | None = None
        self._dtype: torch.dtype | None = None  # of K and V; None: packed

    def attach(self, k: Tensor, v: Tensor) -> None:
        """See `DecodeStep`. ValueError for a dtype not in `DTYPES`."""
        for x in (k, v):
            if x.dtype not in DTYPES or x.dtype != k.dtype or x.shape != self._size or not x.is_contiguous():
                raise ValueError(f"{x.dtype} {tuple(x.shape)}: needed contiguous {self._size}, of one of {DTYPES}")
        self._held, self._dtype = Held(k, v), k.dtype

    def attach_packed(self, k: Packed, v: Packed) -> None:
        """As `attach`, of K and V in 4 bits and groups of 64: see `triton_quant`. New tokens are packed as they come.

        What is attended to is what is held, the new token included.
        """
        rows, kv_heads, capacity, dim = self._size
        if dim % PACKED_MULTIPLE:
            raise ValueError(f"{dim} numbers per head: needed a multiple of {PACKED_MULTIPLE} where they are packed")
        groups = (rows, kv_heads, capacity, -(-dim // QUANT_GROUP))
        for codes, *rest in (k, v):
            if codes.shape != (rows, kv_heads, capacity, dim // 2) or any(x.shape != groups for x in rest):
                raise ValueError(f"codes {tuple(codes.shape)}: needed 4 bits each for {self._size}, in groups of 64")
        self._held, self._dtype = Held(k.codes, v.codes, k.scale, k.low, v.scale, v.low), None

    def detach(self) -> None:
        """See `DecodeStep`."""
        self._held = None

    def step(
        self,
        number: int | Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        scale: float,
        *,
        fresh: Tensor | None = None,
        slots: Tensor | None = None,
        probs: Tensor | None = None,
    ) -> Tensor:
        """See `DecodeStep`. Heads are at most `MAX_GROUP` per KV head."""
        if self._held is None:
            raise RuntimeError("no K and V are attached")
        q, k, v = (self._fit(x) for x in qkv)
        rows, kv_heads, _, dim = self._size
        heads = q.shape[1]
        group = heads // kv_heads
        if q.shape != (rows, heads, dim) or heads % kv_heads or not k.shape == v.shape == (rows, kv_heads, dim):
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} for a cache of {self._size}")
        if not 1 <= group <= MAX_GROUP or q.dtype not in DTYPES:
            raise ValueError(f"{group} query heads per KV head of {q.dtype}: needed at most {MAX_GROUP}, of {DTYPES}")
        if probs is not None and probs.shape[-1] < (occupied := self._occupied(number)):
            raise ValueError(f"probabilities of {probs.shape[-1]} slots: {occupied} are occupied")
        new = New(q, k, v, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        state = self._slots._replace(given=slots, fresh=fresh)
        if isinstance(number, Tensor):
            state, number = state._replace(now=number, now_out=number), 0
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launch = _Launch(self, new, state, (out, probs), (number, scale * math.log2(math.e)))
        config = default_config(dim, q.dtype, self._dtype is None)
        if self._tune:
            config = fastest(launch.kind, candidates(dim, q.dtype, self._dtype is None), launch.rehearse)
        launch.run(config)
        return out

    def _occupied(self, number: int | Tensor) -> int:
        """Slots from the first on: at this step, or where only the device knows that, ever."""
        if isinstance(number, Tensor):
            return self._most
        return max(min(held + number + 1, limit) for held, limit in self._growth)

    def _fit(self, x: Tensor) -> Tensor:
        """In K's dtype, with the numbers of a head side by side."""
        if self._dtype is not None and x.dtype is not self._dtype:
            x = x.to(self._dtype)
        return x if x.stride(-1) == 1 else x.contiguous()


class _Launch:
    """One step, ready to be run in any configuration."""

    def __init__(
        self,
        owner: TritonAttend,
        new: New,
        slots: Slots,
        outputs: tuple[Tensor, Tensor | None],
        numbers: tuple[int, float],
    ) -> None:
        if owner._held is None:
            raise RuntimeError("no K and V are attached")
        self._held, self._new, self._slots, self._most = owner._held, new, slots, owner._most
        self._out, self._probs = outputs
        self._step, self._scale = numbers
        self._size, self._window, self._adds = owner._size, owner._window, owner._adds
        self._splits = owner._splits
        self._aside: Slots | None = None
        self._scratch: Tensor | None = None
        if self._adds or self._probs is not None:
            self._scratch = self._empty(self._rows_of_heads, self._width)

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides which configuration is the fastest."""
        q = self._new.q
        packed = self._held.k_scale is not None
        return (q.device, q.dtype, self._size[3], self._group, packed, self._scratch is not None, self._splits > 1)

    def run(self, config: Config) -> None:
        """Launches; changes the state."""
        self._launch(config, self._slots)

    def rehearse(self, config: Config) -> None:
        """Launches the same work, which may be done any number of times: the state goes elsewhere."""
        # Where the new token goes is read from `free` or follows from the step: what is written there is the same.
        if self._aside is None:
            self._aside = self._slots._replace(now_out=None)
            if self._slots.score is not None:
                score, free = torch.empty_like(self._slots.score), torch.empty_like(self._slots.free)
                self._aside = self._aside._replace(score_out=score, free_out=free)
        self._launch(config, self._aside)

    @property
    def _group(self) -> int:
        return self._new.q.shape[1] // self._size[1]

    @property
    def _rows_of_heads(self) -> int:
        return self._new.q.shape[0] * self._new.q.shape[1]

    @property
    def _width(self) -> int:
        # A multiple of 16 where that is free to choose: one compiled kernel for all widths, and aligned rows.
        return triton.cdiv(self._most, 16) * 16 if self._probs is None else self._probs.shape[-1]

    def _empty(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._new.q.device)

    def _launch(self, config: Config, slots: Slots) -> None:
        rows, kv_heads, capacity, _ = self._size
        tasks, form = rows * kv_heads, self._form(config)
        chunk = triton.cdiv(triton.cdiv(self._most, self._splits), form.block) * form.block
        splits = triton.cdiv(self._most, chunk)
        extent = Extent(kv_heads, capacity, self._width, splits, chunk, self._window)
        results = Results(self._out, self._probs, self._scratch, None, None, None)
        options = {"num_warps": config.warps}
        if splits == 1:
            step_kernel[(tasks,)](
                self._new, self._held, slots, results, extent, self._step, self._scale, form, **options
            )
            return
        parts = self._rows_of_heads * splits
        results = results._replace(mixed=self._empty(parts, form.dim), top=self._empty(parts), total=self._empty(parts))
        split_kernel[(tasks, splits)](
            self._new, self._held, slots, results, extent, self._step, self._scale, form, **options
        )
        join_kernel[(tasks,)](slots, results, extent, self._step, form, num_warps=8)

    def _form(self, config: Config) -> Form:
        packed, dim, group = self._held.k_scale is not None, self._size[3], self._group
        g = 1 if group == 1 else 16
        d = max(triton.next_power_of_2(dim), 16)
        scan = 1024 if g == 1 else 256
        return Form(dim, d, group, g, config.block, scan, config.stages, packed, self._adds, interpreting())


def _programs_wanted(tasks: int, slots: int, device: torch.device) -> int:
    """Splits that occupy the GPU twice over, if that takes any and each has enough to do."""
    processors = PROCESSORS_INTERPRETED
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    if tasks >= processors:
        return 1
    return max(1, min(triton.cdiv(2 * processors, tasks), slots // MIN_SPLIT))


def default_config(dim: int, dtype: torch.dtype, packed: bool = False) -> Config:
    """Tiles of 16 KiB, of 16 to 128 slots; half of that where they are unpacked, which takes registers."""
    size = triton.next_power_of_2(dim) * dtype.itemsize * (2 if packed else 1)
    return Config(min(128, max(16, _TILE_BYTES // size)), warps=4, stages=2)


def candidates(dim: int, dtype: torch.dtype, packed: bool = False) -> list[Config]:
    """What to choose from, the default first."""
    block = default_config(dim, dtype, packed).block
    sizes = [(block, 4, 2), (block, 4, 3), (block, 8, 2), (max(16, block // 2), 4, 3), (2 * block, 8, 2)]
    return [Config(*size) for size in sizes]
