"""The decode step of a KV cache on a GPU: write the new token, attend, add to scores, free a slot; one launch or two.

Imports Triton; see `triton_available`. The counterpart of `decode.NativeAttend` on a CPU, but without its `masks`,
`rule`, `exact` and sink logits.

One program does the step of one row and KV head, a task. A processor is busy with about three programs at a time: where
tasks are fewer and slots are many, several programs share the slots of each task, and a second launch joins their parts
("flash-decoding").

If the step's number is a tensor, a launch does not depend on it: a CUDA graph can repeat it. Programs and scratch
are for the slots that will ever be occupied; each program reads as far as they are now, and one whose share is not
reached yet ends at once. Caches at a budget are full soon. A full cache that still has to grow does with fewer programs
until it has, which costs something only where rows are few, and there the weights take most of a step.

Bytes per step, row and KV head, with n slots occupied, dimension d, E bytes per number, G query heads per KV head: K
and V, 2 n d E (packed in 4 bits: n d x 1.125); with scores 12 n (score twice, position once); where scores or
probabilities are wanted logits, 8 n G, which stay in the second-level cache; probabilities 4 n. The new token, the
queries and the answers are 2 d E (2 + G). With d = 128, bfloat16, G = 4 and scores: 556 n, of which 512 n are K and V.
No slot is read that is not occupied and seen. A split step moves 8 G d more for each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from h2o_flexgen.errors import required
from h2o_flexgen.kernels.triton_available import interpreting
from h2o_flexgen.kernels.triton_decode_kernels import (
    QUANT_GROUP,
    DecodeForm,
    DecodeSizes,
    Held,
    New,
    Results,
    Slots,
    join_kernel,
    split_kernel,
    step_kernel,
)
from h2o_flexgen.kernels.triton_tune import Config, fastest
from h2o_flexgen.kernels.types import Logits, Quantised, fit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of queries and of new keys and values; K and V have the same one unless packed."""
MAX_DIM, PACKED_MULTIPLE, MAX_GROUP = 256, 16, 16
RESIDENT = 3  # programs that a processor is to have: as many as it holds of the first candidate, dimension 128
MIN_SPLIT = 256  # slots for which another program is worth its launch
SCAN = 1024  # slots whose scores four warps add to at a time, eight of each thread
PROCESSORS_INTERPRETED = 4
_JOIN_WARPS = 8
_NO_WINDOW = 1 << 30
_TILE_BYTES = 8192  # of K, and of V


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
        self.size, self.adds, self.window = size, adds, _NO_WINDOW if window is None else window
        self._tune = tune and not interpreting()
        self._growth = sorted({(rule[0], rule[1]) for rule in rules})
        self.most = max(limit for _, limit in self._growth)
        """Slots that any row ever occupies."""
        self.splits = splits or _programs_wanted(rows * kv_heads, self.most, torch.device(device))
        self.used = torch.zeros(rows, kv_heads, dtype=torch.int64, device=device)
        table = torch.tensor([list(rule) for rule in rules], dtype=torch.int64, device=device)
        self._slots = Slots(table, self.used)
        if ranking is not None:
            score, pos, free = ranking
            self._slots = Slots(table, self.used, score, score, pos, free, free)
        self._held: Held | None = None
        self.packed = 0, 0, 0
        """Of what is attached: the bits of packed K and V, and how far the codes and lines of slots are apart."""
        self._dtype: torch.dtype | None = None  # of K and V; None: packed

    def attach(self, k: Tensor, v: Tensor) -> None:
        """See `DecodeStep`. ValueError for a dtype not in `DTYPES`."""
        for x in (k, v):
            if x.dtype not in DTYPES or x.dtype != k.dtype or x.shape != self.size or not x.is_contiguous():
                raise ValueError(f"{x.dtype} {tuple(x.shape)}: needed contiguous {self.size}, of one of {DTYPES}")
        self._held, self._dtype, self.packed = Held(k, v), k.dtype, (0, 0, 0)

    def attach_packed(self, k: Quantised, v: Quantised) -> None:
        """As `attach`, of K and V in 4 or 8 bits and groups of 64: see `triton_quant`. Slots may lie apart, all alike.

        New tokens are packed as they come; queries attend to the packed numbers, the new token's included.
        """
        rows, kv_heads, capacity, dim = self.size
        if dim % PACKED_MULTIPLE:
            raise ValueError(f"{dim} numbers per head: needed a multiple of {PACKED_MULTIPLE} where they are packed")
        groups = (rows, kv_heads, capacity, -(-dim // QUANT_GROUP))
        bits = 8 * k.codes.shape[-1] // dim
        for codes, *rest in (k, v):
            fits = bits in (4, 8) and codes.shape == (rows, kv_heads, capacity, dim * bits // 8)
            if not fits or any(x.shape != groups for x in rest):
                raise ValueError(f"codes {tuple(codes.shape)}: needed 4 or 8 bits for {self.size}, in groups of 64")
        self._held, self._dtype = Held(k.codes, v.codes, k.scale, k.low, v.scale, v.low), None
        self.packed = bits, k.codes.stride(2), k.scale.stride(2)

    def detach(self) -> None:
        self._held = None

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
        """See `DecodeStep`. Heads are at most `MAX_GROUP` per KV head. ValueError for logits of sinks."""
        if logits.sinks is not None:
            raise ValueError("this kernel knows no logits of sinks")
        launch = self._launch(number, qkv, logits, fresh, slots, probs)
        launch.run(self._config(launch))
        return launch.out

    def compile(self, number: int | Tensor, qkv: tuple[Tensor, Tensor, Tensor], logits: Logits) -> None:
        """Compiles what `step` may launch for such arguments, and launches nothing: see `triton_tune.compiling`."""
        launch = self._launch(number, qkv, logits)
        for config in self._candidates(launch):
            launch.prepare(config)

    def _config(self, launch: _Launch) -> Config:
        configs = self._candidates(launch)
        return fastest(launch.kind, configs, launch.prepare, launch.rehearse) if len(configs) > 1 else configs[0]

    def _candidates(self, launch: _Launch) -> list[Config]:
        found = candidates(self.size[3], launch.out.dtype)
        return found if self._tune else found[:1]

    def _launch(
        self,
        number: int | Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        logits: Logits,
        fresh: Tensor | None = None,
        slots: Tensor | None = None,
        probs: Tensor | None = None,
    ) -> _Launch:
        attached = required(self._held, "no K and V are attached")
        q, k, v = (fit(x, self._dtype) for x in qkv)
        rows, kv_heads, _, dim = self.size
        heads = q.shape[1]
        group = heads // kv_heads
        if q.shape != (rows, heads, dim) or heads % kv_heads or not k.shape == v.shape == (rows, kv_heads, dim):
            raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} for a cache of {self.size}")
        if not 1 <= group <= MAX_GROUP or q.dtype not in DTYPES:
            raise ValueError(f"{group} query heads per KV head of {q.dtype}: needed at most {MAX_GROUP}, of {DTYPES}")
        if probs is not None:
            occupied = self.most  # ever, where only the device knows the step
            if not isinstance(number, Tensor):
                occupied = max(min(held + number + 1, limit) for held, limit in self._growth)
            if probs.shape[-1] < occupied:
                raise ValueError(f"probabilities of {probs.shape[-1]} slots: {occupied} are occupied")
        new = New(q, k, v, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        state = self._slots._replace(given=slots, fresh=fresh)
        if isinstance(number, Tensor):
            state, number = state._replace(now=number, now_out=number), 0
        return _Launch(self, attached, new, state, probs, number, logits.in_base_2)


@dataclass(eq=False)
class _Launch:
    """One step, ready to be run in any configuration. _counted: scale and soft cap of logits, which are in base 2."""

    _owner: TritonAttend
    _held: Held
    _new: New
    _slots: Slots
    _probs: Tensor | None
    _step: int
    _counted: tuple[float, float | None]
    _aside: Slots | None = None

    def __post_init__(self) -> None:
        rows, heads, _ = self._new.q.shape
        self._heads, self._group = rows * heads, heads // self._owner.size[1]
        # A multiple of 16 where that is free to choose: one compiled kernel for all widths, and aligned rows.
        self._width = triton.cdiv(self._owner.most, 16) * 16 if self._probs is None else self._probs.shape[-1]
        self.out = torch.empty_like(self._new.q, memory_format=torch.contiguous_format)
        scratch = self._owner.adds or self._probs is not None
        self._scratch = self._empty(self._heads, self._width) if scratch else None

    @property
    def kind(self) -> tuple[object, ...]:
        """The sizes that decide which configuration is the fastest; sizes to the next power of two."""
        q, owner, (rows, kv_heads, _, dim) = self._new.q, self._owner, self._owner.size
        sizes = [triton.next_power_of_2(size) for size in (rows * kv_heads, owner.most)]
        packed = owner.packed
        does = packed, self._scratch is not None, owner.splits > 1, self._counted[1] is not None
        return (q.device, q.dtype, dim, self._group, *does, *sizes)

    def run(self, config: Config) -> None:
        """Launches; changes the state."""
        self._launch(config, self._slots)

    def prepare(self, config: Config) -> None:
        """Compiles what `run` launches."""
        self._launch(config, self._slots, compile_only=True)

    def rehearse(self, config: Config) -> None:
        """Launches the same work at its largest, which may be done any number of times: the state goes elsewhere."""
        if self._aside is None:
            self._aside = self._rehearsal()
        self._launch(config, self._aside)

    def _rehearsal(self) -> Slots:
        """The state with all slots occupied, since what is fastest now is kept for when they are; and what is written
        to it aside, but for the new token's own slot and position.

        These are read from `free`, or follow from the step: then a row that is not full writes to its last slot, which
        it has not taken yet.
        """
        slots = self._slots
        step = self._step if slots.now is None else int(slots.now.max())
        rules = slots.rules.clone()
        rules[:, 0] = torch.maximum(rules[:, 0], rules[:, 1].clamp(max=self._width) - 1 - step)
        # None stays None: it is the same compiled kernel.
        written = ("score_out", "free_out", "now_out")
        aside = {name: None if (x := getattr(slots, name)) is None else torch.empty_like(x) for name in written}
        return slots._replace(rules=rules, **aside)

    def _empty(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._new.q.device)

    def _launch(self, config: Config, slots: Slots, compile_only: bool = False) -> None:
        owner, form = self._owner, self._form(config)
        rows, kv_heads, capacity, dim = owner.size
        chunk = triton.cdiv(triton.cdiv(owner.most, owner.splits), form.block) * form.block
        splits, tasks = triton.cdiv(owner.most, chunk), rows * kv_heads
        sizes = DecodeSizes(kv_heads, capacity, self._width, chunk, owner.window)
        results = Results(self.out, self._probs, self._scratch, None, None, None)
        options: dict[str, Any] = {"warmup": compile_only, "num_warps": config.warps}
        whole = self._new, self._held, slots
        if splits == 1:
            step_kernel.run(*whole, results, sizes, self._step, *self._counted, form, grid=(tasks,), **options)
            return
        parts = self._heads * splits
        results = results._replace(mixed=self._empty(parts, dim), top=self._empty(parts), total=self._empty(parts))
        split_kernel.run(*whole, results, sizes, self._step, *self._counted, form, grid=(tasks, splits), **options)
        # One join for all configurations: it does not depend on tiles.
        form, options["num_warps"] = form._replace(block=0, stages=0, scan=2 * SCAN), _JOIN_WARPS
        join_kernel.run(slots, results, sizes, self._step, form, grid=(tasks,), **options)

    def _form(self, config: Config) -> DecodeForm:
        packed, dim = self._owner.packed, self._owner.size[3]
        d, g = max(triton.next_power_of_2(dim), 16), 1 if self._group == 1 else 16
        fixed = *packed, self._owner.adds, interpreting()
        return DecodeForm(dim, d, self._group, g, config.block, SCAN, config.stages, *fixed)


def _programs_wanted(tasks: int, slots: int, device: torch.device) -> int:
    """Splits that make about `RESIDENT` programs per processor, if that takes any and each has enough to do."""
    processors = PROCESSORS_INTERPRETED
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(round(RESIDENT * processors / tasks), slots // MIN_SPLIT))


def candidates(dim: int, dtype: torch.dtype) -> list[Config]:
    """The configurations to choose from; the first where nothing is tried: tiles of 8 KiB, of 16 to 128 slots, two of K
    and two of V on the way. The others have twice the slots, one tile on the way, and four or eight warps.

    All of them have more bytes on the way than a memory's bandwidth times its latency, some 20 KiB per processor. By
    registers and shared memory a processor of architecture 9.0 holds three programs of the first, dimension 128, half
    precision, four where query heads share KV heads, two where K and V are packed; of the others one to three.
    """
    block = min(128, max(16, _TILE_BYTES // (triton.next_power_of_2(dim) * dtype.itemsize)))
    return [Config(block, warps=4, stages=3), Config(2 * block, warps=4, stages=2), Config(2 * block, 8, 2)]
