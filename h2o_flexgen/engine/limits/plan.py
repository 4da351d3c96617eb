"""Decides block shape and placement before anything is allocated, and refuses what does not fit.

The rule: as many rows per GPU batch as asked for or sensible, as much weight on the fastest tier as then fits, the
rest one tier down. Everything is judged by `schedule.footprint`, so the plan that is printed is the plan that is
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.kernels import Kernels
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import Placement, cache_slots, place
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.errors import PlanError
from h2o_flexgen.schedule.footprint import Footprint, footprint
from h2o_flexgen.schedule.stage_footprint import stage_footprint
from h2o_flexgen.schedule.stages import stages_of
from h2o_flexgen.schedule.tasks import groups_of
from h2o_flexgen.schedule.workspace import BlockShape
from h2o_flexgen.units import GIB, MIB, format_bytes

DEFAULT_BATCH = 32  # rows at which GEMMs of a decode step come close to their full rate
MOST_BATCHES = (
    8  # GPU batches per block when weights stream: each halves the weight bytes per token, ever less worth it
)


@dataclass(frozen=True)
class Caps:
    """Bytes each tier may hold; None: no limit. `emulated`: the gpu is host memory, capped by --emulate-gpu.

    `why` says of each tier where its cap comes from.
    """

    gpu: int | None = None
    cpu: int | None = None
    disk: int | None = None
    emulated: bool = False
    why: Mapping[str, str] = field(default_factory=dict, compare=False)

    def of(self, tier: str) -> int | None:
        return {"gpu": self.gpu, "cpu": self.cpu, "disk": self.disk}[tier]

    def flag(self, tier: str) -> str:
        """The flag that sets the cap of `tier`."""
        gpu = "--emulate-gpu" if self.emulated else "--gpu-mem"
        return {"gpu": gpu, "cpu": "--cpu-mem", "disk": "--nvme-mem"}[tier]


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for. `baseline`: host bytes the process holds before anything is placed; `num_gpus`: that the
    units are divided among; `triton`: whether it serves the GPU, if a real one computes."""

    spec: ModelSpec
    workload: Workload
    eviction: EvictionConfig
    dtype: str
    caps: Caps
    compute_tier: str
    baseline: int = 0
    num_gpus: int = 1
    triton: bool = True

    @property
    def kernels(self) -> Kernels:
        """Those of the compute tier."""
        return Kernels.of(self.compute_tier, emulated=self.caps.emulated, triton=self.triton)

    @property
    def stages(self) -> tuple[range, ...]:
        """The units of each GPU."""
        return stages_of(self.spec, self.num_gpus)


@dataclass(frozen=True)
class Plan:
    """A block shape, a placement, and what it takes.

    `predicted` is what the planner expects of the whole call, as a RunRecord has it; None where it expects nothing.
    """

    request: PlanRequest
    policy: OffloadPolicy
    placement: Placement
    footprint: Footprint
    predicted: Mapping[str, Any] | None = None

    def shortage(self) -> tuple[str, int, int] | None:
        """(tier, needed, cap) of the tier that is exceeded most, None where everything fits."""
        tight = []
        for tier in ("gpu", "cpu", "disk"):
            cap, needed = self.request.caps.of(tier), self.footprint.total(tier)
            if cap is not None and needed > cap:
                tight.append((needed - cap, (tier, needed, cap)))
        return max(tight)[1] if tight else None


Planner = Callable[[PlanRequest, OffloadPolicy, frozenset[str]], Plan]
"""Fills in the fields of a policy that are in the set, a subset of config.engine.PLANNED_FIELDS; PlanError where
nothing fits."""


def make_plan(request: PlanRequest, policy: OffloadPolicy) -> Plan:
    """The plan of an explicit policy, fitting or not. A block is never larger than the work there is; prompts are cut
    as suits the device, where that fits."""
    count = request.workload.num_sequences
    size = min(policy.gpu_batch_size, count)
    policy = replace(policy, gpu_batch_size=size, num_gpu_batches=min(policy.num_gpu_batches, -(-count // size)))
    slots = cache_slots(request.spec, request.workload, request.eviction)
    placement = place(request.spec, policy, request.dtype, slots)
    groups = groups_of(policy.num_gpu_batches, request.num_gpus)
    # One batch alone is never parked: its hidden states are wanted again by the very next unit.
    alone = {group[0]: request.compute_tier for group in groups if len(group) == 1}
    placement = replace(placement, hidden={**placement.hidden, **alone})
    cuts = policy.cuts(request.kernels)
    plans = [Plan(request, cut, placement, _footprint(request, cut, placement)) for cut in cuts]
    return next((plan for plan in plans if plan.shortage() is None), plans[-1])


def _footprint(request: PlanRequest, policy: OffloadPolicy, placement: Placement) -> Footprint:
    spec, workload, eviction, tier = request.spec, request.workload, request.eviction, request.compute_tier
    if request.num_gpus > 1:
        block = BlockShape.of(spec, workload, policy, eviction, request.dtype, tier, request.kernels)
        return stage_footprint(block, placement, request.stages, request.baseline)
    return footprint(
        spec,
        workload,
        policy,
        eviction,
        dtype=request.dtype,
        compute_tier=tier,
        assignment=placement,
        baseline=request.baseline,
        kernels=request.kernels,
    )


def require_fit(plan: Plan) -> Plan:
    """`plan`, or PlanError that names the binding tier and the smallest cap that works."""
    short = plan.shortage()
    if short is None:
        return plan
    tier, needed, cap = short
    raise PlanError(
        f"the plan needs {format_bytes(needed)} on the {tier} tier, and its cap is {format_bytes(cap)}:\n"
        + plan.footprint.table(),
        change=f"give {plan.request.caps.flag(tier)} {_at_least(needed)} or more, "
        "a smaller --gpu-batch-size, a smaller --hh-ratio, or a larger share on another tier",
    )


def _at_least(nbytes: int) -> str:
    """A size to type that is no smaller than `nbytes`."""
    if nbytes < 10 * GIB:
        return f"{-(-nbytes // MIB)}MiB"
    return f"{-(-10 * nbytes // GIB) / 10:.1f}GiB"


def automatic(request: PlanRequest, fixed: OffloadPolicy, free: frozenset[str]) -> Plan:
    """The planner that goes by the rule above; PlanError with the smallest plan's needs where nothing fits."""
    last: Plan | None = None
    resident = all_resident(request, fixed, free)
    if resident is not None:
        return resident
    for policy in _candidates(request, fixed, free):
        plan = _fill_weights(request, policy) if "weights" in free else make_plan(request, policy)
        if plan.shortage() is None:
            return plan
        last = plan
    if last is None:
        raise PlanError("no block shape to try")
    return require_fit(last)


def all_resident(request: PlanRequest, fixed: OffloadPolicy, free: frozenset[str]) -> Plan | None:
    """All that is free on the compute tier, one GPU batch at a time, which then is as good as many, and on several GPUs
    one for each. None where that does not fit, or the weights are not free."""
    if "weights" not in free:
        return None
    changes: dict[str, Any] = {
        name: {request.compute_tier: 1.0} for name in ("weights", "cache", "hidden") if name in free
    }
    if "gpu_batch_size" in free:
        changes["gpu_batch_size"] = min(-(-request.workload.num_sequences // request.num_gpus), DEFAULT_BATCH)
    if "num_gpu_batches" in free:
        changes["num_gpu_batches"] = request.num_gpus
    plan = make_plan(request, replace(fixed, **changes))
    return plan if plan.shortage() is None else None


def keeping(planner: Planner, weights: Mapping[str, float], load_seconds: float) -> Planner:
    """`planner`, but weights that lie in these shares, which took `load_seconds`, stay there if that is as good."""

    def plan(request: PlanRequest, fixed: OffloadPolicy, free: frozenset[str]) -> Plan:
        best = planner(request, fixed, free)
        if "weights" not in free:
            return best
        try:
            kept = planner(request, replace(fixed, weights=weights), free - {"weights"})
        except PlanError:
            return best
        return kept if _as_good(kept, best, load_seconds) else best

    return plan


def _as_good(kept: Plan, best: Plan, load_seconds: float) -> bool:
    """Whether `kept` costs no more than loading anew for `best`; without predictions, whether its block is as large."""
    if kept.predicted is not None and best.predicted is not None:
        slower, faster = (plan["prefill_s"] + plan["decode_s"] for plan in (kept.predicted, best.predicted))
        return bool(slower <= faster + load_seconds)
    return kept.policy.block_size >= best.policy.block_size and kept.policy.cache == best.policy.cache


def _candidates(request: PlanRequest, fixed: OffloadPolicy, free: frozenset[str]) -> Iterator[OffloadPolicy]:
    """Policies to try when weights stream, best first: the largest block, on the fastest tier that takes its caches."""
    count = request.workload.num_sequences
    largest = min(-(-count // request.num_gpus), DEFAULT_BATCH)
    sizes = _halvings(largest) if "gpu_batch_size" in free else [fixed.gpu_batch_size]
    for slower in _fallbacks(request, free):
        for size in sizes:
            wanted = min(MOST_BATCHES * request.num_gpus, -(-count // size))
            for batches in _halvings(wanted) if "num_gpu_batches" in free else [fixed.num_gpu_batches]:
                changes: dict[str, Any] = {"gpu_batch_size": size, "num_gpu_batches": batches, **slower}
                yield replace(fixed, **changes)


def _fallbacks(request: PlanRequest, free: frozenset[str]) -> Iterator[dict[str, dict[str, float]]]:
    """Where cache and hidden states may live, fastest first."""
    tiers = ("gpu", "cpu", "disk") if request.compute_tier == "gpu" else ("cpu", "disk")
    for tier in tiers:
        yield {name: {tier: 1.0} for name in ("cache", "hidden") if name in free}
        if "cache" not in free and "hidden" not in free:
            return


def _halvings(value: int) -> list[int]:
    sizes = [max(1, value)]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def _fill_weights(request: PlanRequest, policy: OffloadPolicy) -> Plan:
    """As many weights as fit on the fastest tier, then on the next: the largest shares, by bisection."""
    tiers = ["gpu", "cpu", "disk"] if request.compute_tier == "gpu" else ["cpu", "disk"]
    shares: dict[str, float] = {}
    left = 1.0
    for tier, rest in pairwise(tiers):
        share = _largest_share(request, policy, shares, tier, rest, left)
        shares[tier] = share
        left = max(0.0, left - share)
    shares[tiers[-1]] = left
    return make_plan(request, replace(policy, weights={t: s for t, s in shares.items() if s > 0} or {tiers[-1]: 1.0}))


def _largest_share(
    request: PlanRequest, policy: OffloadPolicy, done: dict[str, float], tier: str, rest: str, left: float
) -> float:
    def fits(share: float) -> bool:
        weights = {name: s for name, s in {**done, tier: share, rest: left - share}.items() if s > 1e-9}
        plan = make_plan(request, replace(policy, weights=weights))
        cap = request.caps.of(tier)
        return cap is None or plan.footprint.total(tier) <= cap

    if fits(left):
        return left
    steps = 2 * len(request.spec.weight_groups)
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(left * middle / steps) else (low, middle)
    return left * low / steps
