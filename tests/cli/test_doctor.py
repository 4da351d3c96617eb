"""`h2o-flexgen doctor`: what it says of a machine, by limits that are made up."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import doctor
from h2o_flexgen.calibration import checkup
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.errors import UsageError
from h2o_flexgen.kernels import native, triton_available
from h2o_flexgen.units import GIB, MIB


@pytest.fixture(autouse=True)
def _small_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_COPIED", MIB)
    monkeypatch.setattr(checkup, "_FILE", 2 * MIB)
    monkeypatch.setattr(checkup, "_UNIT", MIB // 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def found(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert doctor.main(["--json", "--offload-dir", str(folder)]) == 0
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_a_machine_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = found(capsys, tmp_path / "offload")
    assert told["versions"]["torch"]
    assert told["machine"]["cores"] >= 1
    assert told["tiers"]["cpu"]["bytes"] > 0
    assert told["tiers"]["disk"]["bytes"] > 0
    assert told["bandwidth"]["source"].startswith("measured now")
    assert all(told["bandwidth"][link] > 0 for link in ("cpu->cpu", "cpu->disk", "disk->cpu"))
    assert [path.name for path in (tmp_path / "offload").iterdir()] == ["lock"]
    assert doctor.main(["--offload-dir", str(tmp_path / "offload")]) == 0
    text = capsys.readouterr().out
    for words in ("tiers", "bandwidth", "limits", "kernels", "folders", "versions"):
        assert f"\n{words}" in text


def test_nothing_private_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told = found(capsys, tmp_path / "offload")
    assert told["folders"]["offload"]["path"] == "~/offload"
    assert told["switches"]["OMP_NUM_THREADS"] == "1"
    assert str(tmp_path) not in json.dumps(told)
    assert "hf_secret" not in json.dumps(told)


def test_limits_and_what_they_turn_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = {resource.RLIMIT_MEMLOCK: 8 * MIB, resource.RLIMIT_NOFILE: 256, resource.RLIMIT_FSIZE: GIB}
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limits.get(number, infinite), infinite))
    groups = tmp_path / "cgroup"
    groups.mkdir()
    (groups / "cpu.max").write_text("150000 100000\n")
    (groups / "memory.max").write_text(f"{2 * GIB}\n")
    (groups / "memory.current").write_text("0\n")
    monkeypatch.setattr(devices, "_CGROUPS", groups)
    monkeypatch.setattr(devices, "_OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(checkup.os, "sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(checkup, "find_spec", lambda name: None)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "why_not", lambda: "no C compiler was found")
    monkeypatch.setattr(triton_available, "why_not", lambda device: "Triton is not installed")
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: False)
    told = found(capsys, tmp_path / "offload")
    assert told["limits"]["memlock"] == 8 * MIB
    assert told["limits"]["open_files"] == 256
    assert told["limits"]["cgroup_memory"] == 2 * GIB
    assert told["limits"]["cgroup_cpus"] == 1.5
    assert told["limits"]["address_space"] is None
    changes = {entry["feature"]: entry["change"] for entry in told["features"]}
    assert changes["native kernels"] == "install gcc or clang"
    assert changes["checkpoints of many shards"] == "ulimit -n 1024"
    assert changes["large files in the offload folder"] == "ulimit -f unlimited"
    assert changes["all cores"] == "OMP_NUM_THREADS=1"
    assert changes["JSON schemas (response_format, --json-schema)"] == "pip install 'h2o_flexgen[schemas]'"
    assert "bfloat16 on the CPU" in changes


@pytest.mark.parametrize(
    ("cuda", "why", "change"),
    [
        (None, "torch is built without CUDA", "pip install torch for CUDA, on a machine with a GPU"),
        ("13.0", "torch finds no CUDA device", "nvidia-smi tells whether there is a GPU, and whether its driver is"),
    ],
)
def test_no_gpu(
    cuda: str | None,
    why: str,
    change: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A torch that is made for CUDA, as PyPI's is, is not what is missing."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    told = next(entry for entry in found(capsys, tmp_path)["features"] if entry["feature"] == "gpu")
    assert told["why"] == why
    assert told["change"].startswith(change)
    with pytest.raises(UsageError, match=f"device is 'cuda', and {why}. leave --device out; {change}"):
        devices.resolve_device(EngineConfig(device="cuda"))


def test_a_calibration_goes_before_a_quick_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from h2o_flexgen.calibration.stored import keep_profile
    from h2o_flexgen.config.hardware.profile import find_profile

    profile = find_profile("t4")
    assert keep_profile(profile, "cpu-float32-1-x") is not None
    told = found(capsys, tmp_path / "offload")["bandwidth"]
    assert told.pop("source") == f"calibrated {profile.date} ({profile.dtype})"
    assert told == {name: rate.bytes_per_s for name, rate in profile.links.items()}


def test_a_disk_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    told = found(capsys, tmp_path / "file" / "offload")
    assert "a file stands where a folder is needed" in told["bandwidth"]["why_no_disk"]
    assert told["folders"]["offload"]["bytes"] is None
