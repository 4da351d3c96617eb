"""Plans by rule: block shape and placement, judged by `schedule.footprint` before anything is allocated.

The rule: as many rows per GPU batch as asked for or sensible, then as many weights on the fastest tier as fit, the rest
one tier down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import KINDS
from h2o_flexgen.errors import PlanError
from h2o_flexgen.schedule.footprint import PlacedPolicy
from h2o_flexgen.schedule.request import PlanRequest
from h2o_flexgen.schedule.weight_room import expert_slots
from h2o_flexgen.units import format_bytes, size_at_least

DEFAULT_BATCH = 32
"""Rows at which products of a decode step come close to their full rate."""
MOST_BATCHES = 8
"""Most GPU batches per block when weights stream: each doubling halves the weight bytes per token."""


@dataclass(frozen=True)
class Plan(PlacedPolicy):
    """A policy to be run. `predicted`: of the whole call, as in a RunRecord; None without a prediction. `searched`:
    whether a search chose it."""

    predicted: Mapping[str, Any] | None = None
    searched: bool = False

    @property
    def expert_slots(self) -> int:
        request = self.request
        tokens = request.tokens_of(self.policy)
        return expert_slots(request.spec, self.placement.weights, request.compute_tier, tokens)

    def shortage(self) -> tuple[str, int, int] | None:
        """(tier, needed, cap) of the tier that is exceeded most; None if everything fits."""
        over = self.over
        if not over:
            return None
        tier = max(over, key=lambda name: over[name])
        return tier, self.footprint.total(tier), self.request.capped[tier]


Planner = Callable[[PlanRequest], Plan]
"""Chooses what a request leaves free; PlanError if nothing fits."""


def make_plan(request: PlanRequest, policy: OffloadPolicy) -> Plan:
    """The plan of an explicit policy, fitting or not, with a block no larger than the work, and prompts cut as suits
    the device if that fits."""
    count = request.workload.num_sequences
    size = min(policy.gpu_batch_size, count)
    policy = replace(policy, gpu_batch_size=size, num_gpu_batches=min(policy.num_gpu_batches, -(-count // size)))
    return Plan(request, policy, request.place(policy)).cut()


def require_fit(plan: Plan) -> Plan:
    """`plan`, or PlanError that names the binding tier and the smallest cap that works."""
    short = plan.shortage()
    if short is None:
        return plan
    tier, needed, cap = short
    caps = plan.request.caps
    origin, more = caps.origin(tier), f"give {caps.flag(tier)} {size_at_least(needed)} or more"
    if tier == "disk" and origin:
        more = "name another folder with --offload-dir"
    raise PlanError(
        f"the plan needs {format_bytes(needed)} on the {tier} tier, and its cap is {format_bytes(cap)}{origin}:\n"
        + plan.footprint.table(),
        change=f"{more}, a smaller --gpu-batch-size, a smaller --hh-ratio, or a larger share on another tier",
    )


def by_rule(request: PlanRequest) -> Plan:
    """The planner by rule; PlanError with the smallest plan's needs if nothing fits."""
    resident = _all_resident(request)
    if resident is not None:
        return resident
    for policy in _candidates(request):
        plan = _fill_weights(request, policy) if "weights" in request.free else make_plan(request, policy)
        if not plan.over:
            break
    return require_fit(plan)


def _all_resident(request: PlanRequest) -> Plan | None:
    """The plan with every free kind on the compute tier and one GPU batch per GPU; None if that does not fit, or the
    weights' placement is given."""
    free = request.free
    if "weights" not in free:
        return None
    changes: dict[str, Any] = {kind: {request.compute_tier: 1.0} for kind in KINDS if kind in free}
    if "gpu_batch_size" in free:
        changes["gpu_batch_size"] = min(-(-request.workload.num_sequences // request.num_gpus), DEFAULT_BATCH)
    if "num_gpu_batches" in free:
        changes["num_gpu_batches"] = request.num_gpus
    plan = make_plan(request, replace(request.policy, **changes))
    return None if plan.over else plan


def keeping(planner: Planner, weights: Mapping[str, float], load_seconds: float) -> Planner:
    """`planner`, but weights that are loaded in these shares (in `load_seconds`) stay if that is as good."""

    def plan(request: PlanRequest) -> Plan:
        best = planner(request)
        if "weights" not in request.free or best.policy.weights == weights:
            return best
        try:
            kept = planner(replace(request, fixed={**request.fixed, "weights": weights}))
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


def _candidates(request: PlanRequest) -> Iterator[OffloadPolicy]:
    """Policies to try when weights stream, best first: the largest block, on the fastest tier that takes its caches."""
    count, given, free = request.workload.num_sequences, request.policy, request.free
    largest = min(-(-count // request.num_gpus), DEFAULT_BATCH)
    sizes = _halvings(largest) if "gpu_batch_size" in free else [given.gpu_batch_size]
    state = [kind for kind in ("cache", "hidden") if kind in free]
    for tier in request.tiers if state else request.tiers[:1]:
        slower: dict[str, Any] = {kind: {tier: 1.0} for kind in state}
        for size in sizes:
            wanted = min(MOST_BATCHES * request.num_gpus, -(-count // size))
            for batches in _halvings(wanted) if "num_gpu_batches" in free else [given.num_gpu_batches]:
                yield replace(given, gpu_batch_size=size, num_gpu_batches=batches, **slower)


def _halvings(value: int) -> list[int]:
    return [value >> halvings for halvings in range(value.bit_length())] or [1]


def _fill_weights(request: PlanRequest, policy: OffloadPolicy) -> Plan:
    """As many weights as fit on the fastest tier, then on the next: the largest shares, by bisection."""
    tiers, shares, left = request.tiers, dict[str, float](), 1.0
    for tier, rest in pairwise(tiers):
        shares[tier] = _largest_share(request, policy, shares, tier, rest, left)
        left = max(0.0, left - shares[tier])
    shares[tiers[-1]] = left
    return make_plan(request, replace(policy, weights={t: s for t, s in shares.items() if s > 0} or {tiers[-1]: 1.0}))


def _largest_share(
    request: PlanRequest, policy: OffloadPolicy, done: dict[str, float], tier: str, rest: str, left: float
) -> float:
    def fits(share: float) -> bool:
        weights = {name: s for name, s in {**done, tier: share, rest: left - share}.items() if s > 1e-9}
        plan = make_plan(request, replace(policy, weights=weights))
        return tier not in plan.over

    if fits(left):
        return left
    steps = 2 * len(request.spec.weight_groups)
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(left * middle / steps) else (low, middle)
    return left * low / steps
