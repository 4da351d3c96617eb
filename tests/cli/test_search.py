"""`python -m h2o_flexgen.search`: flags in, a policy for `run` out, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.cli.arguments import parse_arguments
from h2o_flexgen.cli.search_arguments import SearchArguments, parse_search
from h2o_flexgen.config.hardware import ComputeRates, Curve, GemmShape, HardwareProfile
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.products import all_products
from h2o_flexgen.config.profiles import METHOD, find_profile, kept_file, profile_names
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.requests import RequestReader, workload_of
from h2o_flexgen.errors import ModelError, UsageError
from h2o_flexgen.search import main
from h2o_flexgen.units import GIB
from tests.cost.machines import known, profile, rates

ROOT = Path(__file__).parents[2]
SMALL = "--model opt-125m --hardware t4-16gb --num-prompts 16 --prompt-len 64 --gen-len 8"


def parse(*arguments: str, **environ: str) -> SearchArguments:
    return parse_search(arguments, {f"H2O_FLEXGEN_{name}": value for name, value in environ.items()})


def entry(out: str) -> dict[str, Any]:
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_the_command_line_of_the_readme() -> None:
    line = "--model opt-30b --gpu-mem 16 --cpu-mem 200 --nvme-mem 1500 --prompt-len 512 --gen-len 32 --hh-ratio 0.2"
    request = parse(*line.split(), "--hardware", "t4").request
    assert (request.spec.name, request.profile.name, request.compute_tier) == ("opt-30b", "t4-16gb", "gpu")
    assert request.caps == {"gpu": 16 * GIB, "cpu": 200 * GIB, "disk": 1500 * GIB}
    assert (request.eviction.name, request.eviction.ratio) == ("h2o", 0.2)
    assert (request.workload.prompt_len, request.workload.gen_len, request.endless) == (512, 32, True)
    assert (request.dtype, request.fixed) == ("float16", {})


def test_what_is_left_out() -> None:
    """Caps are nine tenths of what the machine has, lengths are FlexGen's."""
    request = parse("--model", "opt-125m", "--hardware", "h200").request
    assert request.caps["gpu"] == int(0.9 * request.profile.memory["gpu"])
    assert request.dtype == "bfloat16"
    assert (request.workload.prompt_len, request.workload.gen_len) == (512, 32)
    cpu = parse("--model", "opt-125m", "--hardware", "h200", "--device", "cpu", "--gpu-mem", "8").request
    assert cpu.compute_tier == "cpu"
    assert "gpu" not in cpu.caps


def test_what_is_typed_of_the_policy_is_fixed(tmp_path: Path) -> None:
    base = ("--model", "opt-125m", "--hardware", "t4")
    fixed = parse(*base, "--percent", "20", "80", "0", "100", "0", "100", "--gbs", "8", "--no-overlap").request.fixed
    assert set(fixed) == {"weights", "cache", "hidden", "gpu_batch_size", "overlap"}
    assert fixed["weights"] == {"gpu": 0.2, "cpu": 0.8}
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(OffloadPolicy(4, 2).to_json()))
    whole = parse(*base, "--policy", str(file), "--num-gpu-batches", "3").request.fixed
    assert OffloadPolicy(**whole) == OffloadPolicy(4, 3)


def test_a_policy_for_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, timeline = tmp_path / "policy.json", tmp_path / "timeline.json"
    assert main([*SMALL.split(), "--output", str(policy), "--simulate", str(timeline), "--hh-ratio", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = entry(out)
    assert out.startswith("model       opt-125m, float16 on the GPU of t4-16gb\n")
    assert "gpu   in all" in out
    written = json.loads(policy.read_text())
    assert written.pop("made_for")["predicted"] == found["predicted"]
    assert written == found["policy"]
    assert parse_arguments(["--policy", str(policy)], {}).engine.policy == OffloadPolicy(**written)
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "M"} >= {"process_name", "thread_name"}
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in events)
    assert main([*SMALL.split(), "--output", str(policy)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*SMALL.split(), "--output", str(policy), "--overwrite", "--quiet", "--solver", "cbc"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert entry(out)["policy"]["gpu_batch_size"] == 16


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --device cpu --cpu-mem 550MiB --nvme-mem 0"
    assert main(line.split()) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert "does not fit into cpu 550 MiB, disk 0 B" in err
    assert "the smallest that works: --cpu-mem " in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model opt-125m --hardware t4-16g", "did you mean 't4-16gb'"),
        ("--model opt-12 --hardware t4", "did you mean 'opt-125m'"),
        ("--model opt-125m --hardware t4 --prompt-len 2040", "the context of opt-125m is 2048 tokens"),
        ("--model opt-125m --hardware t4 --rolling-positions", "learned a table of positions"),
        ("--model pythia-160m --hardware t4 --rolling-positions --prompt-len 3000", "positions roll within it"),
        ("--model opt-125m --hardware t4 --num-prompts 0", "at least 1"),
        ("--model opt-125m --hardware t4 --hh-ratio 2", "--hh-ratio is 2.0"),
        ("--model opt-125m --hardware t4 --overwrite", "needed --output FILE"),
        ("--model opt-125m --hardware t4 --output /none/such.json", "the folder /none is not there"),
        ("--model opt-125m --hardware t4 --simulate /tmp", "this is a folder"),
        ("--model opt-125m --hardware README.md", "is no hardware profile"),
        ("--model opt-125m --hardware t4 --percent 60 50 0 100 0 100", "needed at most 100"),
    ],
)
def test_what_is_refused_says_what_to_do(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) in (2, 4)
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_a_prompt_past_the_context_is_fed_step_by_step_as_the_engine_does() -> None:
    rolling = ("--rolling-positions", "--kv-budget", "256", "--prompt-len", "5000", "--num-prompts", "1")
    request = parse("--model", "pythia-160m", "--hardware", "t4", *rolling).request
    assert request.workload == Workload(2048, 5000 - 2048 + 32)
    reader = RequestReader(request.spec, request.eviction, None, 0)
    assert request.workload == workload_of(reader.read([[5] * 5000], SamplingParams(max_new_tokens=32)))


def test_rates_of_another_dtype_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL.split(), "--dtype", "float32"]) == 0
    assert capsys.readouterr().err == "note: the rates of t4-16gb are for float16, and this is float32\n"
    assert main([*SMALL.split(), "--dtype", "float32", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(memory={"cpu": "64GiB"}),
        lambda data: data.update(memory={"cpu": -5}),
        lambda data: data.update(memory={"moon": GIB}),
        lambda data: data.update(memory=None),
        lambda data: data.update(host=None),
        lambda data: data.update(dtype="floaty"),
        lambda data: data["compute"]["cpu"].update(shapes=[{}]),
        lambda data: data["compute"]["cpu"].update(
            shapes=[{"out_features": "8", "in_features": 8, "seconds": [[1, 1]]}]
        ),
        lambda data: data["compute"]["cpu"].update(reads_all_slots="yes"),
        lambda data: data["compute"]["cpu"].update(gemm_flops=[[1, 10**400]]),
    ],
)
def test_a_damaged_profile_is_a_mistake_of_the_user(
    change: Callable[[dict[str, Any]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = find_profile("t4").to_json()
    change(data)
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(data))
    assert main(["--model", "opt-125m", "--hardware", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, f"{file} is no hardware profile" in err) == ("", True)


class TestKept:
    """Without --hardware: the nearest of what was calibrated on this machine."""

    @pytest.fixture(autouse=True)
    def _own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def test_this_machine_has_to_be_calibrated_first(self) -> None:
        with pytest.raises(UsageError, match=r"not calibrated yet.*python -m h2o_flexgen.calibrate.*t4-16gb"):
            parse("--model", "opt-125m")
        keep("here", 0, find_profile("a100"))
        assert parse("--model", "opt-125m").request.profile.name == "here"
        assert parse("--model", "opt-125m", HARDWARE="t4").request.profile.name == "t4-16gb"

    def test_what_was_measured_for_the_model_and_its_dtype_wins(self) -> None:
        for age, name in ((3, "opt-125m"), (2, "opt-1.3b")):
            keep(name, age, profile({"cpu": measured(name)}))
        keep("float32", 1, profile({"cpu": measured("opt-125m")}, dtype="float32"))
        found = {
            (model, dtype): parse("--model", model, "--dtype", dtype).request.profile.name
            for model in ("opt-125m", "opt-1.3b", "opt-350m")
            for dtype in ("float16", "float32")
        }
        assert [found[model, "float16"] for model in ("opt-125m", "opt-1.3b")] == ["opt-125m", "opt-1.3b"]
        assert {found[model, "float32"] for model in ("opt-125m", "opt-1.3b", "opt-350m")} == {"float32"}
        assert found["opt-350m", "float16"] == "opt-1.3b", "the newest of others"

    def test_shapes_that_were_not_measured_are_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        keep("other", 0, profile({"cpu": measured("opt-1.3b")}, memory={"cpu": 16 * GIB, "disk": 64 * GIB}))
        line = ["--model", "opt-125m", "--num-prompts", "4", "--prompt-len", "64", "--gen-len", "8"]
        assert main(line) == 0
        err = capsys.readouterr().err
        assert err.startswith("note: the rates of other were not measured at the shapes of opt-125m; python -m ")
        assert err.endswith("calibrate --model opt-125m measures those\n")
        assert main([*line, "--quiet"]) == 0
        assert capsys.readouterr().err == ""

    def test_a_gpu_whose_memory_nobody_knows_is_the_last(self, capsys: pytest.CaptureFixture[str]) -> None:
        """As an emulated one's, whose size was a flag."""
        emulated = profile(measured("opt-125m"), memory={"cpu": 8 * GIB})
        keep("emulated", 0, emulated)
        assert main(["--model", "opt-125m"]) == 2
        keep("cpu", 9, profile({"cpu": rates()}, memory={"cpu": 8 * GIB}))
        assert parse("--model", "opt-125m").request.profile.name == "cpu"
        keep("gpu", 10, profile(memory={"gpu": 4 * GIB, "cpu": 8 * GIB}))
        assert parse("--model", "opt-125m").request.profile.name == "gpu", "as run takes the GPU"
        typed = ("--model", "opt-125m", "--hardware", str(kept_file("emulated")))
        assert main(typed) == 2
        err = capsys.readouterr().err
        assert err.count("does not say how much memory the gpu has\n  needed --gpu-mem") == 2
        assert parse(*typed, "--gpu-mem", "4").request.caps == {"gpu": 4 * GIB, "cpu": int(0.9 * 8 * GIB)}
        assert parse(*typed, "--device", "cpu").request.compute_tier == "cpu"

    def test_what_is_old_or_damaged_counts_as_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        keep("good", 9, profile({"cpu": rates()}))
        path = kept_file("good")
        older = path.with_name(path.name.replace(str(METHOD), str(METHOD - 1), 1))
        older.write_text(path.read_text().replace('"good"', '"old"'))
        kept_file("bad").write_text("{")
        assert parse("--model", "opt-125m").request.profile.name == "good"
        assert f"{kept_file('bad')} cannot be used" in caplog.text


def measured(model: str) -> ComputeRates:
    """At the shapes of `model`."""
    once = Curve(((1, 1e-3),))
    return rates(shapes=tuple(GemmShape(*product, once) for product in all_products(known(model))))


def keep(name: str, age: int, of: HardwareProfile) -> None:
    """A profile as `calibrate` leaves it, `age` seconds ago."""
    path = kept_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**of.to_json(), "name": name}))
    os.utime(path, (10**9 - age, 10**9 - age))


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_say_where_their_figures_come_from(name: str) -> None:
    profile = find_profile(name)
    assert profile.name == name
    assert set(profile.links) == {"disk->cpu", "cpu->disk", "cpu->gpu", "gpu->cpu"}
    assert set(profile.compute) == {"cpu", "gpu"}
    assert set(profile.memory) == {"gpu", "cpu", "disk"}
    words = ("data sheet", "assumed", "published", "paper")
    assert all(any(word in source for word in words) for source in profile.sources.values())
    assert HardwareProfile.from_json(profile.to_json()) == profile


def test_profiles_by_name() -> None:
    assert {"t4-16gb", "a100-80gb", "h200"} <= set(profile_names())
    assert find_profile("T4") == find_profile("t4-16gb")
    path = ROOT / "configs" / "hardware" / "h200.json"
    assert find_profile(str(path)) == find_profile("h200")


@pytest.mark.parametrize("line", ["--help", SMALL, "--model opt-125m --hardware nothing"])
def test_no_torch_is_loaded(line: str) -> None:
    program = (
        "import sys; from h2o_flexgen.search import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers'} & set(sys.modules); sys.exit(99 if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *line.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == (2 if "nothing" in line else 0), done.stderr


@pytest.mark.slow
def test_a_very_large_model_is_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "opt-175b", "--hardware", "t4", "--prompt-len", "512", "--gen-len", "32"]) == 0
    found = entry(capsys.readouterr().out)
    assert found["policy"]["weights"].get("disk", 0) > 0.5
    assert found["predicted"]["gen_throughput"] > 0.2


def test_a_models_folder_is_read_as_run_reads_it(tmp_path: Path) -> None:
    text = (ROOT / "configs" / "models" / "opt-125m.json").read_bytes()
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text)
    assert parse("--model", str(tmp_path), "--hardware", "t4").request.spec.hidden_size == 768
    for content in (b"[" * 100_000, b'{"model_type": '):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match="torn or not JSON"):
            parse("--model", str(tmp_path), "--hardware", "t4")


def test_mistakes_in_the_environment_name_their_origin() -> None:
    with pytest.raises(UsageError, match="from the environment: H2O_FLEXGEN_HH_RATIO=7"):
        parse("--model", "opt-125m", "--hardware", "t4", HH_RATIO="7")
