"""How `run` plans: on rates that it is given or by rule; what it says before and after; limits of the machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import search
from h2o_flexgen.cli.arguments import parse_arguments
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.models.decoder import Decoder
from h2o_flexgen.planning.llm import LLM
from tests.cli.planning.conftest import RATES, TIGHT, WORK
from tests.programs import Run


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
    assert predicted["runner_up"] in before.partition("\nrunner-up   ")[2], "the plan that came second"
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


@pytest.mark.slow
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


def test_what_is_typed_stays(model: Path, run: Run, hardware: Path) -> None:
    typed = ("--gbs", 3, "--num-gb", 2, "--weights-placement", "cpu=0.4,disk=0.6")
    policy = run("--model", model, *WORK, *typed, "--hardware", hardware).record["policy"]
    assert (policy["gpu_batch_size"], policy["num_gpu_batches"]) == (3, 2)
    assert policy["weights"]["disk"] == pytest.approx(0.6, abs=0.1)


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


@pytest.mark.slow
def test_weights_stay_unless_moving_them_pays(model: Path) -> None:
    with LLM(str(model), cpu_mem=TIGHT[1], dtype="float32", hardware=RATES) as llm:
        llm.generate([[5] * 20] * 8, max_new_tokens=4)
        loaded = llm._loaded
        assert loaded is not None
        loaded.seconds = 1000.0
        llm.generate([[5] * 9] * 3, max_new_tokens=2)
        assert llm._loaded is loaded
        loaded.seconds = 0.0
        best = llm.planner(dataclasses.replace(llm.plan(Workload(9, 2, 3)).request, fixed={}))
        assert llm.plan(Workload(9, 2, 3)).predicted["decode_s"] <= best.predicted["decode_s"] * 1.001


@pytest.mark.slow
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


@pytest.mark.slow
def test_memory_that_stays_away_ends_in_5(model: Path, run: Run, monkeypatch) -> None:
    def refuse(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Decoder, "mlp", refuse)
    ran = run("--model", model, *WORK)
    assert ran.code == 5
    assert "error: out of memory" in ran.err
    assert "tried blocks of 1 x 8 sequences" in ran.err


def test_limits_and_where_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cgroup_limit", lambda: 1 << 30)
    assert devices.cpu_limit() == (int(0.9 * (1 << 30)), "90% of 1 GiB that the control group may use")
    monkeypatch.setattr(devices, "cgroup_limit", lambda: None)
    assert devices.cpu_limit().why.endswith("available")
    free = devices.disk_limit(tmp_path / "not" / "there", 0)
    assert free.why.endswith(f"free in {tmp_path}")
    assert not (tmp_path / "not").exists()
    assert devices.disk_limit(Path("/proc/none"), 7) == (7, "nothing can be written to /proc")
    assert devices.disk_limit(tmp_path, 1 << 40).nbytes - free.nbytes == pytest.approx(1 << 40, rel=0.01)


def test_caps_of_an_engine(model: Path, tmp_path: Path) -> None:
    """Weights that can be read where they lie need no room."""
    with LLM(str(model), disk_mem="5GiB", offload_dir=str(tmp_path), eviction=EvictionConfig()) as llm:
        caps = llm.plan(Workload(9, 2, 3)).request.caps
        assert (caps.disk, caps.why["disk"]) == (5 << 30, "--nvme-mem")
        assert caps.why["cpu"].startswith("90% of ")
    with LLM(str(model), offload_dir=str(tmp_path)) as llm:
        caps = llm.plan(Workload(9, 2, 3)).request.caps
        assert " MiB of weights that are on disk" in caps.why["disk"]
