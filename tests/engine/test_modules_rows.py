"""Models whose sequences go through transformers' modules one by one, and the test that finds out which do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.tensors import dtype_bytes
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.engine import self_test
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError, PlanError, StorageError, UsageError
from h2o_flexgen.models.hf import trusted
from h2o_flexgen.models.hf.shrink import random_model
from tests.engine.test_modules import tiny as packed
from tests.tiny import VOCAB, decided, prompts_of, transformers_agrees

TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}
TYPES: dict[str, dict[str, Any]] = {
    "doge": {  # of which the second half begins within an MLP
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"num_key_value_heads": 1, "max_position_embeddings": 128},
    },
    "gpt_neox_japanese": {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3},
    "minimax": {
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 128},
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "openai-gpt": {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 128},
    "recurrent_gemma": {
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"head_dim": 16, "num_key_value_heads": 1, "lru_width": 48, "attention_window_size": 8},
    },
}


def tiny(kind: str) -> PreTrainedModel:
    return random_model(AutoConfig.for_model(kind, vocab_size=VOCAB, **TOKENS, **TYPES[kind]))


@pytest.mark.turns
@pytest.mark.parametrize("kind", TYPES)
def test_rows_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """With more sequences than places, so that others come where some have ended; from memory and disk."""
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    how = {"dtype": "float32", "offload_dir": str(tmp_path / "offload")}
    settings: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 0}

    def answer(_: int, prompt: list[int]) -> tuple[list[int], list[float]]:
        alone = llm.generate([prompt], **settings)[0]
        return alone.token_ids, transformers_agrees(model, prompt, alone.token_ids)

    with Engine(str(tmp_path), **how) as llm:
        prompts, answers = decided(prompts_of([5, 21, 13, 9, 1]), answer)
    for policy in (
        {"gpu_batch_size": 2, "num_gpu_batches": 1, "weights": {"disk": 1.0}, "prefill_chunk": 16},
        {"gpu_batch_size": 1, "num_gpu_batches": 3, "weights": {"cpu": 0.5, "disk": 0.5}},
    ):
        with Engine(str(tmp_path), policy=policy, **how) as llm:
            together = llm.generate(prompts, **settings)
            record = llm.last_record
        assert record is not None
        assert any("row by row" in warning for warning in record.warnings)
        for (tokens, logprobs), output in zip(answers, together, strict=True):
            assert output.token_ids == tokens
            assert output.logprobs == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("kind", ["gpt_neox_japanese", "openai-gpt"])
def test_weights_of_rows_may_be_packed(kind: str, tmp_path: Path) -> None:
    """OpenAI's first GPT asks its parameters for their dtype."""
    tiny(kind).save_pretrained(tmp_path)
    (context, rest), found = prompts_of([20, 6]), list[float]()
    for bits in (16, 8):
        with Engine(str(tmp_path), dtype="float32", weight_bits=bits) as llm:
            found.append(llm.score([(context, rest)])[0].logprob)
            packed = len(llm.model.spec.packings)
    assert found[0] == pytest.approx(found[1], abs=0.5)
    assert packed > 2  # tables besides


def test_rows_of_different_lengths_come_and_go(tmp_path: Path) -> None:
    """Each for as long as its own max_new_tokens; a sample's tokens are its own, whoever its neighbours are."""
    tiny("gpt_neox_japanese").save_pretrained(tmp_path)
    prompts, found = prompts_of([5, 21, 13, 9, 3, 7]), []
    for shape in ((2, 1), (3, 2)):
        policy = {"gpu_batch_size": shape[0], "num_gpu_batches": shape[1]}
        with Engine(str(tmp_path), dtype="float32", policy=policy, seed=3) as llm:
            outputs = llm.generate(prompts, max_new_tokens=9, do_sample=True, num_return_sequences=2)
            found.append([(output.index, output.sample, output.token_ids) for output in outputs])
    assert found[0] == found[1]


def test_scores_of_rows_are_transformers_probabilities(tmp_path: Path) -> None:
    model, (context, rest) = tiny("gpt_neox_japanese"), prompts_of([20, 6])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        rows = model(torch.tensor([context + rest[:-1]])).logits[0, len(context) - 1 :].float().log_softmax(-1)
    with Engine(str(tmp_path), dtype="float32") as llm:
        found = llm.score([(context, rest)])[0].logprob
    assert found == pytest.approx(float(rows.gather(1, torch.tensor(rest)[:, None]).sum()), abs=1e-3)


def test_caches_that_modules_make_are_counted(tmp_path: Path) -> None:
    """What a token takes in them is seen on meta: two vectors of the hidden size in each layer."""
    tiny("gpt_neox_japanese").save_pretrained(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as llm:
        spec = llm.model.spec
        assert isinstance(spec, ModuleSpec)
        assert spec.alone
        assert spec.kv_bytes_per_token_and_layer("float32") == 2 * 48 * dtype_bytes("float32")
        llm.generate(prompts_of([30]), max_new_tokens=4, ignore_eos=True)
        assert llm.last_record is not None
        assert llm.last_record.kv_bytes == 3 * (30 + 4 - 1 + 1) * 2 * 48 * 4
    with pytest.raises(PlanError, match="cpu"):
        Engine(str(tmp_path), dtype="float32", cpu_mem="1MiB").generate([[5]], max_new_tokens=2)


def test_what_rows_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    tiny("gpt_neox_japanese").save_pretrained(tmp_path)
    cases: dict[str, dict[str, Any]] = {
        "h2o": {"eviction": EvictionConfig("h2o", ratio=0.5)},
        "streaming": {"eviction": EvictionConfig("streaming", budget=8)},
        "cache_bits is 8": {"cache_bits": 8},
        "caches are placed on disk": {"policy": {"cache": {"disk": 1.0}}},
        "store of prefixes": {"prefix_mem": "1MiB"},
        "record_scores": {"record_scores": True},
    }
    for named, settings in cases.items():
        with pytest.raises(UsageError, match=f"{named}.*row by row"):
            Engine(str(tmp_path), **settings)


def test_a_policy_that_keeps_all_is_the_full_cache(tmp_path: Path) -> None:
    tiny("gpt_neox_japanese").save_pretrained(tmp_path)
    found = []
    for eviction in (EvictionConfig(), EvictionConfig("h2o", seed=3), EvictionConfig("snapkv", ratio=1.0)):
        with Engine(str(tmp_path), dtype="float32", eviction=eviction) as llm:
            found.append(llm.generate(prompts_of([30, 4]), max_new_tokens=4, ignore_eos=True))
            assert llm.config.eviction.name == "full"
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("named", "settings"),
    [("cache_bits is 8", {"cache_bits": 8}), ("is h2o", {"eviction": EvictionConfig("h2o", bytes=0.2)})],
)
def test_no_head_size_is_blamed_where_caches_stay_in_modules(
    tmp_path: Path, named: str, settings: dict[str, Any]
) -> None:
    tiny("recurrent_gemma").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"{named}.*row by row"):
        Engine(str(tmp_path), **settings)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox_japanese"])
def test_without_a_gpu_its_share_is_the_cpus(kind: str, tmp_path: Path) -> None:
    """As with native families: FlexGen's usual `--percent 100 0 100 0 100 0` runs on any machine."""
    (packed if kind == "llama" else tiny)(kind).save_pretrained(tmp_path)
    policy = OffloadPolicy.from_percent([100, 0, 100, 0, 100, 0], gpu_batch_size=2, num_gpu_batches=2)
    with Engine(str(tmp_path), policy=policy, dtype="float32", model_impl="transformers", device="cpu") as llm:
        llm.generate(prompts_of([5, 3, 4]), max_new_tokens=2, ignore_eos=True)
        assert llm.last_plan is not None
        assert llm.last_plan.placement.tiers == {"cpu"}


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As with a transformers that nobody has swept; what tests find goes into this folder."""
    monkeypatch.setattr(trusted, "HIGHEST", trusted.LOWEST)
    monkeypatch.setattr(trusted, "LOWEST", (99, 0))
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "h2o_flexgen" / "modules"


@pytest.mark.parametrize(("kind", "how"), [("qwen3", "packed"), ("gpt_neox_japanese", "rows")])
def test_an_untried_release_is_tested_first(
    kind: str, how: str, untried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in TYPES:
        model = tiny(kind)
    else:
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model = random_model(AutoConfig.for_model(kind, vocab_size=VOCAB, **TOKENS, **sizes, **heads))
    model.save_pretrained(tmp_path)
    prompt = prompts_of([9])[0]
    for _ in range(2):  # what was found the first time is known the second
        with Engine(str(tmp_path), dtype="float32", model_impl="transformers") as llm:
            tokens = llm.generate([prompt], max_new_tokens=4, ignore_eos=True)[0].token_ids
            spec = llm.model.spec
        assert isinstance(spec, ModuleSpec)
        assert bool(spec.alone) == (how == "rows")
        monkeypatch.setattr(self_test, "way_by_test", lambda *_: pytest.fail("it was tested before"))
    assert tokens == transformers_tokens(model, prompt, 4)
    (kept,) = untried.iterdir()
    assert json.loads(kept.read_text(encoding="utf-8"))["how"] == how


def transformers_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens: list[int] = model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
    return tokens


def test_what_answers_otherwise_is_not_packed(untried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release whose attention is wrong by our interface, though nothing is refused there: rows are still right."""
    from h2o_flexgen.models.hf import attention

    monkeypatch.setattr(attention, "_window", lambda module, given: (3, False))
    found = self_test.way_by_test({"model_type": "qwen3"}, Engine)
    assert found.how == "rows"
    assert "other than those of transformers" in found.why


@pytest.mark.parametrize("error", [StorageError("the disk is full"), PlanError("out of memory"), MemoryError()])
def test_a_machine_without_room_is_no_fault_of_the_model(
    untried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It would have been refused for ever: what a test has found is kept."""
    tiny("gpt_neox_japanese").save_pretrained(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(Engine, "generate", fail)
        with pytest.raises(ModelError, match="how it can be run cannot be tested now"):
            Engine(str(tmp_path), model_impl="transformers")
    assert not untried.exists()
    with Engine(str(tmp_path), model_impl="transformers"):
        pass


def test_what_transformers_cannot_run_is_refused_in_its_words(untried: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "no_such_activation"}))
    with pytest.raises(ModelError, match="no_such_activation"):
        Engine(str(tmp_path), weights="dummy", model_impl="transformers")
