"""Known models by name, and configuration without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_flexgen.config.model import known
from h2o_flexgen.config.model.known import known_config, known_names
from h2o_flexgen.models.families import spec_from_config
from tests.oracles.parameters import parameters_of

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
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "phi-3-mini-4k": 3_821_079_552,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "mistral-small-3.1-24b": 23_572_403_200,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "olmoe-1b-7b": 6_919_161_856,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "granite-3.1-8b": 8_170_848_256,
    "olmo-2-7b": 7_298_617_344,
    "smollm3-3b": 3_075_098_624,
    "seed-oss-36b": 36_151_104_512,
    "olmo-3-7b": 7_298_011_136,
    "command-r7b": 8_028_033_024,
    "glm-4-9b-0414": 9_400_279_040,
    "exaone-4.0-32b": 32_003_216_384,
    "glm-4.5-air": 106_852_251_264,
    "glm-4.5": 352_797_829_024,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "minimax-m2": 228_689_764_864,
    "dots.llm1": 142_774_381_696,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "granite-3.0-1b-a400m": 1_334_628_352,
    "granite-3.1-3b-a800m": 3_298_793_472,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "glm-4.7-flash": 29_943_393_920,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_models_have_their_published_size(name: str) -> None:
    config = known_config(name)
    assert config is not None
    assert parameters_of(spec_from_config(config, name, "auto")) == PARAMETERS[name]


def test_names_are_listed_from_small_to_large() -> None:
    names = known_names()
    assert sorted(PARAMETERS) == sorted(names)
    for family in ("opt-", "llama-2-", "qwen2.5-", "pythia-"):
        members = [name for name in names if name.startswith(family)]
        assert len(members) > 2
        assert members == sorted(members, key=PARAMETERS.__getitem__)


def test_spellings_of_a_name() -> None:
    config = known_config("opt-30b")
    assert config is not None
    assert config["_name_or_path"] == "facebook/opt-30b"
    for name in ("facebook/opt-30b", "OPT-30B", "Facebook/OPT-30b"):
        assert known_config(name) == config
    for name in ("someone/opt-30b", "opt-31b", "./opt-30b", "", "opt-30b.json"):
        assert known_config(name) is None


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Llama-2-7b-hf", "llama-2-7b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama-2-13b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.1"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen3-8b-base", "qwen3-8b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-4k"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("EleutherAI/pythia-6.9b", "pythia-6.9b"),
        ("EleutherAI/pythia-6.9b-deduped", "pythia-6.9b"),
    ],
)
def test_names_of_the_hub(name: str, short: str) -> None:
    """Each has the shape of its short name, and its own name, by which the hub has it."""
    config = known_config(name)
    assert config is not None
    assert config["_name_or_path"].rpartition("/")[2].lower() == name.rpartition("/")[2].lower()
    assert not [key for key in config if key.startswith("_var")]
    assert parameters_of(spec_from_config(config, name)) == PARAMETERS[short]


def test_variants_differ_where_they_say_so() -> None:
    base, chat = known_config("Qwen/Qwen2.5-7B"), known_config("Qwen/Qwen2.5-7B-Instruct")
    assert base is not None
    assert chat is not None
    assert {key for key in base if base[key] != chat[key]} == {
        "_name_or_path",
        "eos_token_id",
        "max_position_embeddings",
    }
    old, new = (known_config(f"mistralai/Mistral-7B-Instruct-v0.{minor}") for minor in (1, 2))
    assert old is not None
    assert new is not None
    windows = [spec_from_config(config, "x").arch.window for config in (old, new)]
    assert windows == [4096, None]
    assert known_config("someone/Qwen2.5-7B-Instruct") is None


def test_no_two_models_share_a_name() -> None:
    names: list[str] = []
    for path in {model.path for model in known._models().values()}:
        config = known._read(path)
        hub = {config["_name_or_path"], *config.get("_variants", ())}
        bare = {name.rpartition("/")[2].lower() for name in hub} | {path.stem}
        assert path.stem == path.stem.lower()
        names += [*bare, *(name.lower() for name in hub)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-2-70b", (80, 64, 8, 128, 4096, "float16")),
        ("llama-3.2-1b", (16, 32, 8, 64, 131072, "bfloat16")),
        ("qwen3-0.6b", (28, 16, 8, 128, 40960, "bfloat16")),
        ("gemma-3-1b", (26, 4, 1, 256, 32768, "bfloat16")),
        ("gpt-neox-20b", (44, 64, 64, 96, 2048, "float16")),
    ],
)
def test_shapes(name: str, expected: tuple[int, ...]) -> None:
    """Layers, query heads, KV heads, dimensions of a head, context, dtype."""
    spec = spec_from_config(known_config(name) or {}, name)
    sizes = (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_positions, spec.dtype)
    assert sizes == expected


def test_gemma3_has_a_window_in_five_of_six_layers() -> None:
    spec = spec_from_config(known_config("gemma-3-270m") or {}, "x")
    assert [layer for layer in range(spec.num_layers) if spec.arch.window_of(layer) is None] == [5, 11, 17]
    assert spec.arch.window == 512


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
    source = Path(known.__file__).parents[3] / "configs"
    shutil.copytree(source / "models", tmp_path / place / "models")
    monkeypatch.setattr(known, "__file__", str(tmp_path / "h2o_flexgen" / "config" / "model" / "known.py"))
    known._models.cache_clear()
    try:
        assert (known_config("opt-30b") is not None) == bool(known_names()) == found
    finally:
        known._models.cache_clear()


def test_configuration_loads_no_torch() -> None:
    names = ["model.spec", "workload", "offload", "placement", "eviction", "reports.record", "flags", "model.known"]
    imports = [f"h2o_flexgen.config.{name}" for name in names] + ["h2o_flexgen.models.families"]
    code = f"import sys, {', '.join(imports)}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_have_one_order_in_every_process() -> None:
    """Equal sizes too: hashes of strings, and with them the order of sets, differ from process to process."""
    code = "from h2o_flexgen.config.model.known import known_names; print(*known_names())"
    orders = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(6)
    }
    assert len(orders) == 1
