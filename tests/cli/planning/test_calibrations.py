"""When `run` calibrates the machine before it plans, what it does with the rates, and how it goes on without any."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest

from h2o_flexgen.calibration.stored import keep_profile, profile_key
from h2o_flexgen.cli import planning
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.planning.planner import calibrate_here
from tests.cli.planning.conftest import RATES, TIGHT, WORK
from tests.programs import Run

NOTHING = "predicted   nothing: this machine is not calibrated"


def test_what_fits_runs_at_once_by_rule(model: Path, run: Run, calibrations) -> None:
    ran = run("--model", model, *WORK)
    assert (ran.code, calibrations) == (0, [])
    assert ran.record["predicted"] is None
    assert ran.err.count(NOTHING) == ran.err.count("calibrated") == 1, "one line, which says what to do"
    assert "roofline" not in ran.err, "there are no rates"
    assert "disk tier" not in ran.err, "there is nothing on it"


def test_what_does_not_fit_is_worth_a_calibration(model: Path, run: Run, calibrations) -> None:
    ran = run("--model", model, *WORK, *TIGHT)
    assert (ran.code, len(calibrations)) == (0, 1)
    assert ran.record["predicted"]["hardware"] == "a made-up machine"
    assert "note: this machine was not calibrated for such a model yet" in ran.err


def test_beside_other_programs_it_is_put_off_unless_asked_for(model: Path, run: Run, calibrations, monkeypatch) -> None:
    monkeypatch.setattr(planning, "used_by_others", lambda: 1.1)
    ran = run("--model", model, *WORK, *TIGHT)
    assert (ran.code, ran.record["predicted"], calibrations) == (0, None, [])
    assert "note: other programs use 1.1 cores, so this machine is not calibrated now; --calibrate does it" in ran.err
    assert run("--model", model, *WORK, *TIGHT, "--calibrate").record["predicted"] is not None
    assert len(calibrations) == 1


def test_calibrate_asks_for_it_and_no_calibrate_forbids_it(model: Path, run: Run, calibrations, monkeypatch) -> None:
    assert run("--model", model, *WORK, *TIGHT, "--no-calibrate").record["predicted"] is None
    monkeypatch.setenv("H2O_FLEXGEN_CALIBRATE", "false")
    assert run("--model", model, *WORK, *TIGHT).record["predicted"] is None
    assert calibrations == []
    assert run("--model", model, *WORK, "--calibrate").record["predicted"] is not None
    assert len(calibrations) == 1


def test_a_calibration_that_fails_is_no_reason_not_to_run(model: Path, run: Run, monkeypatch) -> None:
    monkeypatch.setattr(planning, "calibrate_here", lambda config, quiet, most_s: None)
    ran = run("--model", model, *WORK, *TIGHT)
    assert (ran.code, ran.record["predicted"]) == (0, None)
    assert "note: calibrating failed, so the plan goes by rule" in ran.err


def test_what_was_measured_before_is_used(model: Path, run: Run, calibrations) -> None:
    with LLM(str(model)) as llm:
        key = profile_key(llm.model.spec, llm.model.dtype, llm.device, offload_dir=llm.offload_folder)
    assert keep_profile(RATES, key) is not None
    ran = run("--model", model, *WORK, "-q")
    assert ran.record["predicted"]["hardware"] == "a made-up machine"
    assert (ran.err, calibrations) == ("", [])


def test_a_whole_policy_is_predicted_and_never_worth_a_calibration(
    model: Path, run: Run, hardware: Path, tmp_path: Path, calibrations
) -> None:
    whole = tmp_path / "policy.json"
    whole.write_text(json.dumps({"gpu_batch_size": 4, "num_gpu_batches": 2, "weights": {"disk": 1.0}}))
    assert run("--model", model, *WORK, "--policy", whole).record["predicted"] is None
    assert calibrations == []
    record = run("--model", model, *WORK, "--policy", whole, "--hardware", hardware).record
    assert record["predicted"]["bytes_moved"]["disk->cpu"] == pytest.approx(record["bytes_moved"]["disk->cpu"], rel=0.1)


class FakeProcess:
    """subprocess.Popen: writes a profile, fails, or is interrupted while it is waited for."""

    ending: int | type[BaseException] = 0
    commands: list[list[str]] = []  # noqa: RUF012  # of the test
    signals: ClassVar[list[int]] = []

    def __init__(self, command: list[str], **options: Any) -> None:
        assert options["start_new_session"]
        self.commands.append(command)
        self._waited = 0
        if self.ending == 0:
            Path(command[-1].removeprefix("--output=")).write_text(json.dumps(RATES.to_json()))

    def wait(self, timeout: float | None = None) -> int:
        self._waited += 1
        if isinstance(self.ending, int):
            return self.ending
        if self._waited == 1:
            raise self.ending(["calibrate"], timeout) if self.ending is subprocess.TimeoutExpired else self.ending
        return 143

    def send_signal(self, number: int) -> None:
        FakeProcess.signals.append(number)


def test_a_calibration_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    config = EngineConfig(model="opt-125m", emulate_gpu="2GiB", offload_dir="/somewhere", offline=True, cpu_mem="9GiB")
    assert calibrate_here(config, quiet=True) == RATES
    flags = FakeProcess.commands[-1][2:]
    assert flags[0] == "h2o_flexgen.calibrate"
    assert {"--model=opt-125m", "--offload-dir=/somewhere", "--offline=true", "--quiet"} <= set(flags)
    assert f"--emulate-gpu={2 << 30}B" in flags
    assert [flag for flag in flags if "mem" in flag] == [f"--cpu-mem={9 << 30}B"], "it keeps to the cap as well"
    monkeypatch.setattr(FakeProcess, "ending", 6)
    assert calibrate_here(config, quiet=False) is None
    monkeypatch.setattr(FakeProcess, "ending", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrate_here(config, quiet=False)
    monkeypatch.setattr(FakeProcess, "ending", subprocess.TimeoutExpired)
    assert calibrate_here(config, quiet=False, most_s=90.0) is None, "it is stopped, and the run goes on"
    assert FakeProcess.signals == [signal.SIGINT, signal.SIGTERM], "it says what ended it, as this does"
