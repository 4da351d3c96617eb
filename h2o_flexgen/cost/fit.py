"""From shares to whole units: a placement that the engine would make, and that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from h2o_flexgen.config.offload import OffloadPolicy, Shares
from h2o_flexgen.cost.candidate import Candidate
from h2o_flexgen.cost.lp import KINDS, Program, solve, tidy
from h2o_flexgen.cost.request import SearchRequest

_TIGHTENINGS = 5  # of caps by what rounding overshot
_PUSHES = 64  # of single units, where that does not help


def place(request: SearchRequest, policy: OffloadPolicy) -> Candidate:
    """`policy` in whole units, fitting or not. What has no effect is dropped, as far as it is free."""
    placement = request.place(policy)
    if policy.cpu_cache_compute and "cpu" not in placement.cache.values() and "cpu_cache_compute" not in request.fixed:
        policy = replace(policy, cpu_cache_compute=False)
    held = {
        "weights": set(placement.weights.values()),
        "cache": set(placement.cache.values()),
        "hidden": set(placement.hidden.values()),
    }
    clean = {
        kind: _without(getattr(policy, kind), held[kind])
        for kind in KINDS
        if kind not in request.fixed and not held[kind] >= set(getattr(policy, kind))
    }
    if clean:
        policy = request.with_shares(policy, clean)
        placement = request.place(policy)
    return Candidate(request, policy, placement, request.footprint(policy, placement))


def fit(request: SearchRequest, policy: OffloadPolicy, program: Program, solver: str) -> Candidate | None:
    """The fastest placement of `policy`'s block, in whole units; None where none was found that fits.

    Rounding to units may overshoot a cap: then that is taken off the cap and the program solved again.
    """
    caps, placed = dict(program.caps), None
    for _ in range(_TIGHTENINGS):
        solution = solve(replace(program, caps=caps), solver)
        if solution is None:
            break
        placed = place(request, request.with_shares(policy, solution.shares))
        over = request.over(placed.footprint)
        if not over:
            return placed
        for tier, nbytes in over.items():
            caps[tier] -= nbytes
    return None if placed is None else _push_down(request, placed)


def _push_down(request: SearchRequest, candidate: Candidate) -> Candidate | None:
    """`candidate` with units moved one by one from tiers that are too full to the next slower ones, until all fits."""
    for _ in range(_PUSHES):
        over = request.over(candidate.footprint)
        if not over:
            return candidate
        moved = next((found for tier in over for kind in KINDS if (found := shift(candidate, kind, tier, 1))), None)
        if moved is None:
            return None
        candidate = moved
    return None


def shift(candidate: Candidate, kind: str, tier: str, down: int) -> Candidate | None:
    """One unit of `kind` moved from `tier` to the next slower tier (`down` 1) or the next faster one (-1).

    None where the kind is fixed, `tier` holds none of it, or there is no such tier.
    """
    request, shares = candidate.request, dict(getattr(candidate.policy, kind))
    position = request.tiers.index(tier) + down if tier in request.tiers else -1
    alone = kind == "hidden" and candidate.policy.num_gpu_batches == 1
    if kind in request.fixed or alone or not shares.get(tier) or not 0 <= position < len(request.tiers):
        return None
    units = len(getattr(candidate.placement, kind))
    step, target = min(shares[tier], 1 / units), request.tiers[position]
    shares[tier] -= step
    shares[target] = shares.get(target, 0.0) + step
    return place(request, request.with_shares(candidate.policy, {kind: tidy(shares)}))


def _without(shares: Mapping[str, float], kept: set[str]) -> Shares:
    """`shares` of the tiers in `kept` alone; the largest takes what the others had."""
    return tidy({tier: share for tier, share in shares.items() if tier in kept} or dict.fromkeys(kept, 1.0))
