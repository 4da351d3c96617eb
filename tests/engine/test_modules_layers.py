"""Layers of transformers' modules that differ from one another: chunks, sizes, keys that others have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from tests.engine.test_modules import EXPERTS, SIZES, VISION, WINDOWED, tiny
from tests.tiny import VOCAB, prompts_of, transformers_agrees, transformers_logprobs

CHUNK = 8


def kept_of(llm: Engine, row: int) -> dict[int, list[list[int]]]:
    """Positions that a row held at its end, by layer and KV head."""
    assert llm.score_log is not None
    return llm.score_log._ended[row][1] if row in llm.score_log._ended else {}


def test_chunks_go_through_shared_prefixes(tmp_path: Path) -> None:
    """Prompts that part before, at and behind the end of a chunk."""
    tiny("llama4_text").save_pretrained(tmp_path)
    (first, *_), head = prompts_of([20, 5]), prompts_of([12])[0]
    prompts = [head + first[1:7], head[:8] + first[3:5], head, head + first[1:7], head[:8], first]
    how: dict[str, Any] = {"dtype": "float32", "policy": {"prefill_chunk": 16}}
    with Engine(str(tmp_path), share_prefixes=False, dtype="float32") as llm:
        alone = [llm.generate([prompt], max_new_tokens=10, ignore_eos=True)[0].token_ids for prompt in prompts]
    with Engine(str(tmp_path), **how) as llm:
        assert [each.token_ids for each in llm.generate(prompts, max_new_tokens=10, ignore_eos=True)] == alone


@pytest.mark.turns
@pytest.mark.parametrize("name", ["h2o", "snapkv", "streaming", "tova", "keydiff"])
def test_nothing_of_other_chunks_is_kept(name: str, tmp_path: Path) -> None:
    """Whatever the policy, and however many rows end a chunk in the same step."""
    tiny("llama4_text").save_pretrained(tmp_path)
    prompts = prompts_of([30, 11, 24, 16, 3])
    found = []
    for shape in ((1, 5), (3, 2)):
        policy = {"gpu_batch_size": shape[0], "num_gpu_batches": shape[1], "cache": {"disk": 1.0}}
        how: dict[str, Any] = {"policy": policy, "offload_dir": str(tmp_path / "offload"), "record_scores": True}
        with Engine(str(tmp_path), dtype="float32", eviction=EvictionConfig(name, budget=5), **how) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, max_new_tokens=7, ignore_eos=True)])
            windows = llm.model.spec.windows
            for row, prompt in enumerate(prompts):
                last = len(prompt) + 5  # the newest of the tokens is in no cache
                for layer, heads in kept_of(llm, row).items():
                    assert name != "h2o" or all(len(head) <= 5 and max(head) == last for head in heads)
                    if windows[layer] is not None:
                        assert all(min(head) >= last // CHUNK * CHUNK for head in heads)
    assert windows.count(CHUNK) == 3
    assert found[0] == found[1]


def test_spans_have_no_meaning_in_chunks(tmp_path: Path) -> None:
    tiny("llama4_text").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="chunk"):
        Engine(str(tmp_path), eviction=EvictionConfig("h2o", ratio=0.5, spans="whitelist"))


def test_llama4s_language_model_is_computed_alone(tmp_path: Path) -> None:
    """Of its checkpoint for images and text, which transformers' own class for it cannot run."""
    text = {**SIZES, "head_dim": 16, "attention_chunk_size": CHUNK, "floor_scale": 4, **EXPERTS}
    vision = {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    config = AutoConfig.for_model("llama4", text_config=text, vision_config=vision)
    torch.manual_seed(3)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    alone = AutoModelForCausalLM.from_config(config.text_config, attn_implementation="eager").eval()
    alone.load_state_dict(whole.language_model.state_dict())
    prompt = prompts_of([21])[0]
    wanted = alone.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    with Engine(str(tmp_path), dtype="float32") as llm:
        assert llm.model.spec.vocab_size == VOCAB
        found = llm.generate([prompt], max_new_tokens=6, ignore_eos=True)[0].token_ids
    assert found == wanted[0, len(prompt) :].tolist()


def test_latents_are_kept_once(tmp_path: Path) -> None:
    """512 latents and 64 rotated numbers, as DeepSeek has them: 1,152 bytes a token and layer in 16 bits."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 2}
    tiny("deepseek_v3", **sizes).save_pretrained(tmp_path)
    prompts, found = prompts_of([9, 30, 14]), []
    for policy in ({"gpu_batch_size": 3}, {"gpu_batch_size": 1, "num_gpu_batches": 3, "cache": {"disk": 1.0}}):
        how: dict[str, Any] = {"policy": policy, "offload_dir": str(tmp_path / "offload"), "dtype": "float32"}
        with Engine(str(tmp_path), eviction=EvictionConfig("h2o", budget=8), **how) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, max_new_tokens=9, ignore_eos=True)])
            assert llm.last_record is not None
            assert llm.last_record.kv_bytes == 2 * 3 * (8 + 1) * 2304
        assert llm.model.spec.kv_bytes_per_token_and_layer("bfloat16") == 1152
    assert found[0] == found[1]


def test_layers_have_heads_of_their_own_sizes(tmp_path: Path) -> None:
    """Windowed and other layers with different numbers of KV heads, and heads of other sizes."""
    sizes = {"head_dim": 16, "v_head_dim": 8, "swa_head_dim": 32, "swa_v_head_dim": 16, "swa_num_key_value_heads": 4}
    model = tiny("mimo_v2_flash", **sizes, sliding_window=8, **EXPERTS)
    model.save_pretrained(tmp_path)
    with Engine(str(tmp_path), dtype="float32") as llm:
        spec = llm.model.spec
        assert len({spec.heads_of(layer) for layer in range(spec.num_layers)}) == 2
        llm.generate(prompts_of([20, 6]), max_new_tokens=5, ignore_eos=True)
        assert llm.last_record is not None
        slots = [8 if window else 20 + 5 for window in spec.windows]
        tokens = [spec.kv_bytes_per_token_and_layer("float32", layer) for layer in range(spec.num_layers)]
        assert llm.last_record.kv_bytes == 2 * sum(map(int.__mul__, slots, tokens))


@pytest.mark.parametrize("name", ["full", "h2o", "tova"])
def test_layers_that_read_the_keys_of_others_have_none(name: str, tmp_path: Path) -> None:
    """Two of four layers; rows that come later, prefixes that rows share and caches on disk change nothing."""
    tiny("gemma4_text", tie_word_embeddings=False).save_pretrained(tmp_path)
    head = prompts_of([12])[0]
    prompts = [head + prompt for prompt in prompts_of([5, 20, 9])] + prompts_of([30, 7, 2])
    eviction = EvictionConfig() if name == "full" else EvictionConfig(name, budget=6)
    found, logprobs = list[list[list[int]]](), list[list[float]]()
    for shape, cache, shares in (((2, 1), "cpu", True), ((1, 3), "disk", False), ((6, 1), "cpu", False)):
        policy = {"gpu_batch_size": shape[0], "num_gpu_batches": shape[1], "cache": {cache: 1.0}}
        how: dict[str, Any] = {"policy": policy, "offload_dir": str(tmp_path / "offload"), "share_prefixes": shares}
        with Engine(str(tmp_path), dtype="float32", eviction=eviction, **how) as llm:
            outputs = llm.generate(prompts, max_new_tokens=7, ignore_eos=True, logprobs=0)
            found.append([output.token_ids for output in outputs])
            logprobs.append([number for output in outputs for number in output.logprobs or ()])
            spec, record = llm.model.spec, llm.last_record
            assert [spec.source_of(layer) for layer in range(4)] == [0, 1, 0, 1]
            assert record is not None
            if name == "h2o" and shape == (6, 1):
                tokens = [spec.kv_bytes_per_token_and_layer("float32", layer) for layer in (0, 1)]
                assert record.kv_bytes == 6 * (6 + 1) * sum(tokens)
    assert found[0] == found[1] == found[2]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
    assert logprobs[2] == pytest.approx(logprobs[0], abs=1e-4)
    assert len({token for tokens in found[0] for token in tokens}) > 10  # not the last token again and again


def test_gemma_3ns_language_model_is_computed_alone(tmp_path: Path) -> None:
    """Its tower needs another library; of the checkpoint nothing of it is read."""
    text = {**SIZES, "head_dim": 16, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": VOCAB, **WINDOWED}
    text |= {"hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 3}
    alone = tiny("gemma3n_text", **text)
    alone.save_pretrained(tmp_path)
    config = AutoConfig.for_model("gemma3n", text_config=alone.config.to_dict())
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    tensors = load_file(tmp_path / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file({**whole, "model.vision_tower.stem.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    prompt = prompts_of([21])[0]
    wanted = alone.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    with Engine(str(tmp_path), dtype="float32") as llm:
        found = llm.generate([prompt], max_new_tokens=6, ignore_eos=True)[0].token_ids
    assert found == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
        {"attention_k_eq_v": True, "num_kv_shared_layers": 0},
        {"use_double_wide_mlp": True},
    ],
    ids=["experts", "values of keys", "wide"],
)
def test_gemma_4_in_its_other_forms(changes: dict[str, Any], tmp_path: Path) -> None:
    """Experts beside an MLP, values from what keys are made of, MLPs of two sizes: scores are transformers'."""
    model = tiny("gemma4_text", tie_word_embeddings=False, **changes)
    model.save_pretrained(tmp_path)
    prompts = prompts_of([21, 5])
    with Engine(str(tmp_path), dtype="float32", model_impl="transformers") as llm:
        outputs = llm.generate(prompts, max_new_tokens=5, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = transformers_agrees(model, prompt, output.token_ids)
        assert output.logprobs == pytest.approx(wanted, abs=1e-3)


def _within(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    """Attention of one whole text, within the window that the layer names."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    length, window = q.shape[2], given.get("sliding_window") or q.shape[2]
    back = torch.arange(length)[:, None] - torch.arange(length)
    logits = (q @ k.transpose(2, 3) * scaling).masked_fill((back < 0) | (back >= window), float("-inf"))
    return (logits.softmax(-1) @ v).transpose(1, 2), None


@pytest.mark.slow
def test_windows_of_several_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer sees its own one, and keeps no more; a budget that is larger than one window chooses in the others."""
    made = Gemma3Attention.__init__

    def narrower(self: Any, config: Any, layer_idx: int) -> None:
        made(self, config, layer_idx)
        if self.sliding_window is not None and layer_idx:
            self.sliding_window = 5

    monkeypatch.setattr(Gemma3Attention, "__init__", narrower)
    AttentionInterface.register("within", _within)
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    model = tiny(
        "gemma3_text", num_hidden_layers=4, sliding_window=12, head_dim=16, layer_types=types, tie_word_embeddings=False
    )
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("within")
    prompts, wanted = prompts_of([30, 9, 17]), list[list[int]]()
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        wanted.append(ids[len(prompt) :])
    answers = list[list[list[int]]]()
    for tier, sizes in (("cpu", (2, 2)), ("disk", (1, 3))):
        policy = {"gpu_batch_size": sizes[0], "num_gpu_batches": sizes[1], "cache": {tier: 1.0}, "prefill_chunk": 16}
        how: dict[str, Any] = {"dtype": "float32", "model_impl": "transformers", "policy": policy}
        with Engine(str(tmp_path), offload_dir=str(tmp_path), **how) as llm:
            assert llm.model.spec.windows == (12, None, 5, 5)
            found = [each.token_ids for each in llm.generate(prompts, max_new_tokens=6, ignore_eos=True)]
            assert llm.last_record is not None
        assert found == wanted
        with Engine(str(tmp_path), offload_dir=str(tmp_path), eviction=EvictionConfig("h2o", budget=8), **how) as llm:
            answers.append([each.token_ids for each in llm.generate(prompts, max_new_tokens=6, ignore_eos=True)])
    assert answers[0] == answers[1] != wanted


def test_experts_of_the_groups_with_the_best_one(tmp_path: Path) -> None:
    """DeepSeek-V2's group_limited_greedy."""
    config = shrunk({"model_type": "deepseek_v2", "num_hidden_layers": 3})
    config.topk_method, config.n_group, config.topk_group = "group_limited_greedy", 4, 1
    model = random_model(config)
    model.save_pretrained(tmp_path)
    pairs = [([5, 9, 30, 7, 12, 99, 64], [3, 8, 21, 44]), ([4, 17, 33], [2, 8, 50])]
    wanted = [transformers_logprobs(model, *pair)[range(len(pair[1])), pair[1]].tolist() for pair in pairs]
    with Engine(str(tmp_path), dtype="float32", policy={"gpu_batch_size": 2}) as llm:
        found = [each.token_logprobs for each in llm.score(pairs)]
    for row, expected in zip(found, wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-3)
    model.config.topk_method = "greedy"
    for layer in model.model.layers[1:]:
        layer.mlp.gate.topk_method = "greedy"
    assert transformers_logprobs(model, *pairs[0])[range(4), pairs[0][1]].tolist() != pytest.approx(wanted[0], abs=1e-2)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_experts_without_weights_are_not_read(share: float, tmp_path: Path) -> None:
    """LongCat-Flash's: they give back what they are given. With all, half or none of a token's experts such ones it
    gives transformers' tokens, and reads what the others need. Each layer attends twice, with a cache for each."""
    model = random_model(shrunk({"model_type": "longcat_flash"}))
    count, active = model.config.n_routed_experts, model.config.num_experts_per_tok
    for layer in model.model.layers:
        layer.mlp.router.e_score_correction_bias[:] = 0.0 if share < 1 else -4.0
        layer.mlp.router.e_score_correction_bias[count:] = -4.0 if share == 0 else 4.0
        if share == 0.5:
            layer.mlp.router.e_score_correction_bias[count + 1 :] = -4.0
    model.save_pretrained(tmp_path)
    prompts = prompts_of([5, 9])
    how: dict[str, Any] = {"dtype": "float32", "policy": {"weights": {"disk": 1.0}}, "offload_dir": str(tmp_path)}
    with Engine(str(tmp_path), **how) as llm:
        outputs = llm.generate(prompts, max_new_tokens=4, ignore_eos=True)
        assert [layer.number for layer in llm.model.spec.layers] == [0, 1, 2, 3]
        assert llm.model.spec.arch.experts is not None
        assert (llm.model.spec.arch.experts.count, llm.model.spec.arch.experts.active) == (count, active)
        assert llm.last_record is not None
        assert llm.last_record.experts is not None
        assert (llm.last_record.experts["read"] > 0) == (share < 1)
    for prompt, output in zip(prompts, outputs, strict=True):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert output.token_ids == made[0, len(prompt) :].tolist()
