"""Decoders computed by transformers' own modules: tokens as transformers generates them, from memory and from disk, and
what is not understood is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError, UsageError
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from h2o_flexgen.models.hf.trusted import SINCE, release
from tests.checkpoint.formats import FORMATS
from tests.checkpoint.quantised import checkpoint
from tests.tiny import VOCAB, decided, prompts_of, transformers_agrees

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 8},
    "phi": {"tie_word_embeddings": False},
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 128},
    "glm4": {"head_dim": 16},
    "cohere2": {"head_dim": 16, **WINDOWED},
    "granite_swa": WINDOWED,
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, **WINDOWED},
    "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "glm4_moe": {"head_dim": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS},
    "mixtral": EXPERTS,
    "phimoe": {"sliding_window": 8, **EXPERTS},
    "gpt_oss": {"head_dim": 16, "intermediate_size": 24, **WINDOWED, **EXPERTS},
    "deepseek_v3": {
        **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
        **EXPERTS,
    },
    "llama4_text": {"head_dim": 16, "attention_chunk_size": 8, "floor_scale": 4, "num_hidden_layers": 4, **EXPERTS},
    "gemma4_text": {
        **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2},
        **{"num_hidden_layers": 4, "sliding_window": 8, "vocab_size_per_layer_input": VOCAB},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "bert": {"is_decoder": True},
}
WRAPPERS = {"gemma3": {"head_dim": 16, **WINDOWED}, "mistral3": {"head_dim": 16}}
"""Types that look at images besides, and what is said of their language model."""
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    """Weights at random, large enough that the next token is far from certain."""
    torch.manual_seed(7)
    if kind in WRAPPERS:
        text = {**SIZES, **WRAPPERS[kind]}
        config = AutoConfig.for_model(kind, text_config=text, vision_config=VISION, image_token_index=VOCAB - 1)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    else:
        config = AutoConfig.for_model(kind, **{**SIZES, **TYPES.get(kind, {}), **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise * (0.5 if parameter.shape[0] == VOCAB else 1.3 * parameter.shape[-1] ** -0.5))
            else:
                parameter.add_(noise * 0.1)
    return model


@pytest.mark.turns
@pytest.mark.parametrize("kind", [*TYPES, *WRAPPERS])
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    settings: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 0}
    how = {"dtype": "float32", "model_impl": "transformers", "offload_dir": str(tmp_path / "offload")}

    def answer(_: int, prompt: list[int]) -> tuple[list[int], list[float]]:
        alone = llm.generate([prompt], **settings)[0]
        return alone.token_ids, transformers_agrees(model, prompt, alone.token_ids)

    with Engine(str(tmp_path), **how) as llm:
        prompts, answers = decided(prompts_of([5, 21, 13, 9, 1]), answer)
    for policy in (
        {"gpu_batch_size": 2, "num_gpu_batches": 2, "weights": {"disk": 1.0}, "prefill_chunk": 16},
        {"gpu_batch_size": 1, "num_gpu_batches": 3, "weights": {"cpu": 0.5, "disk": 0.5}, "cache": {"disk": 1.0}},
    ):
        with Engine(str(tmp_path), policy=policy, **how) as llm:
            together = llm.generate(prompts, **settings)
            assert llm.last_record is not None
        for (tokens, logprobs), output in zip(answers, together, strict=True):
            assert output.token_ids == tokens
            assert output.logprobs == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["h2o", "snapkv", "streaming", "tova", "keydiff"])
def test_evicted_tokens_are_the_native_familys(name: str, tmp_path: Path) -> None:
    """Budgets, windows of policies and what is kept are the cache's, whoever computes queries and keys."""
    tiny("llama").save_pretrained(tmp_path)
    prompts = prompts_of([30, 11, 24])
    found = []
    for impl in ("native", "transformers"):
        eviction = EvictionConfig(name, ratio=0.5)
        with Engine(str(tmp_path), dtype="float32", model_impl=impl, eviction=eviction) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, max_new_tokens=12, ignore_eos=True)])
            assert llm.last_record is not None
            assert llm.last_record.eviction["budget"]
    assert found[0] == found[1]


def test_shared_prefixes_and_samples_go_through_modules(tmp_path: Path) -> None:
    model = tiny("qwen3")
    model.save_pretrained(tmp_path)
    (first, *_), head = prompts_of([20, 5]), prompts_of([12])[0]
    prompts = [head + first[1:7], head + first[3:5], head, head + first[1:7], first]
    with Engine(str(tmp_path), dtype="float32", model_impl="transformers", share_prefixes=False) as llm:
        alone = [llm.generate([prompt], max_new_tokens=5, ignore_eos=True)[0].token_ids for prompt in prompts]
        scores = llm.score([(head, first[1:6])])[0]
    with Engine(str(tmp_path), dtype="float32", model_impl="transformers") as llm:
        assert [each.token_ids for each in llm.generate(prompts, max_new_tokens=5, ignore_eos=True)] == alone
    with Engine(str(tmp_path), dtype="float32", model_impl="native") as llm:
        assert scores.logprob == pytest.approx(llm.score([(head, first[1:6])])[0].logprob, abs=1e-3)


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["llama", "gemma2", "glm4_moe", "granite", "deepseek_v3"])
def test_h2o_scores_a_prompt_by_transformers_probabilities(kind: str, tmp_path: Path) -> None:
    """Column sums, in the mean over the heads of a KV head, all where these share latents; the heaviest stay."""
    model, prompt, budget = tiny(kind), prompts_of([30])[0], 12
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
    eviction = EvictionConfig("h2o", budget=budget)
    with Engine(
        str(tmp_path), dtype="float32", model_impl="transformers", eviction=eviction, record_scores=True
    ) as llm:
        llm.generate([prompt], max_new_tokens=1, ignore_eos=True)
        assert llm.score_log is not None
        ((row_id, (_, kept)),) = llm.score_log._ended.items()
        found = llm.score_log._scores[row_id]
    assert any(found)
    for layer, scores in found.items():
        sums = attentions[layer][0].sum(1).view(len(scores), -1, len(prompt)).mean(1)
        assert torch.tensor(scores) == pytest.approx(sums, abs=1e-4)
        if llm.model.spec.windows[layer] is None:
            older = sums[:, : len(prompt) - budget // 2].topk(budget // 2).indices
            recent = range(len(prompt) - budget // 2, len(prompt))
            assert kept[layer] == [sorted([*each, *recent]) for each in older.tolist()]


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_sixteen_bits_are_near_the_native_family(kind: str, tmp_path: Path) -> None:
    """In bfloat16 kernels in C attend, multiply and mix: what modules give them lies otherwise in memory."""
    tiny(kind, head_dim=16).save_pretrained(tmp_path)
    (context, rest), found = prompts_of([20, 6]), []
    for impl in ("native", "transformers"):
        with Engine(str(tmp_path), dtype="bfloat16", model_impl=impl, eviction=EvictionConfig("h2o", ratio=0.5)) as llm:
            found.append(llm.score([(context, rest)])[0].logprob)
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_parts_in_float32_stay_so(tmp_path: Path) -> None:
    """transformers keeps what corrects a router's choice in float32, and checkpoints have it so."""
    model, (context, rest) = tiny("deepseek_v3"), prompts_of([20, 6])
    bias = torch.linspace(-0.3, 0.3, 6)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(bias)
    model.to(torch.bfloat16)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias = bias.clone()
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        rows = theirs(torch.tensor([context + rest[:-1]])).logits[0, len(context) - 1 :].float().log_softmax(-1)
    with Engine(str(tmp_path), dtype="bfloat16") as llm:
        ours = llm.score([(context, rest)])[0].logprob
        exact = llm._decoder.exact  # type: ignore[attr-defined]
        kept = {name: places for name, places in exact.items() if name.endswith("bias")}
        assert len(kept) == 2  # releases differ in whether routers' matrices are so too
        assert all(torch.equal(where[key], bias) for places in kept.values() for where, key, _ in places)
    assert ours == pytest.approx(float(rows.gather(1, torch.tensor(rest)[:, None]).sum()), rel=0.05)


@pytest.mark.skipif(release() < SINCE["bailing_hybrid"], reason="it runs with later releases of transformers")
def test_parts_in_float32_of_several_tensors(tmp_path: Path) -> None:
    """Ling's convolutions of queries, keys and values are one of transformers', in float32."""
    random_model(shrunk({"model_type": "bailing_hybrid"})).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    convs = {name: x for name, x in theirs.named_parameters() if name.endswith("conv1d.weight")}
    assert {x.dtype for x in convs.values()} == {torch.float32}
    with Engine(str(tmp_path), dtype="bfloat16", model_impl="transformers") as llm:
        assert llm.generate([[5, 6, 7], [8]], max_new_tokens=2, ignore_eos=True)[0].error is None
        ours = dict(llm._decoder._model.named_modules())  # type: ignore[attr-defined]
        for name, x in convs.items():
            assert torch.equal(ours[name.removesuffix(".weight")]._parameters["weight"], x)
    assert convs


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_are_multiplied_by_the_engine(bits: int, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    (context, rest), found = prompts_of([20, 6]), []
    for impl in ("native", "transformers"):
        with Engine(
            str(tmp_path), dtype="float32", model_impl=impl, weight_bits=bits, weight_group=32, weight_importance=False
        ) as llm:
            found.append(llm.score([(context, rest)])[0].logprob)
            assert llm.last_record is not None
            assert llm.last_record.quantization["weights"]["bits"] == bits
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def test_what_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    cases = {
        "mllama": ({}, "no class for it that makes text alone"),
        "no_such_type": ({}, "which is not supported"),
        "starcoder2": ({"sliding_window": 0}, "has a window of 0 tokens"),
        "moshi": ({"sliding_window": 0}, "has a window of 0 tokens"),
        "flex_olmo": ({**SIZES, "num_experts_per_tok": 0}, "has experts, of which tokens choose none"),
    }
    for kind, (config, message) in cases.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind, **config}))
        with pytest.raises(ModelError, match=message):
            Engine(str(folder), weights="dummy")


def test_what_modules_cannot_do_is_a_usage_error(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    for settings in (
        {"eviction": EvictionConfig("h2o", ratio=0.5, rolling_positions=True)},
        {"eviction": EvictionConfig("expected_attention", ratio=0.5)},
        {"policy": {"hidden": {"disk": 1.0}}},
    ):
        with pytest.raises(UsageError):
            Engine(str(tmp_path), model_impl="transformers", **settings)
    with pytest.raises(UsageError, match="model_impl is 'vllm'"):
        Engine(str(tmp_path), model_impl="vllm")


def test_a_finite_check_names_the_unit(tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with Engine(str(tmp_path), dtype="float32", model_impl="transformers", check_finite=True) as llm:
        output = llm.generate(prompts_of([6]), max_new_tokens=3)[0]
    assert output.finish_reason == "error"
    assert "layers.1.mlp" in str(output.error)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["gptq act-order", "awq", "packed 4", "int8", "fp8 128", "fp8 channel"])
def test_stored_formats_are_read_packed(name: str, tmp_path: Path) -> None:
    """As by the native family: what matrices stand for is what is multiplied."""
    checkpoint(FORMATS[name], num_hidden_layers=2).write(tmp_path)
    pairs, found = [([5, 9, 30, 7, 12], [3, 8, 21]), ([4], [17, 33])], []
    for impl, tier in (("native", "cpu"), ("transformers", "cpu"), ("transformers", "disk")):
        how = {"dtype": "float32", "model_impl": impl, "policy": {"weights": {tier: 1.0}}}
        with Engine(str(tmp_path), offload_dir=str(tmp_path / "offload"), **how) as llm:
            found.append([score.logprob for score in llm.score(pairs)])
            assert llm.last_record is not None
            assert llm.last_record.quantization["weights"]["bits"] in (4, 8)
    assert found[1] == pytest.approx(found[0], abs=1e-3)
    assert found[2] == pytest.approx(found[0], abs=1e-3)
