"""The work of a call's blocks, phase by phase, and its roofline: docs/roofline.md says how each number is made.

Only unfinished rows count. A tick of prompts and decode rows is divided between the phases by tokens, as its time is,
so that counts need not be whole numbers. Also the links that a move crosses, and the fewest bytes over each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.hardware.rates import ComputeRates
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import dtype_bytes
from h2o_flexgen.schedule.request import PlanRequest


def links(tier: str, compute_tier: str, *, inward: bool) -> tuple[str, ...]:
    """The links between `tier` and the compute tier, towards it if `inward`: ("disk->cpu", "cpu->gpu") for disk and
    gpu, none inside one tier."""
    if tier == compute_tier:
        return ()
    stops = [tier, "cpu", compute_tier] if "cpu" not in (tier, compute_tier) else [tier, compute_tier]
    if not inward:
        stops.reverse()
    return tuple(f"{source}->{target}" for source, target in pairwise(stops))


def io_lower_bound(
    request: PlanRequest, sequences: int, *, budgets: Sequence[Budget] | None = None, cpu_cache_compute: bool = False
) -> dict[str, int]:
    """Bytes over each link that any schedule must move for `sequences` that go through their steps together; links of 0
    bytes are left out.

    budgets: of each sequence, layer by layer; None: as the workload's lengths give them. cpu_cache_compute: attention
    may be computed where caches on the cpu live.

    A step needs all weights, W bytes (of an embedding that is not the head next to none), and the caches' contents, K.
    The tiers on the near side of a link hold M of them when it starts, so that W + K - M come in. Outward goes what the
    caches hold before the last step and the near side has no room for. No workspace, buffer or padding is counted.
    """
    # Of tables every pass reads single rows, of experts those of one token.
    spec, dtype = request.spec, request.dtype
    tables = {"embed.positions"} if spec.arch.tied_head else {"embed.positions", "embed.tokens"}
    sizes = (tensor for group in spec.weight_groups for tensor in group.tensors if tensor.name not in tables)
    share = spec.chosen_share(1)
    weights = round(sum(tensor.nbytes(dtype) * (share if ".experts." in tensor.name else 1) for tensor in sizes))
    caches = [sequences * held for held in _held(request, budgets)]
    bound: dict[str, int] = {}
    near = 0
    for upper, lower in pairwise(request.tiers):
        cap = request.caps.of(upper)
        if cap is None:
            return bound
        near += cap
        stay = cpu_cache_compute and upper == "gpu"  # the caches, where attention is computed below
        inward = sum(max(0, weights + (0 if stay else held) - near) for held in caches)
        outward = 0 if stay else max(0, caches[-1] - near)
        for link, nbytes in ((f"{lower}->{upper}", inward), (f"{upper}->{lower}", outward)):
            if nbytes:
                bound[link] = nbytes
    return bound


def _held(request: PlanRequest, budgets: Sequence[Budget] | None) -> list[int]:
    """Bytes in one sequence's caches when each step starts; 0 before the first."""
    prompt, layers = request.workload.prompt_len, Counter[tuple[int, int]]()
    for layer, each in enumerate(budgets or request.budgets):
        if request.spec.attends(layer):
            layers[each.total, each.after_prompt] += request.spec.kv_bytes_per_token_and_layer(request.dtype, layer)

    def before(step: int) -> int:
        return sum(min(min(prompt, kept) + step - 1, total) * token for (total, kept), token in layers.items())

    return [0, *(before(step) for step in range(1, request.workload.gen_len))]


Window = int | None
READS, ARITHMETIC = "memory reads", "arithmetic"
HERE = "this run"
"""The origin of a link's rate that the profile lacks: while the link was busy in the run itself."""


_sums = partial(defaultdict[Any, float], float)


@dataclass
class PhaseWork:
    """The work of one phase, in tokens and bytes.

    steps           of the schedule
    products        computations by kind (`ModelSpec.products`) and rows; of experts with the rows of all GPU batches
    prompt_pairs    queries times keys of prompts in one layer, by the layer's window and the keys of a query; without
                    deduction for causality
    cache_tokens    tokens that decode steps read from caches in all layers, their own included, by the layers' window
                    and the device that reads
    cache_calls     reads of one GPU batch's cache in one layer, likewise
    moved           bytes by link and kind ("weights", "cache", "hidden"), the fewest for the placement: streamed
                    weights once per step, experts as many as tokens choose if all are equally likely, caches without
                    padding
    """

    steps: float = 0.0
    products: dict[tuple[str, int], float] = field(default_factory=_sums)
    prompt_pairs: dict[tuple[Window, int], float] = field(default_factory=_sums)
    cache_tokens: dict[tuple[Window, str], float] = field(default_factory=_sums)
    cache_calls: dict[tuple[Window, str], float] = field(default_factory=_sums)
    moved: dict[tuple[str, str], float] = field(default_factory=_sums)

    def weight_bytes(self, spec: ModelSpec, dtype: str) -> float:
        """Bytes of the matrices that products read."""
        return sum(calls * _matrix_bytes(spec, kind, rows, dtype) for (kind, rows), calls in self.products.items())

    def cache_bytes(self, spec: ModelSpec, dtype: str) -> dict[str, float]:
        """Bytes of keys and values that decode steps read, by device."""
        found: dict[str, float] = _sums()
        token = spec.mean_by_window(lambda layer: spec.kv_bytes_per_token_and_layer(dtype, layer))
        for (window, device), tokens in self.cache_tokens.items():
            found[device] += tokens * token[window]
        return dict(found)

    def product_flops(self, spec: ModelSpec) -> float:
        """FLOPs of all products; 2 m n k each."""
        return sum(calls * _flops(spec, kind, rows) for (kind, rows), calls in self.products.items())

    def attention_flops(self, spec: ModelSpec) -> float:
        """FLOPs of scores and weighted values."""
        layers, width = _layers_by_window(spec), _query_width(spec)
        pairs = sum(width[window] * layers[window] * count for (window, _), count in self.prompt_pairs.items())
        return 4 * (pairs + sum(width[window] * tokens for (window, _), tokens in self.cache_tokens.items()))


@dataclass
class CountedWork:
    """The work of a call, or of some of its blocks."""

    prefill: PhaseWork = field(default_factory=PhaseWork)
    decode: PhaseWork = field(default_factory=PhaseWork)
    dependency: float = 0.0
    """Of a record."""

    @property
    def phases(self) -> dict[str, PhaseWork]:
        return {"prefill": self.prefill, "decode": self.decode}

    def flops(self, spec: ModelSpec) -> int:
        return round(sum(work.product_flops(spec) + work.attention_flops(spec) for work in self.phases.values()))


def rooflines(
    work: CountedWork,
    request: PlanRequest,
    seconds: Mapping[str, float],
    bandwidth: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """The `roofline` object of a RunRecord, by phase.

    seconds: measured, of each phase. bandwidth: of links, bytes per second in the run itself; the only rates without a
    profile in `request`.
    """
    priced = _Roofline(request, bandwidth or {})
    return {phase: priced.of(each, seconds[phase]) for phase, each in work.phases.items()}


_Spent = tuple[str, str, float]
"""The kind of calls, the resource that they wait for, and their seconds at calibrated rates."""


class _Roofline:
    """Amounts of one phase, priced at the rates that are known."""

    def __init__(self, request: PlanRequest, bandwidth: Mapping[str, float | None]) -> None:
        self._request, self._profile, self._bandwidth = request, request.profile, bandwidth
        self._tier, self._size = request.compute_tier, dtype_bytes(request.dtype)

    def of(self, work: PhaseWork, measured: float) -> dict[str, Any]:
        """The entry of one phase that took `measured` seconds."""
        resources = {
            name: {unit: {part: round(amount) for part, amount in parts.items()}, **self._at_best(name, parts)}
            for name, (unit, parts) in self._amounts(work).items()
        }
        entry = {"steps": work.steps, "measured_s": measured, "resources": resources}
        devices = {self._tier, *(device for _, device in work.cache_tokens)}
        if self._profile is None or not resources or not devices <= self._profile.compute.keys():
            return {**entry, "kernels_s": None, "bound": None, "achieved": None}
        kinds, waits = dict.fromkeys(("products", "attention"), 0.0), dict[str, float]()
        for kind, resource, seconds in (*self._products(work), *self._caches(work), *self._prompts(work)):
            kinds[kind] += seconds
            waits[resource] = waits.get(resource, 0.0) + seconds
        # Calls of the computing thread follow each other, links work beside it. Its time is booked under one resource:
        # the one that its calls wait for longest.
        bounds = {max(waits, key=lambda name: waits[name]): sum(waits.values())} if waits else {}
        bounds |= {name: each["seconds"] for name, each in resources.items() if "->" in name and each["seconds"]}
        resource = max(bounds, key=lambda name: bounds[name])
        return {
            **entry,
            "kernels_s": kinds,
            "bound": {"resource": resource, "seconds": bounds[resource]},
            "achieved": bounds[resource] / measured if measured else None,
        }

    def _amounts(self, work: PhaseWork) -> dict[str, tuple[str, dict[str, float]]]:
        """By resource: the unit, and amounts by purpose."""
        spec, dtype = self._request.spec, self._request.dtype
        read: dict[str, dict[str, float]] = {READS: {"weights": work.weight_bytes(spec, dtype)}}
        for device, nbytes in work.cache_bytes(spec, dtype).items():
            read.setdefault(self._reads_of(device), {})["cache"] = nbytes
        for (link, what), nbytes in sorted(work.moved.items()):
            read.setdefault(link, {})[what] = nbytes
        flops = {"products": work.product_flops(spec), "attention": work.attention_flops(spec)}
        amounts = {name: ("bytes", parts) for name, parts in read.items()} | {ARITHMETIC: ("flops", flops)}
        return {name: (unit, parts) for name, (unit, parts) in amounts.items() if any(parts.values())}

    def _reads_of(self, device: str) -> str:
        return READS if device == self._tier else f"{READS} of the {device}"

    def _at_best(self, name: str, parts: Mapping[str, float]) -> dict[str, Any]:
        """The best rate of a resource, its origin, and the seconds at this rate."""
        rate, source = self._rate(name), None if self._profile is None else self._profile.name
        if rate is None and self._bandwidth.get(name):
            rate, source = self._bandwidth[name], HERE
        if rate is None:
            return {"rate": None, "of": None, "seconds": None}
        return {"rate": rate, "of": source, "seconds": sum(map(round, parts.values())) / rate}

    def _rate(self, name: str) -> float | None:
        if self._profile is None:
            return None
        if "->" in name:
            return self._profile.links[name].bytes_per_s if name in self._profile.links else None
        device = next((each for each in self._profile.compute if name == self._reads_of(each)), self._tier)
        rates = self._profile.compute.get(device)
        if rates is None or (name.startswith(READS) and name != self._reads_of(device)):
            return None
        return peak_flops(rates) if name == ARITHMETIC else rates.memory_bytes_per_s

    def _products(self, work: PhaseWork) -> Iterator[_Spent]:
        rates = self._request.machine.rates(self._tier)
        spec, dtype = self._request.spec, self._request.dtype
        for (kind, rows), calls in work.products.items():
            arithmetic = _flops(spec, kind, rows) / peak_flops(rates)
            few = arithmetic <= _matrix_bytes(spec, kind, rows, dtype) / rates.memory_bytes_per_s
            seconds = rates.products_seconds(spec, kind, rows, self._size)
            yield "products", READS if few else ARITHMETIC, calls * seconds

    def _caches(self, work: PhaseWork) -> Iterator[_Spent]:
        """Attention of decode steps, each call of average size."""
        spec, dtype = self._request.spec, self._request.dtype
        token = spec.mean_by_window(lambda layer: spec.attended_kv_bytes(dtype, layer))
        for (window, device), tokens in work.cache_tokens.items():
            calls = work.cache_calls.get((window, device), 0.0)
            if calls > 0:
                curves = self._request.machine.rates(device).decode_attention
                curve = curves["scored" if self._ranks(window) else "plain"]
                yield "attention", self._reads_of(device), calls * curve.time_at(tokens * token[window] / calls)

    def _prompts(self, work: PhaseWork) -> Iterator[_Spent]:
        rates, spec = self._request.machine.rates(self._tier).prefill_attention, self._request.spec
        for (window, keys), pairs in work.prompt_pairs.items():
            sums = self._ranks(window) and self._request.eviction.split.column_sums
            flops = 4 * _query_width(spec)[window] * pairs * _layers_by_window(spec)[window]
            yield "attention", ARITHMETIC, flops / rates["scored" if sums else "plain"].at(keys)

    def _ranks(self, window: Window) -> bool:
        """Whether caches of layers with this window choose by score."""
        layers = zip(self._request.budgets, self._request.spec.windows, strict=True)
        return any(budget.scored for budget, each in layers if each == window)


def peak_flops(rates: ComputeRates) -> float:
    """The most FLOPs per second that any product reached when the device was calibrated."""
    general = [flops for _, flops in rates.gemm_flops.points]
    shapes = [
        2 * rows * shape.out_features * shape.in_features / seconds
        for shape in rates.shapes
        for rows, seconds in shape.seconds.points
    ]
    return max(general + shapes)


def _layers_by_window(spec: ModelSpec) -> Counter[Window]:
    return Counter(spec.arch.window_of(layer) for layer in range(spec.num_layers) if spec.attends(layer))


def _query_width(spec: ModelSpec) -> dict[Window, float]:
    """Numbers of a token's queries, by window."""
    return spec.mean_by_window(lambda layer: spec.heads_of(layer).queries * spec.heads_of(layer).dim)


def _flops(spec: ModelSpec, kind: str, rows: int) -> float:
    calls = spec.product_calls(kind, rows)
    return sum(2 * each * times * product.out_features * product.in_features for product, each, times in calls)


def _matrix_bytes(spec: ModelSpec, kind: str, rows: int, dtype: str) -> float:
    """Bytes of the matrices that the products of one `kind` read, in the mean over its units."""
    numbers = sum(each.numel for each in spec.multiplied[kind])
    calls = spec.product_calls(kind, rows)
    read = sum(times * product.out_features * product.in_features for product, _, times in calls)
    whole = sum(each.nbytes(dtype) for each in spec.multiplied[kind])
    return whole * read / numbers if numbers else 0.0
