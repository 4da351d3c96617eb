"""Every decoder of transformers, tiny: those that are trusted give its own tokens, from memory and disk; others are
refused.

A twentieth of them runs in the fast tier.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.hf.build import model_types
from h2o_flexgen.models.hf.trusted import TRUSTED

LAYERS, VOCAB, WINDOW, NEW = 4, 128, 8, 6
SIZES: list[tuple[int, str]] = [
    (64, "hidden_size d_model n_embd dim hidden_dim word_embed_proj_dim"),
    (4, "num_attention_heads n_head n_heads decoder_attention_heads num_heads"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers"),
    (2, "num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts n_group num_kv_shared_layers"),
    (16, "head_dim v_head_dim kv_lora_rank qk_nope_head_dim attention_head_dim global_head_dim swa_head_dim"),
    (96, "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim ffn_hidden_size intermediate_size_mlp"),
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (8, "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size q_lora_rank"),
    (1, "topk_group first_k_dense_replace num_dense_layers"),
    (WINDOW, "sliding_window attention_window_size window_size attention_chunk_size floor_scale"),
]
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
OWN: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "dots1": {"n_group": 1, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_heads": 2}
VISION |= {"num_attention_heads": 2, "out_hidden_size": 64, "embed_dim": 32, "mm_hidden_size": 32}
SECTIONS = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr", "paddleocr_vl")
"""Types whose positions have three parts by default, of as many dimensions as the default head has."""


def small(given: PreTrainedConfig) -> dict[str, Any]:
    """The fields that make a default config tiny, as far as it has them."""
    have, made = given.to_dict(), dict[str, Any]()
    for size, names in SIZES:
        made |= {name: size for name in names.split() if type(have.get(name)) is int}
    made |= {name: value for name, value in TOKENS.items() if name in have}
    if "num_key_value_heads" in made and have["num_key_value_heads"] == have.get("num_attention_heads"):
        made["num_key_value_heads"] = 4
    if "qk_rope_head_dim" in made and "head_dim" in made:
        made["head_dim"] = made["qk_rope_head_dim"]
    if have.get("is_decoder") is False:
        made["is_decoder"] = True
    for name in ("layer_types", "mlp_layer_types"):
        if have.get(name):
            made[name] = (list(dict.fromkeys(have[name])) * LAYERS)[:LAYERS]
    return {**made, **OWN.get(given.model_type, {})}


def tiny_config(kind: str) -> PreTrainedConfig:
    """Of a decoder, or of one in a wrapper with what looks at images."""
    default = CONFIG_MAPPING[kind]()
    text = default.get_text_config(decoder=True)
    if text is default:
        return CONFIG_MAPPING[kind](**small(default))
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in ("gemma3", "mistral3"):
        return type(text)(**small(text))
    raw = default.to_dict()
    raw["text_config"] |= small(text)
    raw["vision_config"] |= {key: value for key, value in VISION.items() if key in raw["vision_config"]}
    raw |= {key: VOCAB - 1 for key in raw if re.search(r"(image|video|vision\w*|boi|eoi)_token_(id|index)$", key)}
    rope = raw["text_config"].get("rope_parameters") or {}
    if "mrope_section" in rope or kind in SECTIONS:
        rope["mrope_section"] = [4, 2, 2]
    return CONFIG_MAPPING[kind].from_dict(raw)


def tiny_model(kind: str) -> Any:
    torch.manual_seed(0)
    config = tiny_config(kind)
    auto = AutoModelForCausalLM if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None
    if hasattr(config, "vision_config"):
        auto = AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                wide = parameter.shape[0] == VOCAB and "lm_head" not in name
                parameter.copy_(noise * (1.0 if wide else 1.3 * parameter.shape[-1] ** -0.5))
            else:
                parameter.add_(noise * 0.15)
    return model


TIERS = [pytest.param(kind, marks=() if i % 20 == 0 else pytest.mark.slow) for i, kind in enumerate(sorted(TRUSTED))]


@pytest.mark.parametrize("kind", TIERS)
def test_a_trusted_type_gives_transformers_tokens(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 120, (n,), generator=generator).tolist() for n in (5, 21, 13)]
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist() for ids in prompts]
    model.save_pretrained(tmp_path)
    for shape, tier in (((2, 2), "cpu"), ((1, 3), "disk")):
        policy = {"gpu_batch_size": shape[0], "num_gpu_batches": shape[1], "weights": {tier: 1.0}}
        how = {"dtype": "float32", "model_impl": "transformers", "offload_dir": str(tmp_path / "offload")}
        with Engine(str(tmp_path), policy=policy, **how) as llm:
            found = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        assert [output.token_ids for output in found] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(model_types() - TRUSTED))
def test_any_other_type_is_refused(kind: str, tmp_path: Path) -> None:
    try:
        config = CONFIG_MAPPING[kind]().to_json_string(use_diff=False)
    except Exception:
        pytest.skip("transformers makes no config of its own")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError):
        Engine(str(tmp_path), weights="dummy", model_impl="transformers")


def test_documents_name_every_trusted_type() -> None:
    text = (Path(__file__).parents[2] / "docs/modules.md").read_text(encoding="utf-8")
    table = text.strip().rpartition("\n\n")[2]
    assert set(re.findall(r"`([\w-]+)`", table)) == TRUSTED
