"""Rates of links and compute devices, which `calibrate` measures and the cost model predicts from. No torch.

Everything is in SI units: bytes, seconds, FLOP/s (a multiply-add counts two).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from h2o_flexgen.config.checks import Checked, Count, Seconds, number
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import UsageError

Points = tuple[tuple[float, float], ...]
Rate = Annotated[float, partial(number, low=0, above=True, needed="needed a positive number")]


@dataclass(frozen=True)
class Curve:
    """A measured quantity y over a size x, both positive: straight between the points in log-log, as fast as the last
    point beyond them. Raises UsageError for points that are not ascending or not positive.

    Interpolating in logarithms is exact for power laws, which times and rates are over most of their range.
    """

    points: Points

    def __post_init__(self) -> None:
        points = tuple((float(x), float(y)) for x, y in self.points)
        object.__setattr__(self, "points", points)
        if not points or any(not (0 < value < math.inf) for point in points for value in point):
            raise UsageError(f"a curve has the points {list(points)[:4]}", "needed at least one, of positive numbers")
        if any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
            raise UsageError(f"the points of a curve are at {[x for x, _ in points][:6]}", "needed ascending sizes")

    def at(self, x: float) -> float:
        """y at `x`; outside the points the y of the nearest one."""
        points = self.points
        if x <= points[0][0]:
            return points[0][1]
        if x >= points[-1][0]:
            return points[-1][1]
        right = bisect_right(points, (x, math.inf))
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        share = math.log(x / x0) / math.log(x1 / x0)
        return y0 * (y1 / y0) ** share

    def time_at(self, x: float) -> float:
        """y at `x` where y is a time and x an amount of work: beyond the last point the rate stays what it was there,
        and below the first the time does, because starting takes it."""
        return self.at(x) * max(1.0, x / self.points[-1][0])


@dataclass(frozen=True)
class LinkRate(Checked):
    """A link in one direction, while nothing else runs: a transfer takes `latency_s` + bytes / `bytes_per_s`.

    Measured as the engine moves things: through the copy engine, unit-sized transfers queued one behind the other, so
    that all its threads of the link are at work; to and from host buffers as the engine allocates them. Disk reads are
    cold, of packed units, without a checksum; disk writes go to a preallocated region, with its checksum.
    """

    bytes_per_s: Rate
    latency_s: Seconds = 0.0

    def seconds(self, nbytes: float) -> float:
        """The seconds of one transfer; 0 for no bytes."""
        return self.latency_s + nbytes / self.bytes_per_s if nbytes else 0.0


@dataclass(frozen=True)
class GemmShape(Checked):
    """Seconds of x (rows, in) times a weight (out, in) that is not in any cache, over the number of rows."""

    out_features: Count
    in_features: Count
    seconds: Curve


UNMEASURED_PACKED: Mapping[int, Curve] = {
    2: Curve(((1, 0.85), (8, 1.1), (32, 1.1), (64, 1.02))),
    4: Curve(((1, 3.0), (32, 3.0), (256, 1.5))),
}
"""How many times as long a product takes whose weight is packed, over its rows, where that was not measured, by the
bytes per number of the dtype: as 4 bits in bfloat16 did on a CPU with AVX-512, and an assumption for float32."""
PACKED_BITS = ("4", "8")

UNIT_KINDS = ("embed", "attn", "mlp", "head")


@dataclass(frozen=True)
class ComputeRates(Checked):
    """One compute device in one dtype, while no link is busy.

    gemm_flops          FLOP/s over the number of rows, weights large and not in any cache: for shapes not in `shapes`
    memory_bytes_per_s  of streaming reads: no product is faster than its weight can be read
    shapes              products at the shapes of a model (`ModelSpec.products`), where they were measured
    packed              how many times as long as in the dtype a product takes whose weight is packed in so many bits
                        ("4", "8"), over the number of rows; bits that are left out: as UNMEASURED_PACKED says
    experts             seconds of one expert of a mixture, its tokens gathered and its results added up, over its
                        tokens, by `ModelSpec.expert_bits`: many experts at a time. Others are priced by their products
    decode_attention    seconds of one `KVCache.attend` (all rows and heads of a GPU batch in one layer), its fixed cost
                        included, over the bytes of K and V it reads. `scored`: by a policy that evicts by score, so
                        with probability rows, their sum, and the choice of what goes
    fused_products      whether products do ReLU and the addition to a residual themselves, in no pass of their own
    torch_attention     whether attention on a GPU is torch's, as Triton does not serve it: prompts take more memory
    reads_all_slots     whether that attention reads all slots of the buffer, or only those in use
    prefill_attention   FLOP/s of one kernel call over its keys per query (the length of the prompt, past included),
                        4 x heads x head_dim x queries x keys FLOPs whatever is masked. `scored`: with column sums, and
                        with ranking the prompt's tokens by them
    elementwise_bytes_per_s  of norms, activations, residuals, rotations and copies: bytes read and written together,
                        on the mix of them in a layer, for a chunk of a prompt
    tick_s              time of a tick beyond all of the above, by kind of unit (`UNIT_KINDS`): its tasks issued, its
                        kernels started, products slower in a row than alone. Seconds, or a curve over the tick's
                        tokens, measured in decode ticks of the engine
    graph_tick_s        the same of decode steps that are recorded once and launched as a whole (`schedule.tasks`):
                        seconds over a tick's tokens, of whatever unit, their mean. None: no steps are recorded
    prompt_tick_s       the same of transformers' modules in a step of prompts, by kind of unit: seconds of each prompt
                        over its tokens. Empty: as in a decode tick
    sample_s            of choosing one row's token, greedily, beside the output head's product
    fresh_bytes_per_s   of the first write to memory that the system has just given, as the caches of a call's first
                        block are on a CPU: its pages have to be found and zeroed, which may be slower than a disk.
                        None: no slower than `elementwise_bytes_per_s`
    """

    gemm_flops: Curve
    memory_bytes_per_s: Rate
    decode_attention: Mapping[str, Curve]
    prefill_attention: Mapping[str, Curve]
    elementwise_bytes_per_s: Rate
    tick_s: Mapping[str, float | Curve]
    sample_s: Seconds
    shapes: tuple[GemmShape, ...] = ()
    fresh_bytes_per_s: Rate | None = None
    reads_all_slots: bool = False
    graph_tick_s: Curve | None = None
    fused_products: bool = False
    torch_attention: bool = False
    prompt_tick_s: Mapping[str, Curve] = field(default_factory=dict)
    packed: Mapping[str, Curve] = field(default_factory=dict)
    experts: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = {**dict.fromkeys(("decode_attention", "prefill_attention"), ("plain", "scored")), "tick_s": UNIT_KINDS}
        for name, keys in (kinds | ({"prompt_tick_s": UNIT_KINDS} if self.prompt_tick_s else {})).items():
            if set(getattr(self, name)) != set(keys):
                raise UsageError(f"{name} has {sorted(getattr(self, name))}", f"needed {', '.join(keys)}")
        if not set(self.packed) <= set(PACKED_BITS):
            raise UsageError(f"packed has {sorted(self.packed)}", f"needed bits among {', '.join(PACKED_BITS)}")
        for tick in self.tick_s.values():
            if not isinstance(tick, Curve):
                number(tick, "tick_s", 0, needed="needed seconds, at least 0")

    def tick_seconds(self, kind: str, tokens: int, *, replayed: bool = False) -> float:
        """`tick_s` of one tick of a unit of `kind` that computes so many tokens, or `graph_tick_s`."""
        if replayed and self.graph_tick_s is not None:
            return self.graph_tick_s.at(tokens)
        tick = self.tick_s[kind]
        return tick.at(tokens) if isinstance(tick, Curve) else tick

    def prompts_seconds(self, kind: str, prompts: int, length: int) -> float:
        """As `tick_seconds`, of a tick that computes so many prompts of `length` tokens each."""
        known = self.prompt_tick_s.get(kind)
        return self.tick_seconds(kind, prompts * length) if known is None else prompts * known.time_at(length)

    def gemm_seconds(self, rows: float, out_features: int, in_features: int, itemsize: int) -> float:
        """Of x (rows, in) times (out, in) in numbers of `itemsize` bytes: as measured at this shape, else by the
        general rate, and no faster than the weight can be read."""
        for shape in self.shapes:
            if (shape.out_features, shape.in_features) == (out_features, in_features):
                return shape.seconds.time_at(rows)
        reading = out_features * in_features * itemsize / self.memory_bytes_per_s
        return max(reading, 2 * rows * out_features * in_features / self.gemm_flops.at(rows))

    def products_seconds(self, spec: ModelSpec, kind: str, rows: float, itemsize: int) -> float:
        """Of all products of a `kind`, weights packed as those of `spec` are, in the mean over its units; of experts
        all that is in `experts`, where they were measured.

        itemsize: bytes of a number of the dtype that is computed with.
        """
        calls = spec.product_calls(kind, rows)
        measured = self.experts.get(spec.expert_bits or "") if kind == "experts" else None
        if measured is not None:
            return calls[-1].times * measured.time_at(calls[-1].rows)
        plain = sum(times * self.gemm_seconds(each, *product, itemsize) for product, each, times in calls)
        return plain * self.packed_factor(spec.packed_shares[kind], calls[-1].rows if calls else rows, itemsize)

    def packed_factor(self, shares: Mapping[int, float], rows: float, itemsize: int) -> float:
        """How many times as long as in the dtype products take of whose numbers `shares` are packed, by their bits."""
        curves = {bits: self.packed.get(str(bits), UNMEASURED_PACKED[itemsize]) for bits in shares}
        return 1 + sum(share * (curves[bits].at(rows) - 1) for bits, share in shares.items())
