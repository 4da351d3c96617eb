"""Greedy tokens and log-probabilities equal transformers' for every family, alone and in ragged batches."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from tests.tiny import (
    FAMILIES,
    decided,
    in_sequence_of,
    prompts_of,
    save,
    transformers_agrees,
    transformers_greedy,
    transformers_logprobs,
)

LENGTHS = [5, 9, 9, 1, 30]
NEW, FEWER = 20, 6


@pytest.mark.turns
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logprobs(name: str, checkpoint) -> None:
    model, folder = checkpoint(name)
    settings = {"max_new_tokens": FEWER, "ignore_eos": True, "logprobs": 0}

    def answer(_: int, prompt: list[int]) -> tuple[list[int], list[float]]:
        alone = llm.generate([prompt], **settings)[0]
        expected = transformers_agrees(model, prompt, alone.token_ids)
        assert alone.logprobs == pytest.approx(expected, abs=1e-3)
        return alone.token_ids, expected

    with Engine(folder, dtype="float32") as llm:
        prompts, answers = decided(prompts_of(LENGTHS), answer)
    with Engine(folder, dtype="float32", policy={"gpu_batch_size": 2, "num_gpu_batches": 2}) as llm:
        together = llm.generate(prompts, **settings)
    for (tokens, logprobs), output in zip(answers, together, strict=True):
        assert output.token_ids == tokens
        assert output.logprobs == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("name", ["opt", "llama-gqa", "gemma3"])
def test_generate_ids_equals_transformers_generate_with_left_padding(name: str, checkpoint) -> None:
    model, folder = checkpoint(name)
    prompts = prompts_of([4, 11, 7])
    width = max(map(len, prompts))
    ids = torch.tensor([[1] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    with Engine(folder, dtype="float32") as llm:
        found = llm.generate_ids(ids, mask, max_new_tokens=12)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("length", "name"), [(45, "phi3-longrope"), (65, "phi3-longrope"), (45, "llama-dynamic")])
def test_scaled_rotary_positions_equal_transformers_generate(length: int, name: str, checkpoint) -> None:
    """longrope: 20 tokens after 45, the last of which nothing computes, just stay within the trained context of 64."""
    model, folder = checkpoint(name)
    ids = torch.tensor(prompts_of([length]))
    with in_sequence_of(model, length + NEW - 1):
        expected = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    with Engine(folder, dtype="float32") as llm:
        assert torch.equal(llm.generate_ids(ids, max_new_tokens=NEW, min_new_tokens=NEW), expected)


def test_early_eos_leaves_the_others_unchanged(checkpoint) -> None:
    model, folder = checkpoint("opt")
    prompts, answers = decided(prompts_of([6, 12, 9, 15]), lambda _, prompt: transformers_greedy(model, prompt, NEW))
    full = [tokens for tokens, _ in answers]
    eos = full[1][3]  # makes at least one row stop early
    expected = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in full]
    with Engine(folder, dtype="float32", policy={"gpu_batch_size": 2, "num_gpu_batches": 2}) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=eos)
    assert [output.token_ids for output in outputs] == expected
    assert [output.finish_reason for output in outputs] == ["stop" if eos in t else "length" for t in full]


@pytest.mark.parametrize("name", ["opt", "llama-dynamic", "mistral", "gpt-neox"])
def test_score_equals_transformers_logprobs_with_the_full_cache(name: str, checkpoint) -> None:
    model, folder = checkpoint(name)
    pairs = list(zip(prompts_of([5, 29, 1]), prompts_of([4, 7, 13], seed=1), strict=True))
    with Engine(folder, dtype="float32") as llm:
        scores = llm.score(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        rows = transformers_logprobs(model, context, continuation)
        expected = rows[torch.arange(len(continuation)), torch.tensor(continuation)]
        assert score.token_logprobs == pytest.approx(expected.tolist(), abs=1e-3)
        assert score.logprob == pytest.approx(float(expected.sum()), abs=1e-2)
        assert score.is_greedy == bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def test_score_runs_with_eviction_active(checkpoint) -> None:
    _, folder = checkpoint("opt")
    pairs = [(prompts_of([40])[0], prompts_of([8], seed=1)[0])]
    evicting = EvictionConfig("h2o", 0.2)
    with Engine(folder, dtype="float32") as full, Engine(folder, dtype="float32", eviction=evicting) as h2o:
        assert full.score(pairs)[0].token_logprobs[0] == pytest.approx(h2o.score(pairs)[0].token_logprobs[0], abs=1e-5)
        assert full.score(pairs)[0].logprob != pytest.approx(h2o.score(pairs)[0].logprob, abs=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["opt", "llama-tied", "qwen3", "phi3", "gpt-neox"])
@pytest.mark.parametrize("layout", ["sharded", "bin"])
def test_checkpoint_layouts_give_the_same_tokens(layout: str, name: str, checkpoint, tmp_path) -> None:
    """Beside the single safetensors file of every other test; phi3 and gpt-neox have fused projections."""
    model, folder = checkpoint(name)
    if layout == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        model.config.save_pretrained(tmp_path)
    else:
        save(model, tmp_path, max_shard_size="20KB")
        assert (tmp_path / "model.safetensors.index.json").exists()
    prompt = prompts_of([9])
    with Engine(folder, dtype="float32") as one, Engine(str(tmp_path), dtype="float32") as other:
        settings = {"max_new_tokens": NEW, "ignore_eos": True}
        assert one.generate(prompt, **settings)[0].token_ids == other.generate(prompt, **settings)[0].token_ids
