"""Plans of a program: searched where the machine's rates are known, else by rule; told before, compared afterwards."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from h2o_flexgen.calibration.stored import cached_profile
from h2o_flexgen.cli.program import print_error
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile, misfits
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.bound import io_lower_bound
from h2o_flexgen.cost.explain import bound_text
from h2o_flexgen.cost.predict import Prediction, predict
from h2o_flexgen.cost.request import SearchRequest
from h2o_flexgen.cost.roofline import Ran, Rooflines
from h2o_flexgen.cost.search import search
from h2o_flexgen.engine.limits.plan import Plan, PlanRequest, automatic, make_plan, require_fit
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.memory.pinned import lockable_memory
from h2o_flexgen.reporting.run_report import ONE_GPU, aligned, block_text, predicted_text, shares_text
from h2o_flexgen.units import format_bytes

Say = Callable[[str], None]

_MEASURED = ("model", "path", "revision", "offline", "dtype", "device", "emulate_gpu", "offload_dir")
"""The settings of an engine that say what is calibrated, and where."""


class Planning:
    """The planner of one engine (`LLM.planner`), and what there is to tell of its plans (`LLM.on_plan`).

    hardware: the rates to plan on; None: those calibrated on this machine. calibrate: see PlanningConfig.
    """

    def __init__(self, llm: LLM, hardware: HardwareProfile | None, calibrate: bool | None, quiet: bool) -> None:
        self._llm, self._calibrate, self._quiet = llm, calibrate, quiet
        self._profile, self._looked = hardware, hardware is not None
        self._plans: list[Plan] = []
        for why in () if hardware is None else misfits(hardware, llm.model.spec, llm.model.dtype):
            self._say(f"note: {why}")

    def __call__(self, request: PlanRequest, fixed: OffloadPolicy, free: frozenset[str]) -> Plan:
        """The plan that is fastest by the cost model, with what it predicts; without rates the plan by rule.

        Where the rates are not known yet, the plan by rule is made first. One that keeps everything where it is
        computed on leaves little to gain and is taken; a search is worth a calibration where something has to move.
        What is divided among several GPUs is always planned by rule: the cost model knows one.
        """
        if request.num_gpus > 1:
            return automatic(request, fixed, free)
        profile = self._known(request)
        if profile is None:
            plan = automatic(request, fixed, free)
            wanted = bool(free) and _moves(plan) if self._calibrate is None else self._calibrate
            profile = self._calibrated() if wanted else None
            if profile is None:
                return plan
        question = _question(request, fixed, free, profile)
        if not free:
            plan = require_fit(make_plan(request, fixed))
            return replace(plan, predicted=_predicted(predict(question.model(plan.policy, plan.placement)), profile))
        found = search(question)
        plan = require_fit(make_plan(request, found.policy))
        return replace(plan, predicted={**_predicted(found.predicted, profile), "binding": found.binding})

    def announce(self, plan: Plan) -> None:
        """Says what is going to run, within which limits, and how long that should take."""
        self._plans.append(plan)
        self._say(aligned(_told(plan)))

    def completed(self, record: RunRecord, prompt_len: int, generated: int) -> RunRecord:
        """`record` with what was predicted before the run, the fewest bytes that any schedule must move, and the
        seconds of its roofline.

        prompt_len and generated: the fewest tokens of any sequence, so that the bound holds for all. Where memory ran
        out, and not everything was run by one plan, there is no such bound; what was predicted is the first plan's.
        """
        first, *others = self._plans
        least = None if others or first.request.num_gpus > 1 else _least_moved(first, prompt_len, generated)
        predicted = None if first.predicted is None else dict(first.predicted)
        roofline = self._roofline(record, first.request)
        policy = dict(record.policy)
        if first.predicted is not None and "binding" in first.predicted:
            policy["chosen"] = "search"
        return replace(record, policy=policy, predicted=predicted, least_bytes_moved=least, roofline=roofline)

    def _roofline(self, record: RunRecord, request: PlanRequest) -> dict[str, Any] | None:
        """Priced at the rates that plans were made with, which are those of one GPU."""
        if record.roofline is None or request.num_gpus > 1:
            return record.roofline
        ran = Ran(request.spec, request.workload, request.eviction, request.dtype, request.compute_tier)
        return Rooflines(ran, self._profile, record.bandwidth).priced(record.roofline, self._llm.last_work)

    def _say(self, text: str) -> None:
        if not self._quiet:
            print_error(text)

    def _known(self, request: PlanRequest) -> HardwareProfile | None:
        """The rates that were asked for or measured before; looked for once."""
        if not self._looked:
            self._looked = True
            llm = self._llm
            self._profile = cached_profile(
                request.spec,
                request.dtype,
                llm.device,
                emulated=llm.config.emulate_gpu is not None,
                offload_dir=llm.offload_folder,
            )
        return self._profile

    def _calibrated(self) -> HardwareProfile | None:
        """The rates, measured now; None where that fails, which is no reason not to run."""
        self._say("note: this machine was not calibrated for such a model yet, which takes about 45 s, once")
        self._calibrate = False
        self._profile = calibrate_here(self._llm.config, self._quiet)
        if self._profile is None:
            print_error("note: calibrating failed, so the plan goes by rule and nothing is predicted")
        return self._profile


def calibrate_here(config: EngineConfig, quiet: bool) -> HardwareProfile | None:
    """Runs `h2o_flexgen.calibrate`, which keeps what it measures; None where it fails.

    In a process of its own: what it takes of memory is no part of the run's, and is given back before that begins.
    """
    command = [sys.executable, "-m", "h2o_flexgen.calibrate", *_flags(config), *(["--quiet"] if quiet else [])]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "profile.json"
        # A session of its own: a Ctrl-C reaches it once, from here, and it has the time to remove its files.
        process = subprocess.Popen([*command, f"--output={output}"], stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        return None if code else HardwareProfile.load(output)


def _flags(config: EngineConfig) -> Iterator[str]:
    """The settings in `_MEASURED` as one types them."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if item.name in _MEASURED and value is not None:
            name = item.metadata["flags"][0]
            shown = f"{value}B" if item.name == "emulate_gpu" else str(value).lower() if value is True else value
            yield f"{name}={shown}"


def _question(
    request: PlanRequest, fixed: OffloadPolicy, free: frozenset[str], profile: HardwareProfile
) -> SearchRequest:
    names = [item.name for item in dataclasses.fields(OffloadPolicy) if item.name not in free]
    return SearchRequest(
        spec=request.spec,
        workload=request.workload,
        eviction=request.eviction,
        dtype=request.dtype,
        caps={tier: cap for tier, cap in _capped(request).items() if cap is not None},
        compute_tier=request.compute_tier,
        profile=profile,
        fixed={name: getattr(fixed, name) for name in names},
        baseline=request.baseline,
        emulated=request.caps.emulated,
        triton=request.triton,
    )


def _least_moved(plan: Plan, prompt_len: int, generated: int) -> dict[str, int]:
    """By blocks of the size that ran, within the same caps, less what the process holds whatever the schedule."""
    request, sequences, caps = plan.request, plan.request.workload.num_sequences, _capped(plan.request)
    block = min(plan.policy.block_size, sequences)
    if caps["cpu"] is not None:
        caps["cpu"] = max(0, caps["cpu"] - request.baseline)
    least = io_lower_bound(
        request.spec,
        Workload(prompt_len, max(1, generated), block),
        request.eviction,
        request.dtype,
        caps,
        request.compute_tier,
        block,
        cpu_cache_compute=plan.policy.cpu_cache_compute,
    )
    return {link: sequences // block * nbytes for link, nbytes in least.items()}


def _capped(request: PlanRequest) -> dict[str, int | None]:
    return {tier: request.caps.of(tier) for tier in _tiers(request)}


def _tiers(request: PlanRequest) -> tuple[str, ...]:
    return ("gpu", "cpu", "disk") if request.compute_tier == "gpu" else ("cpu", "disk")


def _moves(plan: Plan) -> bool:
    """Whether anything lives elsewhere than where it is computed on."""
    placed = plan.placement
    homes = {*placed.weights.values(), *placed.cache.values(), *placed.hidden.values()}
    return homes != {plan.request.compute_tier}


def _predicted(prediction: Prediction, profile: HardwareProfile) -> dict[str, Any]:
    """The `predicted` object of a RunRecord: what is expected of which work, why, and on whose rates."""
    return {
        "prompt_tokens": prediction.prompt_tokens,
        "generated_tokens": prediction.generated_tokens,
        **prediction.to_json(),
        "bound_text": bound_text(prediction),
        "hardware": profile.name,
        "calibrated": profile.date,
    }


def _told(plan: Plan) -> Iterator[tuple[str, str]]:
    request, policy = plan.request, plan.policy
    for tier, cap in _capped(request).items():
        used, why = plan.footprint.total(tier), request.caps.why.get(tier, "given")
        if cap is not None and used:
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
    if plan.predicted is None:  # the report says why
        return
    yield "predicted", f"{predicted_text(plan.predicted)}, on the rates of {plan.predicted['hardware']}"
    yield "bound", plan.predicted["bound_text"]
    if plan.predicted.get("binding"):
        tier = plan.predicted["binding"]
        yield "binding", f"{request.caps.flag(tier)}: more memory of the {tier} tier would make this faster"
