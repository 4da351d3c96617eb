"""A policy in whole units, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import Placement
from h2o_flexgen.cost.linear import Programs
from h2o_flexgen.cost.lp import KINDS
from h2o_flexgen.cost.predict import Prediction, predict
from h2o_flexgen.cost.request import SearchRequest
from h2o_flexgen.schedule.footprint import Footprint

_WHOLE = 1000  # ticks of a step up to which a candidate is simulated with all its layers
_LEAST_LAYERS = 8


@dataclass(frozen=True)
class Candidate:
    """A policy and what the engine would make of it."""

    request: SearchRequest
    policy: OffloadPolicy
    placement: Placement
    footprint: Footprint

    @cached_property
    def prediction(self) -> Prediction:
        """The whole workload, simulated; of an endless one a block."""
        return predict(self.request.model(self.policy, self.placement))

    @cached_property
    def seconds(self) -> float:
        """Per sequence: what a search makes as small as it can. Of a long schedule an estimate."""
        if self.shrunk is None:
            return _seconds(self.prediction)
        return self.shrunk.seconds * self._formula / self.shrunk._formula

    @cached_property
    def shrunk(self) -> Candidate | None:
        """The same plan for a model of fewer layers, where simulating all would take long.

        What its simulation takes beyond the time of its linear program, this one does too: layers are all alike.
        """
        layers = self.request.spec.num_layers
        few = max(_LEAST_LAYERS, layers * _WHOLE // self._ticks_of_step)
        if few >= layers:
            return None
        request = replace(self.request, spec=replace(self.request.spec, num_layers=few), caps={})
        placement = request.place(self.policy)
        return Candidate(request, self.policy, placement, request.footprint(self.policy, placement))

    @property
    def resident(self) -> bool:
        """Whether everything stays where it is computed on."""
        kinds = (self.placement.weights, self.placement.cache, self.placement.hidden)
        return {tier for homes in kinds for tier in homes.values()} == {self.request.compute_tier}

    @property
    def ticks(self) -> int:
        """How much work it was to find out `seconds`."""
        if self.shrunk is not None:
            return self.shrunk.ticks
        return self._ticks_of_step * len(self.prediction.block.steps)

    @property
    def _ticks_of_step(self) -> int:
        return len(self.request.spec.units) * self.policy.num_gpu_batches

    @cached_property
    def _formula(self) -> float:
        """Seconds of a block by the linear program, with the shares that whole units come to."""
        shares = self.placement.achieved(self.request.spec, self.request.dtype)
        program = Programs(self.request).of(self.policy)
        return program.seconds({kind: shares[kind] for kind in KINDS})


def _seconds(prediction: Prediction) -> float:
    return (prediction.prefill_s + prediction.decode_s) / prediction.sequences
