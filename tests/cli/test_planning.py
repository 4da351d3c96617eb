"""How `run` comes by its plan: rates of a file, kept ones, a calibration, none; what it says before and after."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import search
from h2o_flexgen.calibration.stored import keep_profile, profile_key
from h2o_flexgen.cli import planning
from h2o_flexgen.cli.arguments import parse_arguments
from h2o_flexgen.cli.planning import Planning, calibrate_here
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware import HardwareProfile
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine import machine
from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.models.decoder import Decoder
from tests.cost.machines import profile
from tests.programs import Run, write_model

WORK = ("--prompt-len", 20, "--num-prompts", 8, "--gen-len", 4)
TIGHT = ("--cpu-mem", "103MiB")
"""Less than the model and a block beside the 100 MiB of the process."""
NOTHING = "predicted   nothing: this machine is not calibrated"
RATES = profile(name="a made-up machine", dtype="float32")


@pytest.fixture(autouse=True)
def _steady_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this process holds is 100 MiB, and nothing was ever calibrated."""
    for measured in ("rss", "before_placement"):
        monkeypatch.setattr(machine, measured, lambda: 100 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("H2O_FLEXGEN_CALIBRATE")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.2 MiB of weights."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 4}
    return write_model(tmp_path_factory.mktemp("larger") / "model", **sizes)


@pytest.fixture
def hardware(tmp_path: Path) -> Path:
    path = tmp_path / "made-up.json"
    path.write_text(json.dumps(RATES.to_json()))
    return path


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Calls of `calibrate_here`, which give RATES without measuring."""
    calls: list[EngineConfig] = []

    def measure(config: EngineConfig, quiet: bool) -> HardwareProfile:
        calls.append(config)
        return RATES

    monkeypatch.setattr(planning, "calibrate_here", measure)
    return calls


def test_what_is_divided_among_gpus_is_planned_by_rule(model: Path, run: Run, hardware: Path, calibrations) -> None:
    gpus = ("--num-gpus", 2, "--emulate-gpu", "64MiB")
    ran = run("--model", model, *WORK, *gpus, "--hardware", hardware)
    assert (ran.code, calibrations) == (0, [])
    assert "predicted   nothing: planned by rule, the cost model knows one GPU" in ran.err
    assert "GPUs        embed to layers.1.mlp; layers.2.attn to head" in ran.err
    assert "of each GPU" in ran.err
    policy = ran.record["policy"]
    assert (policy["num_gpus"], policy["chosen"], policy["num_gpu_batches"]) == (2, "rule", 2)
    assert [(stage["first"], stage["last"]) for stage in policy["stages"]] == [
        ("embed", "layers.1.mlp"), ("layers.2.attn", "head"),
    ]  # fmt: skip
    assert ran.record["predicted"] is None
    assert ran.record["least_bytes_moved"] is None


def test_rates_from_a_file_are_searched_and_predicted_on(model: Path, run: Run, hardware: Path, calibrations) -> None:
    ran = run("--model", model, *WORK, *TIGHT, "--hardware", hardware)
    assert (ran.code, calibrations) == (0, [])
    predicted = ran.record["predicted"]
    assert predicted["hardware"] == "a made-up machine"
    assert predicted["gen_throughput"] == pytest.approx(32 / (predicted["prefill_s"] + predicted["decode_s"]))
    assert set(predicted["bound"]) == {"phase", "resource", "seconds"}
    before, after = ran.err.split("\nmodel ")
    assert "tokens/s generated: prefill " in before
    assert "on the rates of a made-up machine" in before
    assert "\nbound       " in before
    assert "cpu tier    " in before
    assert "planned of 103 MiB: --cpu-mem" in before
    assert "; measured is " in after
    assert ran.record["policy"]["weights"]["disk"] > 0
    assert ran.record["policy"]["chosen"] == "search"


def test_the_roofline_is_priced_where_rates_are_known(model: Path, run: Run, hardware: Path) -> None:
    """Of all that a run by several blocks moved, at the rates of the file; without one at those of the run itself."""
    known = run("--model", model, *WORK, *TIGHT, "--hardware", hardware)
    for phase in ("prefill", "decode"):
        found = known.record["roofline"][phase]
        bound = max(sum(found["kernels_s"].values()), found["resources"]["disk->cpu"]["seconds"])
        assert found["bound"]["seconds"] == pytest.approx(bound)
        assert found["achieved"] == pytest.approx(bound / known.record[f"{phase}_s"])
        assert f"roofline    {phase}: " in known.err
        assert {each["of"] for each in found["resources"].values()} == {"a made-up machine"}
    unknown = run("--model", model, *WORK, *TIGHT, "--no-calibrate").record
    decode = unknown["roofline"]["decode"]
    assert decode["bound"] is None
    assert decode["resources"]["disk->cpu"]["of"] == "this run"
    assert decode["resources"]["disk->cpu"]["rate"] == unknown["bandwidth"]["disk->cpu"]
    assert decode["resources"]["arithmetic"]["seconds"] is None
    assert unknown["policy"]["chosen"] == "rule"


def test_what_is_moved_is_compared_with_the_least(model: Path, run: Run, hardware: Path) -> None:
    for flags in ((), ("--gbs", 2, "--num-gb", 2), ("--hh-ratio", 0.3), ("--no-calibrate",)):
        known = ("--hardware", hardware) if flags != ("--no-calibrate",) else ()
        ran = run("--model", model, *WORK, *TIGHT, *known, *flags)
        moved, least = ran.record["bytes_moved"], ran.record["least_bytes_moved"]
        assert 0 < least["disk->cpu"] <= moved["disk->cpu"]
        assert f"{moved['disk->cpu'] / least['disk->cpu']:.2f} times the least" in ran.err
    easy = run("--model", model, *WORK)
    assert easy.record["least_bytes_moved"] == {}


def test_sequences_that_end_early_do_not_raise_the_bound(model: Path, run: Run, hardware: Path) -> None:
    prompts = [word for text in ("a", "bcd", "xyz abc def") for word in ("--prompt", text)]
    ran = run("--model", model, *prompts, "-n", 30, "--stop", "e", *TIGHT, "--weights-placement", "disk")
    for link, nbytes in ran.record["least_bytes_moved"].items():
        assert nbytes <= ran.record["bytes_moved"][link]


def test_what_fits_runs_at_once_by_rule(model: Path, run: Run, calibrations) -> None:
    ran = run("--model", model, *WORK)
    assert (ran.code, calibrations) == (0, [])
    assert ran.record["predicted"] is None
    assert ran.err.count(NOTHING) == 2, "before the run, and in its report"


def test_what_does_not_fit_is_worth_a_calibration(model: Path, run: Run, calibrations) -> None:
    ran = run("--model", model, *WORK, *TIGHT)
    assert (ran.code, len(calibrations)) == (0, 1)
    assert ran.record["predicted"]["hardware"] == "a made-up machine"
    assert "note: this machine was not calibrated for such a model yet" in ran.err


def test_calibrate_asks_for_it_and_no_calibrate_forbids_it(model: Path, run: Run, calibrations, monkeypatch) -> None:
    assert run("--model", model, *WORK, *TIGHT, "--no-calibrate").record["predicted"] is None
    monkeypatch.setenv("H2O_FLEXGEN_CALIBRATE", "false")
    assert run("--model", model, *WORK, *TIGHT).record["predicted"] is None
    assert calibrations == []
    assert run("--model", model, *WORK, "--calibrate").record["predicted"] is not None
    assert len(calibrations) == 1


def test_a_calibration_that_fails_is_no_reason_not_to_run(model: Path, run: Run, monkeypatch) -> None:
    monkeypatch.setattr(planning, "calibrate_here", lambda config, quiet: None)
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


def test_what_is_typed_stays(model: Path, run: Run, hardware: Path) -> None:
    typed = ("--gbs", 3, "--num-gb", 2, "--weights-placement", "cpu=0.4,disk=0.6")
    policy = run("--model", model, *WORK, *typed, "--hardware", hardware).record["policy"]
    assert (policy["gpu_batch_size"], policy["num_gpu_batches"]) == (3, 2)
    assert policy["weights"]["disk"] == pytest.approx(0.6, abs=0.1)


def test_a_whole_policy_is_predicted_and_never_worth_a_calibration(
    model: Path, run: Run, hardware: Path, tmp_path: Path, calibrations
) -> None:
    whole = tmp_path / "policy.json"
    whole.write_text(json.dumps({"gpu_batch_size": 4, "num_gpu_batches": 2, "weights": {"disk": 1.0}}))
    assert run("--model", model, *WORK, "--policy", whole).record["predicted"] is None
    assert calibrations == []
    record = run("--model", model, *WORK, "--policy", whole, "--hardware", hardware).record
    assert record["predicted"]["bytes_moved"]["disk->cpu"] == pytest.approx(record["bytes_moved"]["disk->cpu"], rel=0.1)


def test_a_policy_that_search_wrote(model: Path, run: Run, hardware: Path, tmp_path: Path, capsys) -> None:
    made = tmp_path / "policy.json"
    common = ("--model", model, *WORK, "--hardware", hardware)
    code = search.main([str(word) for word in (*common, "--device", "cpu", "--cpu-mem", "516MiB", "--output", made)])
    assert code == 0
    capsys.readouterr()
    ran = run(*common, "--policy", made)
    assert ran.code == 0
    policy = json.loads(made.read_text())
    assert ran.record["policy"]["gpu_batch_size"] == policy["gpu_batch_size"]
    assert set(ran.record["policy"]["weights"]) == set(policy["weights"])
    assert "was made for" not in ran.err
    assert "was made for" in run("--prompt", "a", "-n", 1, "--policy", made).err


def test_hardware_that_is_none(run: Run, tmp_path: Path) -> None:
    ran = run("--hardware", "abacus")
    assert ran.code == 2
    assert "--hardware abacus: neither a profile nor a file" in ran.err
    (tmp_path / "empty.json").write_text("{}")
    assert run("--hardware", tmp_path / "empty.json").code == 2
    assert parse_arguments(["--hardware", "t4"], {}).hardware is not None


def test_rates_of_another_dtype_are_told(model: Path, run: Run, hardware: Path) -> None:
    ran = run("--model", model, *WORK, "--dtype", "bfloat16", "--hardware", hardware)
    assert "note: the rates of a made-up machine are for float32, and this is bfloat16" in ran.err


def test_an_emulated_gpu_is_planned_for(model: Path, run: Run, hardware: Path) -> None:
    ran = run("--model", model, *WORK, "--emulate-gpu", "2MiB", "--hardware", hardware)
    assert ran.code == 0, ran.err
    assert ran.record["device"] == "emulated gpu"
    assert ran.record["predicted"]["bytes_moved"]["cpu->gpu"] > 0
    assert 0 < ran.record["least_bytes_moved"]["cpu->gpu"] <= ran.record["bytes_moved"]["cpu->gpu"]
    assert "planned of 2 MiB: --emulate-gpu" in ran.err


def test_weights_stay_unless_moving_them_pays(model: Path) -> None:
    with LLM(str(model), cpu_mem=TIGHT[1], dtype="float32") as llm:
        llm.planner = Planning(llm, RATES, False, quiet=True)
        llm.generate([[5] * 20] * 8, max_new_tokens=4)
        loaded = llm._loaded
        assert loaded is not None
        loaded.seconds = 1000.0
        llm.generate([[5] * 9] * 3, max_new_tokens=2)
        assert llm._loaded is loaded
        loaded.seconds = 0.0
        best = llm.planner(llm.plan(Workload(9, 2, 3)).request, llm.config.fixed_policy, llm.config.free_fields)
        assert llm.plan(Workload(9, 2, 3)).predicted["decode_s"] <= best.predicted["decode_s"] * 1.001


def test_memory_that_runs_out_is_told(model: Path, run: Run, hardware: Path, monkeypatch) -> None:
    calls: list[int] = []
    mlp = Decoder.mlp

    def refuse_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 30:
            raise MemoryError
        return mlp(*args)

    same = ("--model", model, *WORK, "--gbs", 2, "--num-gb", 2, "--output", "-", "--hardware", hardware)
    undisturbed = run(*same)
    monkeypatch.setattr(Decoder, "mlp", refuse_once)
    ran = run(*same)
    assert ran.code == 0
    assert sorted(ran.out.splitlines()[:-1]) == sorted(undisturbed.out.splitlines()[:-1])
    message = "memory of the cpu tier ran out"
    assert f"warning: {message}" in ran.err
    assert [text for text in ran.record["warnings"] if message in text]
    assert ran.record["least_bytes_moved"] is None
    assert ran.record["predicted"]["generated_tokens"] == 32, "as it was before the run"
    assert ran.err.count("on the rates of a made-up machine") == 2, "each plan is told"


def test_memory_that_stays_away_ends_in_5(model: Path, run: Run, monkeypatch) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Decoder, "mlp", refuse)
    ran = run("--model", model, *WORK)
    assert ran.code == 5
    assert "error: out of memory" in ran.err
    assert "tried blocks of 1 x 8 sequences" in ran.err


class FakeProcess:
    """subprocess.Popen: writes a profile, fails, or is interrupted while it is waited for."""

    ending: int | type[BaseException] = 0
    commands: list[list[str]] = []  # noqa: RUF012  # of the test
    terminated = 0

    def __init__(self, command: list[str], **options: Any) -> None:
        assert options["start_new_session"]
        self.commands.append(command)
        self._waited = 0
        if self.ending == 0:
            Path(command[-1].removeprefix("--output=")).write_text(json.dumps(RATES.to_json()))

    def wait(self) -> int:
        self._waited += 1
        if isinstance(self.ending, int):
            return self.ending
        if self._waited == 1:
            raise self.ending
        return 143

    def terminate(self) -> None:
        FakeProcess.terminated += 1


def test_a_calibration_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    config = EngineConfig(model="opt-125m", emulate_gpu="2GiB", offload_dir="/somewhere", offline=True, cpu_mem="9GiB")
    assert calibrate_here(config, quiet=True) == RATES
    flags = FakeProcess.commands[-1][2:]
    assert flags[0] == "h2o_flexgen.calibrate"
    assert {"--model=opt-125m", "--offload-dir=/somewhere", "--offline=true", "--quiet"} <= set(flags)
    assert f"--emulate-gpu={2 << 30}B" in flags
    assert not [flag for flag in flags if "mem" in flag]
    monkeypatch.setattr(FakeProcess, "ending", 6)
    assert calibrate_here(config, quiet=False) is None
    monkeypatch.setattr(FakeProcess, "ending", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrate_here(config, quiet=False)
    assert FakeProcess.terminated == 1


def test_limits_and_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cgroup_limit", lambda: 1 << 30)
    assert machine.cpu_limit() == (int(0.9 * (1 << 30)), "90% of 1 GiB that the control group may use")
    monkeypatch.setattr(machine, "cgroup_limit", lambda: None)
    assert machine.cpu_limit().why.endswith("available")
    free = machine.disk_limit(tmp_path / "not" / "there", 0)
    assert free.why.endswith(f"free in {tmp_path}")
    assert not (tmp_path / "not").exists()
    assert machine.disk_limit(tmp_path, 1 << 40).nbytes - free.nbytes == pytest.approx(1 << 40, rel=0.01)


def test_caps_of_an_engine(model: Path, tmp_path: Path) -> None:
    """Weights that can be read where they lie need no room."""
    with LLM(str(model), disk_mem="5GiB", offload_dir=str(tmp_path), eviction=EvictionConfig()) as llm:
        caps = llm.plan(Workload(9, 2, 3)).request.caps
        assert (caps.disk, caps.why["disk"]) == (5 << 30, "--nvme-mem")
        assert caps.why["cpu"].startswith("90% of ")
    with LLM(str(model), offload_dir=str(tmp_path)) as llm:
        caps = llm.plan(Workload(9, 2, 3)).request.caps
        assert " MiB of weights that are on disk" in caps.why["disk"]
