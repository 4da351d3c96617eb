"""The RunRecord of a call, from counted bytes and measured seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from h2o_flexgen.cache.recall import RecallCounts
from h2o_flexgen.config.budget import Budget
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.recall import Reading, shelf_bytes, shelved_tokens
from h2o_flexgen.config.reports.record import RunRecord, eviction_entry, host_facts, span_of
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cores import CoreCount, sharing_warning
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.model import Model, spec_warnings
from h2o_flexgen.engine.requests.sequence import Sequence, kept_of_spans
from h2o_flexgen.engine.state.loader import Loaded
from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.native import what_computes
from h2o_flexgen.openmp import spin_warning
from h2o_flexgen.schedule.request import PlanRequest
from h2o_flexgen.schedule.work import CountedWork, io_lower_bound, links, rooflines
from h2o_flexgen.units import format_bytes

_BY_TORCH = "attention on the GPU was computed by torch, which takes longer"
_NOT_RECORDED = "decode steps could not be recorded as CUDA graphs, and were launched one by one, which is slower"


@dataclass
class BlockTotals:
    """The totals of a call's blocks.

    computed_prompt_tokens  shared prefixes counted once
    graph_launches          decode steps of GPU batches that were launched as CUDA graphs
    not_recorded            why recording one failed, the first time
    experts_read            experts computed with, once per layer and pass over a block; experts_of: if all were chosen
    work                    without what decode read from caches for unfinished sequences of a failed block
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    sequences: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    graph_launches: int = 0
    not_recorded: str | None = None
    experts_read: int = 0
    experts_of: int = 0
    recall: RecallCounts = field(default_factory=RecallCounts)
    work: CountedWork = field(default_factory=CountedWork)

    def hold(self, caches: SequenceOf[tuple[int, int]]) -> None:
        """Takes a block's (K and V bytes, state bytes) of each stage; the largest block counts."""
        keys_values, states = (sum(each) for each in zip(*caches, strict=True))
        self.kv_bytes, self.state_bytes = max(self.kv_bytes, keys_values), max(self.state_bytes, states)


class RowLengths(NamedTuple):
    """The lengths and budgets of a finished row; most rows of a call are alike."""

    prompt: int
    most_new: int
    new: int
    budget: Budget
    by_layer: tuple[Budget, ...]

    def budget_in(self, layer: int, window: int | None) -> Budget:
        return self.by_layer[layer] if self.by_layer else self.budget.within(window)


class RunMetrics:
    """The counters of one call, over all placements it runs on. peak_before: the most bytes of the process that were
    resident before there was the engine."""

    def __init__(self, trace: Trace, peak_before: int) -> None:
        self.peak_before = peak_before
        self.totals = BlockTotals()
        self.lengths = Counter[RowLengths]()
        """Finished rows by their lengths."""
        self.kept: dict[str, list[dict[str, float]]] = {}
        """Spans of finished rows by name: see `Kept`."""
        self.load_seconds = self.total_seconds = 0.0
        self.bytes_moved, self.busy_seconds = dict[str, int](), dict[str, float]()
        self.gpu_peaks: list[int] = []
        """Peak bytes of each stage's gpu tier."""
        self.cores = CoreCount()
        self._peaks: dict[str, int] = {}
        self._trace, self._computed = trace, sum(trace.compute_seconds.values())

    def finished(self, row: Sequence) -> None:
        new = len(row.token_ids)
        self.lengths[RowLengths(row.prompt_tokens, row.max_new_tokens, new, row.budget, row.by_layer)] += 1
        for name, counts in (kept_of_spans(row) or {}).items():
            self.kept.setdefault(name, []).append(counts)

    @contextmanager
    def over(self, loaded: Loaded) -> Iterator[None]:
        """Counts the transfers and time of `loaded` within."""
        started = time.perf_counter()
        moved, busy = dict(loaded.bytes_moved), dict(loaded.busy_seconds)
        self.cores.start()
        try:
            yield
        finally:
            self.cores.stop()
            self.total_seconds += time.perf_counter() - started
            for link, nbytes in loaded.bytes_moved.items():
                self.bytes_moved[link] = self.bytes_moved.get(link, 0) + nbytes - moved.get(link, 0)
            for link, seconds in loaded.busy_seconds.items():
                self.busy_seconds[link] = self.busy_seconds.get(link, 0.0) + seconds - busy.get(link, 0.0)
            peaks = [stage.tiers.compute.peak for stage in loaded.stages]
            self.gpu_peaks = [max(pair) for pair in zip_longest(self.gpu_peaks, peaks, fillvalue=0)]
            for tier, peak in loaded.peaks().items():
                self._peaks[tier] = max(peak, self._peaks.get(tier, 0))

    @property
    def compute_seconds(self) -> float:
        """Waits for the GPU."""
        return sum(self._trace.compute_seconds.values()) - self._computed

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Per tier, and of the process ("rss")."""
        return {**self._peaks, "rss": devices.peak_rss()}


def make_record(
    config: EngineConfig,
    model: Model,
    plans: SequenceOf[Plan],
    metrics: RunMetrics,
    warnings: SequenceOf[str] = (),
) -> RunRecord:
    """The record of a call. Of several `plans`, after memory ran out, the last one ran; the first one predicted."""
    totals, first, plan, busy, rows = metrics.totals, plans[0], plans[-1], metrics.busy_seconds, list(metrics.lengths)
    bandwidth = {link: n / busy[link] if busy.get(link) else None for link, n in metrics.bytes_moved.items()}
    achieved, peaks = plan.placement.achieved(model.spec, model.dtype), metrics.peak_bytes
    said = [
        *(*spec_warnings(model.spec, config.eviction), *warnings, *_unrealised(config, plan, achieved)),
        _above_cap(plan, peaks["rss"]) if peaks["rss"] > metrics.peak_before else None,
        _because(_BY_TORCH, triton_available.why_not("cuda") if _device(plan, config) == "cuda" else None),
        _because(_NOT_RECORDED, totals.not_recorded),
        sharing_warning(metrics.cores.shared),
        spin_warning() if _device(plan, config) == "cpu" else None,
    ]
    return RunRecord(
        host={**host_facts(), "kernels": what_computes()},
        model=model.spec.name,
        dtype=model.dtype,
        device=_device(plan, config),
        weights="dummy" if model.dummy else "checkpoint",
        quantization=_quantization(model),
        experts=_experts(model, totals),
        eviction=_eviction(config, rows),
        policy=_policy(config, plan, achieved, metrics, searched=first.searched),
        prompt_len=plan.request.workload.prompt_len,
        gen_len=plan.request.workload.gen_len,
        sequences=totals.sequences,
        prompt_tokens=totals.prompt_tokens,
        generated_tokens=totals.generated_tokens,
        load_s=metrics.load_seconds,
        prefill_s=totals.prefill_seconds,
        decode_s=totals.decode_seconds,
        total_s=metrics.total_seconds,
        bytes_moved=_moved(plan.request, metrics),
        bandwidth=bandwidth,
        flops=totals.work.flops(model.spec),
        peak_bytes={"gpu": None, "cpu": None, "disk": None, **peaks},
        kv_bytes=totals.kv_bytes,
        state_bytes=totals.state_bytes,
        computed_prompt_tokens=totals.computed_prompt_tokens,
        bound=_bound(metrics),
        roofline=rooflines(
            totals.work,
            first.request,
            {"prefill": totals.prefill_seconds, "decode": totals.decode_seconds},
            {} if first.request.num_gpus > 1 else bandwidth,
        ),
        predicted=None if first.predicted is None else dict(first.predicted),
        least_bytes_moved=_least_moved(plan, rows) if len(plans) == 1 and plan.request.num_gpus == 1 else None,
        kept=_kept(metrics.kept),
        recall=_recall(plan.request, metrics),
        dependency=totals.work.dependency,
        shared=metrics.cores.shared,
        warnings=[warning for warning in said if warning is not None],
    )


def _experts(model: Model, totals: BlockTotals) -> dict[str, int] | None:
    experts = model.spec.arch.experts
    if experts is None:
        return None
    read = {"read": totals.experts_read, "of": totals.experts_of}
    return {"count": experts.count, "active": experts.active, **read}


def _quantization(model: Model) -> dict[str, Any] | None:
    kind, packings = model.spec.packed_kind, model.spec.cache_packings
    if kind is None and packings is None:
        return None
    weights = None if kind is None else {"format": model.source.format, **kind}
    found: dict[str, Any] = {"weights": weights, "cache": None}
    if packings is not None:
        keys, values = packings
        bits = keys.bits if keys == values else [keys.bits, values.bits]
        newest = {"newest": model.spec.cache_newest} if model.spec.cache_newest else {}
        found["cache"] = {"bits": bits, "group": keys.group, "rotation": model.spec.cache_rotation, **newest}
    return found


def _least_moved(plan: Plan, rows: SequenceOf[RowLengths]) -> dict[str, int]:
    """The fewest bytes that any schedule must move, by blocks of the size that ran, within the same caps less the
    process's own memory; with all rows as long as the shortest, so that the bound holds."""
    request, sequences = plan.request, plan.request.workload.num_sequences
    block = min(plan.policy.block_size, sequences)
    if request.caps.cpu is not None:
        request = request.with_caps(cpu=max(0, request.caps.cpu - request.baseline))
    prompt, new = min(row.prompt for row in rows), min(row.new for row in rows)
    shortest = replace(request, workload=Workload(prompt, max(1, new), block))
    # The smallest budget of any row, as no row need have these lengths.
    row, windows = min(rows, key=lambda row: row.budget.total), request.spec.windows
    budgets = [row.budget_in(layer, window) for layer, window in enumerate(windows)]
    least = io_lower_bound(shortest, block, budgets=budgets, cpu_cache_compute=plan.policy.cpu_cache_compute)
    return {link: sequences // block * nbytes for link, nbytes in least.items()}


def _policy(
    config: EngineConfig,
    plan: Plan,
    achieved: Mapping[str, Mapping[str, float]],
    metrics: RunMetrics,
    *,
    searched: bool,
) -> dict[str, Any]:
    """The shape and placement that were run; of several GPUs also the units of each, the bytes of their weights on all
    tiers, and its peak."""
    request = plan.request
    chosen = "search" if searched else "rule" if config.free_fields else "given"
    entry = {**plan.policy.to_json(), **achieved, "chosen": chosen}
    if request.num_gpus == 1:
        return entry
    spec, groups = request.spec, request.spec.groups_by_key
    stages = []
    for units, peak in zip(request.stages, metrics.gpu_peaks, strict=True):
        keys = {spec.units[unit].weights for unit in units}
        weights = sum(groups[key].nbytes(request.dtype) for key in keys)
        first, last = spec.units[units[0]].name, spec.units[units[-1]].name
        stages.append({"first": first, "last": last, "weight_bytes": weights, "peak_bytes": peak})
    return {**entry, "num_gpus": request.num_gpus, "stages": stages}


def _device(plan: Plan, config: EngineConfig) -> str:
    if plan.request.compute_tier == "cpu":
        return "cpu"
    return "emulated gpu" if config.emulate_gpu is not None else "cuda"


def _eviction(config: EngineConfig, rows: SequenceOf[RowLengths]) -> dict[str, Any]:
    """Resolved tokens, and the budget as shares of prompt and sequence; [least, most] if rows differ."""
    entry = eviction_entry(config.eviction.name, [row.budget for row in rows])
    if any(row.by_layer for row in rows):
        entry["budget_split"] = config.eviction.how_layers_share
        if config.eviction.far_layers is not None:
            entry["far_layers"] = list(config.eviction.far_layers)
        layers = zip(*(row.by_layer for row in rows), strict=True)
        entry["budget_by_layer"] = [span_of(each.total for each in layer) for layer in layers]
    entry["share_of_prompt"] = span_of(row.budget.total / row.prompt for row in rows)
    entry["share_of_sequence"] = span_of(row.budget.total / (row.prompt + row.most_new) for row in rows)
    return entry


def _recall(request: PlanRequest, metrics: RunMetrics) -> dict[str, Any] | None:
    counts, asked, spec = metrics.totals.recall, request.eviction, request.spec
    if asked.recall is None:
        return None
    planned = {"written": 0, "read": 0, "most": 0}
    for row, times in metrics.lengths.items():
        for layer, window in enumerate(spec.windows):
            budget, heads = row.budget_in(layer, window), spec.heads_of(layer).keys
            token = shelf_bytes(asked.recall, spec.computed_kv_bytes(request.dtype, layer))
            moved = partial(shelved_tokens, budget, window, row.prompt, row.new, asked.recall_every)
            tokens = *moved(Reading(asked.recall, heads, request.recalled)), moved(Reading(asked.recall, heads, 1.0))[1]
            for way, count in zip(planned, tokens, strict=True):
                planned[way] += round(times * token * count)
    return {
        "tier": asked.recall,
        "every": asked.recall_every,
        "recalled": counts.recalled,
        "looks": counts.looks,
        "written_bytes": counts.written,
        "read_bytes": counts.read,
        "planned": planned,
        "hit_rate": counts.held / counts.best if counts.best else None,
    }


def _moved(request: PlanRequest, metrics: RunMetrics) -> dict[str, int]:
    """Bytes by link, with those of recall, which the computing thread moves."""
    found, counts, tier = Counter(metrics.bytes_moved), metrics.totals.recall, request.eviction.recall
    for inward, nbytes in ((False, counts.written), (True, counts.read)):
        for link in () if tier is None else links(tier, request.compute_tier, inward=inward):
            found[link] += nbytes
    return dict(found)


def _kept(found: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, float]] | None:
    means = {name: {key: fmean(c.get(key, 0.0) for c in each) for key in each[0]} for name, each in found.items()}
    return means or None


def _bound(metrics: RunMetrics) -> dict[str, Any] | None:
    """The resource that was busy longest, and the longer phase."""
    totals = metrics.totals
    phase = "prefill" if totals.prefill_seconds >= totals.decode_seconds else "decode"
    busy = {**metrics.busy_seconds, "compute": metrics.compute_seconds}
    resource, seconds = max(busy.items(), key=lambda item: item[1])
    return {"phase": phase, "resource": resource, "seconds": seconds, "busy": busy}


def _unrealised(config: EngineConfig, plan: Plan, achieved: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Warnings of shares that were asked for and not realised."""
    alone = plan.policy.num_gpu_batches == 1
    why = {"hidden": "one GPU batch alone is never parked"} if alone else {}
    return [
        f"{share:.1%} of {kind} was asked for on {tier}, and none of it is there: "
        + why.get(kind, "units are placed whole")
        for kind in ("weights", "cache", "hidden")
        if kind not in config.free_fields
        for tier, share in getattr(plan.policy, kind).items()
        if tier not in achieved[kind]
    ]


def _above_cap(plan: Plan, peak: int) -> str | None:
    cap = plan.request.caps.cpu
    if cap is None or peak <= cap:
        return None
    return (
        f"peak resident memory of {format_bytes(peak)} is above the cap of {format_bytes(cap)}: "
        "the working space was underestimated"
    )


def _because(what: str, reason: str | None) -> str | None:
    return None if reason is None else f"{what}: {reason}"
