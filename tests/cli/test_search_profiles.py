"""Hardware profiles for `search`: shipped ones, files, and what was calibrated on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.checkpoint.opening import stored_spec
from h2o_flexgen.config.hardware.profile import METHOD, HardwareProfile, find_profile, kept_file, profile_names
from h2o_flexgen.config.hardware.rates import ComputeRates, Curve, GemmShape
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from h2o_flexgen.search import main
from h2o_flexgen.units import GIB
from tests.cli.test_search import ROOT, parse
from tests.cost.machines import known, profile, rates
from tests.programs import CONFIG, write_model


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
    assert (out, f"{file} is not a hardware profile" in err) == ("", True)


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

    def test_unasked_it_plans_in_the_dtype_that_a_run_takes(self, tmp_path: Path) -> None:
        """A model of float32 keeps it, and rates of float32 make no other model twice as large."""
        keep("bfloat16", 1, profile({"cpu": rates()}, dtype="bfloat16"))
        keep("float32", 2, profile({"cpu": rates()}, dtype="float32"))
        wide = tmp_path / "wide"
        wide.mkdir()
        (wide / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 1024}))
        planned = {model: parse("--model", str(model)).request for model in ("opt-125m", wide)}
        assert [(each.profile.name, each.dtype) for each in planned.values()] == [("bfloat16",) * 2, ("float32",) * 2]
        kept_file("float32").unlink()
        assert parse("--model", str(wide)).request.dtype == "float32"
        keep("float32", 0, profile({"cpu": rates()}, dtype="float32"))
        kept_file("bfloat16").unlink()
        assert parse("--model", "opt-125m").request.dtype == "bfloat16"

    @pytest.mark.parametrize("ending", ["safetensors", "bin"])
    def test_files_of_another_dtype_than_their_config_says_are_planned_as_run_keeps_them(
        self, ending: str, tmp_path: Path
    ) -> None:
        for dtype in ("bfloat16", "float32"):
            keep(dtype, 1, profile({"cpu": rates()}, dtype=dtype))
        work = ["--prompt-len", "64", "--gen-len", "8"]
        for says, holds in (("float32", "bfloat16"), ("float16", "float32")):
            folder = write_model(tmp_path / says, torch_dtype=says)
            file = folder / "model.safetensors"
            held = {name: each.to(getattr(torch, holds)) for name, each in load_file(file).items()}
            if ending == "bin":
                file.unlink()
                torch.save(held, folder / "pytorch_model.bin")
            else:
                save_file(held, file)
            with Engine(str(folder)) as llm:
                kept = llm.model.dtype
            assert parse("--model", str(folder), *work).request.dtype == kept == holds
            found = resolve_model(str(folder))
            assert stored_spec(found).dtype == holds
        file = folder / f"{'model.safetensors' if ending == 'safetensors' else 'pytorch_model.bin'}"
        file.write_bytes(file.read_bytes()[:100])  # a download under way
        assert parse("--model", str(folder), *work).request.dtype == "bfloat16"

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
        assert parse(*typed, "--gpu-mem", "4").request.capped == {"gpu": 4 * GIB, "cpu": int(0.9 * 8 * GIB)}
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
    return rates(shapes=tuple(GemmShape(*product, once) for product in known(model).all_products))


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
