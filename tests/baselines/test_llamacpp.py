"""llama.cpp beside others: files of random weights as the gguf package reads them, and a benchmark that pretends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from h2o_flexgen.baselines import llamacpp, random_gguf  # noqa: E402  needs gguf
from h2o_flexgen.baselines.process import Finished, run_process  # noqa: E402
from h2o_flexgen.baselines.random_gguf import GgufShape, write_random  # noqa: E402
from h2o_flexgen.baselines.settings import LLAMACPP_TYPES, PEERS, SYSTEMS, BenchSettings  # noqa: E402
from h2o_flexgen.baselines.work import AdapterWork, CannotRun, Outcome  # noqa: E402
from h2o_flexgen.config.model.spec import ModelSpec  # noqa: E402
from h2o_flexgen.errors import UsageError  # noqa: E402
from h2o_flexgen.models.families import spec_from_config  # noqa: E402
from tests.oracles.parameters import parameters_of  # noqa: E402
from tests.tiny import make_model, make_opt  # noqa: E402

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BENCH = """
import json, os, sys
words = sys.argv[1:]
if "--version" in words:
    print("version: 1.2 (build 0, commit llama_cpp_python-0.3.36)\\nbuilt with a stub", file=sys.stderr)
    raise SystemExit
given = dict(zip(words[::2], words[1::2]))
json.dump({**given, **{name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")}},
          open(os.path.join(os.path.dirname(sys.argv[0]), "asked.json"), "w"))
if int(given["-npl"]) > 6:
    print("llama_init_from_model: failed to allocate buffer for kv cache", file=sys.stderr)
    raise SystemExit(1)
if int(given["-npl"]) == 6:
    os.kill(os.getpid(), 9)
print("\\nwarming up\\n" + json.dumps({"pp": int(given["-npp"]), "t_pp": 0.5, "t_tg": 0.25, "t": 0.75}) + "\\n\\n")
"""
QUANTIZE = """
import shutil, sys
source, target, kind, threads = sys.argv[1:]
open(target, "w").write(f"{kind} of {source}")
"""


def _config(family: str, **sizes: Any) -> dict[str, Any]:
    """Of a tiny model whose rows are whole blocks of every type."""
    config: dict[str, Any] = make_model(family).config.to_dict()
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {**config, **shape, "head_dim": 16, **sizes}


def _spec(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config, "tiny")


@pytest.fixture(autouse=True)
def _few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising millions of them takes seconds, for a file of a hundred kilobytes."""
    monkeypatch.setattr(random_gguf, "_POOL", 1 << 15)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment with programs that pretend; asked.json there is what the benchmark was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("llama-batched-bench", BENCH), ("llama-quantize", QUANTIZE)):
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return folder


@pytest.fixture
def work(tmp_path: Path):
    """`work(kind="q4_0", batch=3, gen_len=5)`: a folder with prompts of seven tokens for a tiny model."""

    def make(kind: str = "q4_0", batch: int = 3, config: dict[str, Any] | None = None, **changes: Any) -> str:
        folder = tmp_path / f"work-{len(list(tmp_path.iterdir()))}"
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        settings: dict[str, Any] = {"weights": "dummy", "device": "cpu", "gen_len": 5, **changes}
        AdapterWork(
            model="tiny", folder=None, dtype="bfloat16", threads=2, seed=0, prompts=[[1] * 7] * batch,
            options={"type": kind}, scratch=str(scratch), **settings,
        ).write(folder, config or _config("llama"))  # fmt: skip
        return str(folder)

    return make


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "bf16", "f16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_has_the_models_shape_in_the_type_asked_for(family: str, kind: str, tmp_path: Path) -> None:
    config = _config(family)
    path = tmp_path / "model.gguf"
    write_random(path, GgufShape.from_config(config), kind, seed=0)
    reader, spec = gguf.GGUFReader(path), _spec(config)
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == parameters_of(spec)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert values.shape == tuple(int(size) for size in reversed(tensor.shape))
        if len(tensor.shape) > 1:
            assert tensor.tensor_type.name.lower() == kind
            assert values.std() == pytest.approx(0.02, rel=0.1)
        else:
            assert np.all(values == (0.0 if tensor.name.endswith("bias") else 1.0))
    known = {name: field.contents() for name, field in reader.fields.items()}
    name = known["general.architecture"]
    assert name == {"mistral": "llama"}.get(family, family)
    assert (known[f"{name}.attention.head_count"], known[f"{name}.attention.head_count_kv"]) == (4, 2)
    assert known[f"{name}.attention.key_length"] == spec.head_dim == 16
    assert known[f"{name}.rope.freq_base"] == pytest.approx(config["rope_parameters"]["rope_theta"])
    assert (known[f"{name}.block_count"], known[f"{name}.vocab_size"]) == (spec.num_layers, spec.vocab_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_have_the_names_that_llama_cpp_gives_them(family: str) -> None:
    """By the table of the gguf package, which maps what transformers calls them."""
    model = make_model(family)
    shape = GgufShape.from_config(model.config.to_dict())
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.architecture.upper()], shape.layers)
    wanted = {
        table.get_name(name, (".weight", ".bias")): tuple(tensor.shape) for name, tensor in model.named_parameters()
    }
    assert {tensor.name: tensor.shape for tensor in shape.tensors()} == wanted


def test_matrices_whose_rows_are_no_whole_blocks_stay_in_float16(tmp_path: Path) -> None:
    write_random(tmp_path / "odd.gguf", GgufShape.from_config(_config("llama", intermediate_size=80)), "q4_0", seed=0)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "odd.gguf").tensors}
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("F16", "Q4_0")


def test_a_run_is_timed_by_its_own_clock(programs: Path, work, tmp_path: Path) -> None:
    outcome = Outcome.from_line(llamacpp.measure(work()).to_line())
    assert (outcome.prefill_s, outcome.decode_s, outcome.total_s) == (0.5, 0.25, 0.75)
    assert [len(tokens) for tokens in outcome.token_ids] == [5] * 3
    assert outcome.versions == {"llama.cpp": "1.2 (build 0, commit llama_cpp_python-0.3.36)"}
    assert outcome.detail["type"] == "q4_0"
    asked = json.loads((programs / "asked.json").read_text())
    wanted = {"-npp": "7", "-ntg": "4", "-npl": "3", "-c": "768", "-b": "2048", "-ub": "512", "-t": "2", "-tb": "2"}
    wanted |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "2"}
    assert asked.items() >= wanted.items()
    assert Path(asked["-m"]).parent == tmp_path / "scratch"


def test_a_short_run_has_room_for_the_full_one_and_one_token_needs_no_step(programs: Path, work) -> None:
    outcome = llamacpp.measure(work(gen_len=1, room_len=300))
    assert (outcome.prefill_s, outcome.decode_s, outcome.total_s) == (0.5, 0.0, 0.5)
    assert json.loads((programs / "asked.json").read_text())["-c"] == str(3 * 512)


def test_files_are_made_once_by_shape_and_type(programs: Path, work, tmp_path: Path) -> None:
    for kind in ("f16", "q4_k", "q4_k"):
        llamacpp.prepare(work(kind))
    made = {file.name.rpartition("-")[2]: file for file in (tmp_path / "scratch").iterdir()}
    assert made.keys() == {"f16.gguf", "q4_k.gguf"}
    assert made["q4_k.gguf"].read_text() == f"Q4_K_M of {made['f16.gguf']}"
    llamacpp.prepare(work("f16", config=_config("llama", intermediate_size=128)))
    assert len(list((tmp_path / "scratch").iterdir())) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config": make_opt().config.to_dict()},
            "models of llama, mistral, qwen2, qwen3, olmoe, qwen3_moe, and this is a opt",
        ),
        ({"config": {"model_type": "llama", "hidden_size": 64}}, "has no num_attention_heads"),
        ({"weights": "checkpoint"}, "--weights dummy"),
        ({"device": "cuda"}, "--device cpu"),
        ({"batch": 257}, "256 sequences at most, not 257"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], message: str, work) -> None:
    with pytest.raises(CannotRun, match=message):
        llamacpp.prepare(work(**changes))


def test_programs_that_are_not_there(work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "nowhere"))
    with pytest.raises(CannotRun, match=r"scripts/peer_env\.sh llamacpp"):
        llamacpp.measure(work())


@pytest.mark.parametrize(("batch", "code"), [(6, 137), (7, 1)])
def test_too_little_memory_is_told_as_such(
    batch: int, code: int, programs: Path, work, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the kernel ends it, or by itself."""
    with pytest.raises(SystemExit) as ended:
        llamacpp.measure(work(batch=batch))
    assert Finished(int(str(ended.value)), "", capsys.readouterr().err, 1.0, 0, False).out_of_memory
    assert ended.value.code == code


def test_types_become_systems() -> None:
    settings = BenchSettings(systems=("full", "llamacpp"), llamacpp_types=("q4_k", "f16"))
    assert settings.systems == ("full", "llamacpp-q4_k", "llamacpp-f16")
    assert "llamacpp_types" not in settings.to_json()
    assert [SYSTEMS.get(f"llamacpp-{kind}").options(0.2) for kind in LLAMACPP_TYPES] == [
        {"type": kind} for kind in LLAMACPP_TYPES
    ]
    assert {*llamacpp.TYPES, *llamacpp.QUANTISED} == {*LLAMACPP_TYPES}
    with pytest.raises(UsageError, match=r"a type of --llamacpp-types is 'q4'.*did you mean"):
        BenchSettings(llamacpp_types=("q4",))
    with pytest.raises(UsageError, match="twice"):
        BenchSettings(systems=("llamacpp", "llamacpp-f16"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_0", "q4_k", "f16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_installed_one_runs(family: str, kind: str, work) -> None:
    python = SYSTEMS.get("llamacpp-q4_0").python(PEERS)
    if python is None:
        pytest.skip("scripts/peer_env.sh llamacpp")
    finished = run_process(llamacpp.__name__, [work(kind, config=_config(family))], 1, 60, python=python)
    assert finished.exit_code == 0, finished.errors
    outcome = Outcome.from_line(finished.last_line)
    assert outcome.detail["row"].items() >= {"pp": 7, "tg": 4, "pl": 3}.items()
    assert "llama_cpp_python-" in outcome.versions["llama.cpp"]
