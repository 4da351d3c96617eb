"""Known models by name, and configuration without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_flexgen.config import known
from h2o_flexgen.config.known import known_config, known_names
from h2o_flexgen.models.families import spec_from_config

PARAMETERS = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
    "galactica-30b": 29_968_103_424,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_models_have_their_published_size(name: str) -> None:
    config = known_config(name)
    assert config is not None
    assert spec_from_config(config, name).num_parameters == PARAMETERS[name]


def test_names_are_listed_from_small_to_large() -> None:
    names = known_names()
    assert set(PARAMETERS) <= set(names)
    opt = [name for name in names if name.startswith("opt-")]
    assert opt == sorted(opt, key=PARAMETERS.__getitem__)


def test_spellings_of_a_name() -> None:
    config = known_config("opt-30b")
    assert config is not None
    assert config["_name_or_path"] == "facebook/opt-30b"
    for name in ("facebook/opt-30b", "OPT-30B", "Facebook/OPT-30b"):
        assert known_config(name) == config
    for name in ("someone/opt-30b", "opt-31b", "./opt-30b", "", "opt-30b.json"):
        assert known_config(name) is None


def test_a_config_is_the_callers_own() -> None:
    first = known_config("opt-125m")
    assert first is not None
    first["hidden_size"] = 1
    assert (known_config("opt-125m") or {})["hidden_size"] == 768


@pytest.mark.parametrize(("place", "found"), [("h2o_flexgen/configs", True), ("configs", False)])
def test_configs_are_found_where_they_are_installed(
    place: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed, they lie inside the package; another package's `configs` beside it is not ours."""
    source = Path(known.__file__).parents[2] / "configs"
    shutil.copytree(source / "models", tmp_path / place / "models")
    monkeypatch.setattr(known, "__file__", str(tmp_path / "h2o_flexgen" / "config" / "known.py"))
    known._paths.cache_clear()
    try:
        assert (known_config("opt-30b") is not None) == bool(known_names()) == found
    finally:
        known._paths.cache_clear()


def test_configuration_loads_no_torch() -> None:
    names = ["model", "workload", "offload", "placement", "eviction", "record", "flags", "known"]
    imports = [f"h2o_flexgen.config.{name}" for name in names] + ["h2o_flexgen.models.families"]
    code = f"import sys, {', '.join(imports)}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
