"""What tests of plans share: a process of a known size, a model larger than the usual one, and made-up rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen.cli import planning
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.engine.limits import devices
from tests.cost.machines import profile
from tests.programs import write_model

WORK = ("--prompt-len", 20, "--num-prompts", 8, "--gen-len", 4)
TIGHT = ("--cpu-mem", "103MiB")
"""Less than the model and a block beside the 100 MiB of the process."""
RATES = profile(name="a made-up machine", dtype="float32")


@pytest.fixture(autouse=True)
def _steady_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this process holds is 100 MiB, and nothing was ever calibrated."""
    for measured in ("rss", "before_placement"):
        monkeypatch.setattr(devices, measured, lambda: 100 << 20)
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


@pytest.fixture(autouse=True)
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Calls of `calibrate_here`, which give RATES: measuring takes a minute."""
    calls: list[EngineConfig] = []

    def measure(config: EngineConfig, quiet: bool, most_s: float | None) -> HardwareProfile:
        calls.append(config)
        return RATES

    monkeypatch.setattr(planning, "calibrate_here", measure)
    monkeypatch.setattr(planning, "used_by_others", lambda: 0.0)
    return calls
