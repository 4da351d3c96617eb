"""Plans by search where the machine's rates are known, else by the engine's rule; and how rates become known."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from h2o_flexgen.config.engine import MEASURED_FIELDS, EngineConfig
from h2o_flexgen.config.flags import flags_of
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.cost.explain import bound_text, runner_up_text
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.search import search
from h2o_flexgen.cost.simulate import Prediction, predict
from h2o_flexgen.engine.limits.plan import Plan, by_rule, make_plan, require_fit
from h2o_flexgen.schedule.request import PlanRequest
from h2o_flexgen.schedule.timeline import Timeline

_NEAR = 0.1
"""The relative difference in lengths and caps up to which a plan that moves something serves again."""

FindRates = Callable[[], HardwareProfile | None]
"""Finds or measures the rates of this machine; None where it cannot."""


class SearchPlanner:
    """A planner (`engine.limits.plan.Planner`) that searches by the cost model once the machine's rates are known.

    find: looks up rates measured earlier; called once. calibrate: measures them; called at most once, if a plan by rule
    has to move something, or with `always` before the first plan. The last searched plan also serves later requests,
    see `_serves`.
    """

    def __init__(self, find: FindRates) -> None:
        self._find: FindRates | None = find
        self._profile: HardwareProfile | None = None
        self.calibrate: FindRates | None = None
        self.always = False
        self._last: Plan | None = None

    def __call__(self, request: PlanRequest) -> Plan:
        """The fastest plan by the cost model, with its prediction; without rates, or for several GPUs, that by rule."""
        if request.num_gpus > 1:
            return by_rule(request)
        if self._find is not None:
            find, self._find = self._find, None
            self._profile = find()
        if self._profile is None:
            plan = by_rule(request)
            if self.calibrate is not None and (self.always or (request.free and plan.moves)):
                calibrate, self.calibrate = self.calibrate, None
                self._profile = calibrate()
            if self._profile is None:
                return plan
        request = replace(request, profile=self._profile)
        if not (request.free or request.choices):
            return _priced(require_fit(make_plan(request, request.policy)))
        if self._last is not None and _serves(self._last, request):
            plan = make_plan(request, self._last.policy)
            if not plan.over:
                binding = (self._last.predicted or {}).get("binding")
                return _priced(replace(plan, searched=True), binding=binding)
        found = search(request)
        best = found.best
        plan = require_fit(make_plan(best.request, best.policy))
        predicted = {**_predicted(request, best.prediction), "binding": found.binding}
        predicted["runner_up"] = runner_up_text(found)
        if found.bits is not None:
            predicted["bits"] = found.bits.to_json()
        self._last = replace(plan, predicted=predicted, searched=True)
        return self._last


def _serves(plan: Plan, request: PlanRequest) -> bool:
    """Whether a search for `request` would hardly find better than `plan`, the result of an earlier search: no data
    moves and one block holds all sequences, or the work is nearly the same and memory has not grown much."""
    known, work = plan.request, request.workload
    same = replace(request, workload=known.workload, caps=known.caps, baseline=known.baseline)
    if same != replace(known, choices={}):
        return False
    before = known.workload
    if not plan.moves and plan.policy.block_size >= before.num_sequences:
        fewer = plan.policy.num_gpu_batches == 1 and work.num_sequences < before.num_sequences
        return fewer or work.num_sequences == before.num_sequences
    lengths = ((work.prompt_len, before.prompt_len), (work.gen_len, before.gen_len))
    return (
        work.num_sequences == before.num_sequences
        and all(abs(now - then) <= _NEAR * then for now, then in lengths)
        and request.capped.keys() == known.capped.keys()
        and all(cap <= (1 + _NEAR) * known.capped[tier] for tier, cap in request.capped.items())
    )


def _priced(plan: Plan, **more: Any) -> Plan:
    """The plan, of a request with rates, with its prediction."""
    request = plan.request
    prediction = predict(CostModel(request, plan.policy, plan.placement))
    return replace(plan, predicted={**_predicted(request, prediction), **more})


def _predicted(request: PlanRequest, prediction: Prediction) -> dict[str, Any]:
    """The `predicted` object of a RunRecord."""
    return {
        "prompt_tokens": prediction.prompt_tokens,
        "generated_tokens": prediction.generated_tokens,
        **prediction.to_json(),
        "bound_text": bound_text(prediction),
        "hardware": request.machine.name,
        "calibrated": request.machine.date,
    }


def predicted_timeline(plan: Plan) -> Timeline | None:
    """The predicted schedule of a plan's first block; None for a plan without a prediction."""
    if plan.predicted is None:
        return None
    return predict(CostModel(plan.request, plan.policy, plan.placement)).block.timeline


def calibrate_here(config: EngineConfig, quiet: bool, most_s: float | None = None) -> HardwareProfile | None:
    """Runs `h2o_flexgen.calibrate` in a process of its own, which stores its measurements; None if it fails, or takes
    longer than `most_s` seconds."""
    command = [sys.executable, "-m", "h2o_flexgen.calibrate", *_flags(config), *(["--quiet"] if quiet else [])]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "profile.json"
        # A session of its own: a Ctrl-C reaches it once, from here, and it has the time to remove its files.
        process = subprocess.Popen([*command, f"--output={output}"], stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait(most_s)
        except BaseException as error:
            process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            code = process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        return None if code else HardwareProfile.load(output)


def _flags(config: EngineConfig) -> Iterator[str]:
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if item.name in MEASURED_FIELDS and value is not None:
            name = flags_of(item)[0]
            size = item.name in ("cpu_mem", "emulate_gpu")
            shown = f"{value}B" if size else str(value).lower() if value is True else value
            yield f"{name}={shown}"
