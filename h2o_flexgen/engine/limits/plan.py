"""Plans by rule: block shape and placement, judged by `schedule.footprint` before anything is allocated.

The rule: as many rows per GPU batch as asked for or sensible, then as many weights on the fastest tier as fit, the rest
one tier down. Out of memory during a call: `OomRetry` plans again within less.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import KINDS
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.errors import PlanError, is_out_of_memory
from h2o_flexgen.schedule.footprint import PlacedPolicy
from h2o_flexgen.schedule.request import Caps, PlanRequest
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
    return left * bisect_left(range(1, steps), True, key=lambda step: not fits(left * step / steps)) / steps


log = logging.getLogger(__name__)

TRIES = 3
"""Plans of a call before it fails."""
LESS = 0.8
"""The share of the exhausted tier's planned bytes that the next plan may take."""
_SHAPE = frozenset({"gpu_batch_size", "num_gpu_batches"})


class OomRetry:
    """Caps learned when an engine ran out of memory, and what the current call has tried.

    Finished rows stay; the others run again from their prompts, and give the same tokens.
    """

    def __init__(self) -> None:
        self._caps: dict[str, int] = {}
        self._tried: list[str] = []
        self.warnings: list[str] = []

    def begin(self) -> None:
        """A new call: tries start over, caps stay."""
        self._tried, self.warnings = [], []

    def within(self, planner: Planner) -> Planner:
        """`planner` within the learned caps; a fixed block shape that does not fit them is chosen anew. PlanError with
        what was tried if nothing fits."""
        if not self._caps:
            return planner

        def plan(request: PlanRequest) -> Plan:
            smaller = replace(request, caps=self._lowered(request.caps))
            try:
                try:
                    return planner(smaller)
                except PlanError:
                    if request.free >= _SHAPE:
                        raise
                fixed = {name: value for name, value in request.fixed.items() if name not in _SHAPE}
                return planner(replace(smaller, fixed=fixed))
            except PlanError as error:
                if not self._tried:
                    # The caps are of an earlier call: a plan within the request's own is not known to fail.
                    self._caps.clear()
                    return planner(request)
                raise self._given_up(str(error).partition("\n")[0]) from error

        return plan

    def learn(self, error: Exception, plan: Plan, waiting: Collection[Sequence]) -> None:
        """Learns a cap from the `error` of running `plan`, and restarts the rows of `waiting`.

        Raises `error` itself if memory was not short, and PlanError after too many tries.
        """
        if not is_out_of_memory(error):
            raise error
        tier = _exhausted(error, plan)
        self._tried.append(f"{plan.policy.num_gpu_batches} x {plan.policy.gpu_batch_size} sequences")
        if len(self._tried) > TRIES:
            raise self._given_up(f"{type(error).__name__} {str(error).partition(chr(10))[0]}".strip()) from error
        held = plan.request.baseline if tier == "cpu" else 0
        taken = max(0, plan.footprint.total(tier) - held)
        self._caps[tier] = held + int(LESS * taken)
        for row in waiting:
            row.restart()
        message = (
            f"memory of the {tier} tier ran out under a plan for {format_bytes(taken)} of it: planned anew for at most "
            f"{format_bytes(LESS * taken)}, and {len(waiting)} unfinished sequences run again from their prompts"
        )
        self.warnings.append(message)
        log.warning(message)

    def _lowered(self, caps: Caps) -> Caps:
        def least(tier: str) -> int | None:
            return min((cap for cap in (caps.of(tier), self._caps.get(tier)) if cap is not None), default=None)

        why = {**caps.why, **dict.fromkeys(self._caps, "after memory ran out")}
        return replace(caps, gpu=least("gpu"), cpu=least("cpu"), disk=least("disk"), why=why)

    def _given_up(self, why: str) -> PlanError:
        return PlanError(
            f"out of memory: {why.rstrip(':')}",
            f"tried blocks of {', then '.join(self._tried)}",
            "free some memory, or lower --gpu-mem, --cpu-mem, --gpu-batch-size or --hh-ratio",
        )


def _exhausted(error: Exception, plan: Plan) -> str:
    """The tier whose memory ran out; with an emulated gpu, where both are host memory, the one that holds more."""
    emulated, on_gpu = plan.request.caps.emulated, plan.request.compute_tier == "gpu"
    if on_gpu and not emulated:
        told = f"{type(error).__name__} {error}"
        return "gpu" if any(word in told for word in ("OutOfMemoryError", "CUDA", "CUBLAS", "GPU")) else "cpu"
    shares = {"cpu": plan.footprint.total("cpu") - plan.request.baseline, "gpu": plan.footprint.total("gpu")}
    return max(shares, key=lambda tier: shares[tier]) if emulated else "cpu"


def forget() -> None:
    """Frees garbage, and the GPU memory that torch caches."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
