"""Out of memory during a call: plan again within less memory, and run unfinished sequences again from their prompts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection
from dataclasses import replace

import torch

from h2o_flexgen.engine.limits.plan import Plan, Planner
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.errors import PlanError, is_out_of_memory
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.units import format_bytes

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
