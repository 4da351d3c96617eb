"""The adapters, in this process: the same tokens from the same weights, and clocks that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTForCausalLM, StaticCache

from h2o_flexgen.baselines import own, transformers
from h2o_flexgen.baselines.process import run_process
from h2o_flexgen.baselines.settings import PEERS, SYSTEMS
from h2o_flexgen.baselines.work import REFUSED, AdapterWork, Outcome
from tests.tiny import make_model, make_opt, prompts_of, save

NEW = 12


@pytest.fixture
def work(tmp_path: Path):
    """A folder with work on a tiny checkpoint, in float32."""
    return _maker(make_opt(ffn_dim=128), tmp_path)


def _maker(model: Any, tmp_path: Path) -> Any:
    checkpoint = save(model, tmp_path / "checkpoint")

    def make(**changes: Any) -> str:
        settings: dict[str, Any] = {"weights": "checkpoint", "folder": str(checkpoint), "options": {}}
        settings |= {"dtype": "float32", "scratch": str(tmp_path / "scratch")}
        settings |= changes
        name = str(len(list(tmp_path.iterdir())))
        AdapterWork(
            model=str(checkpoint),
            device="cpu",
            threads=1,
            seed=0,
            gen_len=NEW,
            prompts=prompts_of([24, 24, 24]),
            **settings,
        ).write(tmp_path / name, model.config.to_dict())
        return str(tmp_path / name)

    return make


def _outcome(adapter: Any, folder: str) -> Outcome:
    return Outcome.from_line(adapter.measure(folder).to_line())


def test_both_give_the_same_tokens(work) -> None:
    ours, theirs = (_outcome(adapter, work()) for adapter in (own, transformers))
    assert ours.token_ids == theirs.token_ids
    assert [len(tokens) for tokens in theirs.token_ids] == [NEW] * 3
    for outcome in (ours, theirs):
        assert outcome.prefill_s > 0
        assert outcome.decode_s > 0
        assert outcome.prefill_s + outcome.decode_s <= outcome.total_s + 1e-6  # differences of clocks are rounded
        assert "torch" in outcome.versions
    assert theirs.detail["attention"] == "sdpa"
    assert theirs.detail["threads"] == 1


@pytest.mark.parametrize("short_by", [0, 20])
def test_a_static_cache_gives_the_same_tokens(short_by: int, work, monkeypatch) -> None:
    """It has the length of the full run in a short one, too, from the warm-up on, and nothing is compiled."""
    made: list[int] = []

    class Noted(StaticCache):
        def __init__(self, config: Any, max_cache_len: int, **options: Any) -> None:
            made.append(max_cache_len)
            super().__init__(config, max_cache_len, **options)

    monkeypatch.setattr("transformers.generation.utils.StaticCache", Noted)
    settings = {"room_len": NEW + short_by}
    dynamic = _outcome(transformers, work(**settings))
    assert not made
    static = _outcome(transformers, work(options=SYSTEMS.get("static").options(0.2), **settings))
    assert made == [24 + NEW + short_by - 1] * 2
    assert static.token_ids == dynamic.token_ids
    assert static.detail.items() >= {"cache_implementation": "static", "disable_compile": True}.items()
    assert "cache_implementation" not in dynamic.detail


def test_a_short_run_finds_memory_for_the_cache_of_the_full_one(work) -> None:
    short = AdapterWork.read(Path(work(room_len=NEW + 20)))
    model = transformers.model_in_memory(short, work())
    cache = model(torch.ones(len(short.prompts), 20, dtype=torch.long)).past_key_values
    grown = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert transformers._room(model.config, short, torch.device("cpu")).nbytes == grown > 0
    assert not transformers._room(model.config, AdapterWork.read(Path(work(room_len=NEW))), torch.device("cpu")).nbytes


def test_an_eos_of_the_model_ends_nothing(work, monkeypatch) -> None:
    tokens = _outcome(transformers, work()).token_ids
    folder = AdapterWork.read(Path(work())).folder
    assert folder is not None
    config = Path(folder) / "generation_config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 2', f'"eos_token_id": {tokens[0][3]}'))
    assert f'"eos_token_id": {tokens[0][3]}' in config.read_text()
    assert _outcome(transformers, work()).token_ids == tokens


def test_the_own_adapter_takes_an_eviction(work) -> None:
    outcome = _outcome(own, work(options={"name": "h2o", "ratio": 0.25}))
    assert outcome.detail["eviction"]["name"] == "h2o"
    assert outcome.detail["eviction"]["budget"] == 9


@pytest.mark.parametrize(("adapter", "options"), [(own, {}), (transformers, {}), (transformers, {"static": True})])
def test_random_weights(adapter: Any, options: dict[str, Any], work) -> None:
    outcome = _outcome(adapter, work(weights="dummy", folder=None, options=options))
    assert [len(tokens) for tokens in outcome.token_ids] == [NEW] * 3


def test_what_is_no_outcome() -> None:
    with pytest.raises(ValueError, match="not the outcome"):
        Outcome.from_line('{"prefill_s": 1}')
    with pytest.raises(ValueError):
        Outcome.from_line("Segmentation fault")


@pytest.mark.parametrize("shard", [1, 1 << 30])
def test_random_weights_are_saved_once(shard: int, work, monkeypatch) -> None:
    """In one shard or one per tensor, so that a model larger than memory can be made."""
    monkeypatch.setattr(transformers, "SHARD_BYTES", shard)
    monkeypatch.setattr(transformers, "_POOL", 1 << 16)  # numbers that are drawn: of a model this small few are needed
    folder = work(weights="dummy", folder=None)
    checkpoint = Path(transformers.saved_checkpoint(AdapterWork.read(Path(folder)), folder))
    assert (len(list(checkpoint.glob("*.safetensors"))) > 1) == (shard == 1)
    model, info = OPTForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.model.decoder.layers[0].fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    written = {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()}
    assert transformers.saved_checkpoint(AdapterWork.read(Path(folder)), folder) == str(checkpoint)
    assert {file: file.stat().st_mtime_ns for file in checkpoint.iterdir()} == written


def _peer(name: str, folder: str) -> Any:
    """How the adapter of an installed peer ended."""
    python = SYSTEMS.get(name).python(PEERS)
    if python is None:
        pytest.skip(f"scripts/peer_env.sh {name}")
    return run_process(SYSTEMS.get(name).adapter, [folder], threads=1, timeout=300, python=python)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate", "flexgen", "deepspeed", "kvpress"])
def test_installed_peers_give_our_tokens(name: str, work) -> None:
    finished = _peer(name, work(options={"ratio": 1.0} if name == "kvpress" else {}))
    assert finished.exit_code == 0, finished.errors
    assert Outcome.from_line(finished.last_line).token_ids == _outcome(own, work()).token_ids


@pytest.mark.slow
def test_airllm_gives_our_tokens(tmp_path: Path) -> None:
    work = _maker(make_model("llama"), tmp_path)  # it knows where layers of OPT are as little as those of GPT-2
    finished = _peer("airllm", work())
    assert finished.exit_code == 0, finished.errors
    assert Outcome.from_line(finished.last_line).token_ids == _outcome(own, work()).token_ids


@pytest.mark.slow
def test_accelerate_gives_our_tokens_from_the_disk(work) -> None:
    finished = _peer("accelerate", work(cpu_mem=1))
    assert finished.exit_code == 0, finished.errors
    outcome = Outcome.from_line(finished.last_line)
    assert set(outcome.detail["modules_by_place"]) == {"disk"}
    assert outcome.token_ids == _outcome(own, work()).token_ids


@pytest.mark.slow
def test_flexgen_gives_the_same_tokens_from_the_disk(work) -> None:
    """In bfloat16, which numpy does not have: what is stored is its bits."""
    memory, disk = (_peer("flexgen", work(dtype="bfloat16", cpu_mem=mem)) for mem in (None, 1))
    assert disk.exit_code == 0, disk.errors
    there = Outcome.from_line(disk.last_line)
    assert there.detail["placed"]["weights_gpu"] == 0
    assert there.token_ids == Outcome.from_line(memory.last_line).token_ids


@pytest.mark.slow
def test_kvpress_keeps_what_was_asked(work, tmp_path: Path) -> None:
    for number, folder in enumerate((work, _maker(make_model("llama"), tmp_path / "llama"))):
        finished = _peer("kvpress", folder(options={"ratio": 0.25}))
        assert finished.exit_code == 0, (number, finished.errors)
        detail = Outcome.from_line(finished.last_line).detail
        assert (detail["kept_of_prompt"], detail["cached_at_the_end"]) == (9, 9 + NEW - 1)


@pytest.mark.slow
def test_flexgen_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    finished = _peer("flexgen", _maker(make_model("llama"), tmp_path)())
    assert (finished.exit_code, finished.reason) == (REFUSED, "FlexGen 0.1.8 runs OPT models only, and this is a llama")
