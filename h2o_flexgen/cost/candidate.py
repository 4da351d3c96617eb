"""A policy in whole units, how long it would take, and how shares become one that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from h2o_flexgen.config.offload import OffloadPolicy, Shares
from h2o_flexgen.config.placement import KINDS
from h2o_flexgen.cost.linear import Programs
from h2o_flexgen.cost.lp import Program, solve, tidy
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.simulate import Prediction, predict
from h2o_flexgen.schedule.footprint import PlacedPolicy
from h2o_flexgen.schedule.request import PlanRequest

_WHOLE = 1000  # ticks of a step up to which a candidate is simulated with all its layers
_LEAST_LAYERS = 8
_TIGHTENINGS = 5  # of caps by what rounding overshot
_PUSHES = 64  # of single units, where that does not help


class Candidate(PlacedPolicy):
    """A policy and how long the engine would take with it."""

    @cached_property
    def prediction(self) -> Prediction:
        """The whole workload, simulated; of an endless one a block."""
        return predict(self._model)

    @cached_property
    def seconds(self) -> float:
        """Seconds per sequence, which a search makes as small as it can. An estimate for a long schedule."""
        if self.shrunk is None:
            return self.prediction.total_s / self.prediction.sequences
        return self.shrunk.seconds * self._formula / self.shrunk._formula

    @cached_property
    def shrunk(self) -> Candidate | None:
        """The same plan for a model of fewer layers, where simulating all would take long.

        The ratio of its simulated time to that of its linear program holds for this one, too: layers are all alike.
        """
        layers = self.request.spec.num_layers
        few = max(_LEAST_LAYERS, layers * _WHOLE // self._ticks_of_step)
        if few >= layers:
            return None
        request = replace(self.request, spec=replace(self.request.spec, num_layers=few))
        return Candidate(request, self.policy, request.place(self.policy))

    @cached_property
    def moved(self) -> float:
        """Bytes over all links, per sequence of a block."""
        sequences = min(self.policy.block_size, self.request.workload.num_sequences)
        return sum(self._model.moves.bytes_moved().values()) / sequences

    @property
    def ticks(self) -> int:
        """How much work it was to find out `seconds`."""
        if self.shrunk is not None:
            return self.shrunk.ticks
        return self._ticks_of_step * len(self.prediction.block.steps)

    @cached_property
    def _ticks_of_step(self) -> int:
        shape = self._model.shape
        streamed = sum(key in shape.streamed for unit in shape.units for key in unit.experts)
        return len(shape.units) * shape.num_batches + streamed // shape.experts_per_tick

    @cached_property
    def _model(self) -> CostModel:
        return CostModel(self.request, self.policy, self.placement)

    @cached_property
    def _formula(self) -> float:
        """Seconds of a block by the linear program, with the shares that whole units come to."""
        shares = self.placement.achieved(self.request.spec, self.request.dtype)
        program = Programs(self.request).of(self.policy)
        return program.seconds({kind: shares[kind] for kind in KINDS})


def place(request: PlanRequest, policy: OffloadPolicy) -> Candidate:
    """`policy` in whole units, fitting or not. Settings without effect are dropped, unless the user fixed them."""
    placement = request.place(policy)
    if policy.cpu_cache_compute and "cpu" not in placement.cache.values() and "cpu_cache_compute" not in request.fixed:
        policy = replace(policy, cpu_cache_compute=False)
    held = {kind: set(getattr(placement, kind).values()) for kind in KINDS}
    clean = {
        kind: _without(getattr(policy, kind), held[kind])
        for kind in KINDS
        if kind not in request.fixed and not held[kind] >= set(getattr(policy, kind))
    }
    if clean:
        policy = request.with_shares(policy, clean)
        placement = request.place(policy)
    return Candidate(request, policy, placement)


def fit(request: PlanRequest, policy: OffloadPolicy, program: Program, solver: str) -> Candidate | None:
    """The fastest placement of `policy`'s block, in whole units; None where none was found that fits.

    Rounding to units may overshoot a cap: then that is taken off the cap and the program solved again.
    """
    caps, placed = dict(program.caps), None
    for _ in range(_TIGHTENINGS):
        solution = solve(replace(program, caps=caps), solver)
        if solution is None:
            break
        placed = place(request, request.with_shares(policy, solution.shares))
        over = placed.over
        if not over:
            return placed
        for tier, nbytes in over.items():
            caps[tier] -= nbytes
    return None if placed is None else _push_down(placed)


def _push_down(candidate: Candidate) -> Candidate | None:
    """`candidate` with units moved one by one from tiers that are too full to the next slower ones, until all fits."""
    for _ in range(_PUSHES):
        over = candidate.over
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
    fixed = request.fixed_shares(candidate.policy)
    if kind in fixed or not shares.get(tier) or not 0 <= position < len(request.tiers):
        return None
    units = len(getattr(candidate.placement, kind))
    step, target = min(shares[tier], 1 / units), request.tiers[position]
    shares[tier] -= step
    shares[target] = shares.get(target, 0.0) + step
    return place(request, request.with_shares(candidate.policy, {kind: tidy(shares)}))


def _without(shares: Mapping[str, float], kept: set[str]) -> Shares:
    """`shares` of the tiers in `kept` alone; the largest takes what the others had."""
    return tidy({tier: share for tier, share in shares.items() if tier in kept} or dict.fromkeys(kept, 1.0))
