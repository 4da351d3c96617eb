"""The messages of `run` about its plans, and when it calibrates this machine for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from h2o_flexgen.cli.program import print_error
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.cores import used_by_others
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.memory.pinned import lockable_memory
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.planning.planner import calibrate_here
from h2o_flexgen.reporting.run_report import ONE_GPU, aligned, block_text, predicted_text, shares_text
from h2o_flexgen.units import format_bytes

_BUSY = 0.25
"""Cores that others use: figures measured beside them would be too low, and take longer."""
_MOST_S = 90.0
"""Seconds of a calibration that nobody asked for: twice what it takes on a machine of its own."""


def let_calibrate(llm: LLM, wanted: bool | None, quiet: bool) -> None:
    """Lets the planner of `llm` measure this machine: where a plan has to move something, or if `wanted` at once.

    An unasked calibration is put off while other programs use the cores, and given up after `_MOST_S` seconds.
    """

    def tell(text: str) -> None:
        if not quiet:
            print_error(f"note: {text}")

    def measure() -> HardwareProfile | None:
        asked = wanted is True
        if not asked and (others := used_by_others()) > _BUSY:
            tell(f"other programs use {others:.1f} cores, so this machine is not calibrated now; --calibrate does it")
            return None
        most = "" if asked else f", {_MOST_S:.0f} s at most"
        tell(f"this machine was not calibrated for such a model yet, which takes about 45 s{most}, once")
        profile = calibrate_here(llm.config, quiet, None if asked else _MOST_S)
        if profile is None:
            print_error("note: calibrating failed, so the plan goes by rule and nothing is predicted")
        return profile

    if wanted is not False:
        llm.planning.calibrate, llm.planning.always = measure, wanted is True


def plan_text(plan: Plan) -> str:
    """The lines about what is going to run, within which limits, and how long that should take."""
    return aligned(_lines(plan))


def _lines(plan: Plan) -> Iterator[tuple[str, str]]:
    request, policy = plan.request, plan.policy
    for tier, cap in request.capped.items():
        used, why = plan.footprint.total(tier), request.caps.why.get(tier, "given")
        if used:
            yield f"{tier} tier", f"{format_bytes(used)} planned of {format_bytes(cap)}: {why}"
    lockable = lockable_memory()
    if request.compute_tier == "gpu" and not request.caps.emulated and lockable is not None:
        yield "pinned", f"{format_bytes(lockable)} may be locked (ulimit -l; H2O_FLEXGEN_MEMLOCK), the rest is pageable"
    shares: Mapping[str, Mapping[str, float]] = plan.placement.achieved(request.spec, request.dtype)
    yield "plan", f"{block_text(policy.to_json())}; {shares_text(shares)}"
    if request.num_gpus > 1:
        units = request.spec.units
        yield "GPUs", "; ".join(f"{units[stage[0]].name} to {units[stage[-1]].name}" for stage in request.stages)
        yield "predicted", ONE_GPU
    if request.choices:
        yield "bits", "as they are: --allow-compress chooses where this machine's rates are known"
    if plan.predicted is None:  # the report says why
        return
    if "bits" in plan.predicted:
        yield "bits", plan.predicted["bits"]["text"]
    yield "predicted", f"{predicted_text(plan.predicted)}, on the rates of {plan.predicted['hardware']}"
    yield "bound", plan.predicted["bound_text"]
    if plan.predicted.get("binding"):
        tier = plan.predicted["binding"]
        yield "binding", f"{request.caps.flag(tier)}: more memory of the {tier} tier would make this faster"
    if plan.predicted.get("runner_up"):
        yield "runner-up", plan.predicted["runner_up"]
