"""A model of any type made tiny, on which facts about the type show in a second, on few numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from h2o_flexgen.models.hf.build import plain

LAYERS, VOCAB, WINDOW = 4, 128, 8
SHORT_EXPERTS, SHORT_VOCAB = 16, 4096
"""Of a model that is short, and as wide as it was."""
MOST = 200_000_000
"""Numbers that a tiny model may have: others would take long."""
_LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers"
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts"
_VOCABULARIES = "vocab_size vocab_size_per_layer_input unpadded_vocab_size"
SIZES: list[tuple[int, str]] = [
    (64, "hidden_size d_model n_embd dim hidden_dim word_embed_proj_dim"),
    (4, "num_attention_heads n_head n_heads decoder_attention_heads num_heads swa_num_attention_heads"),
    (LAYERS, _LAYERS),
    (2, "num_key_value_heads swa_num_key_value_heads num_global_key_value_heads num_kv_shared_layers n_group"),
    (2, "num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts num_experts_per_token zero_expert_num"),
    (16, "head_dim v_head_dim kv_lora_rank qk_nope_head_dim attention_head_dim global_head_dim swa_head_dim d_kv"),
    (96, "intermediate_size ffn_dim n_inner d_ff dff decoder_ffn_dim ffn_hidden_size intermediate_size_mlp"),
    (96, "dense_intermediate_size swa_intermediate_size inner_dim"),
    (VOCAB, _VOCABULARIES),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (8, _EXPERTS),
    (8, "qk_rope_head_dim"),
    (8, "attention_chunk_size hidden_size_per_layer_input rotary_dim"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size q_lora_rank"),
    (32, "expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_experts_intermediate_size"),
    (1, "topk_group first_k_dense_replace num_dense_layers"),
    (WINDOW, "sliding_window attention_window_size window_size sliding_window_size floor_scale"),
    (8, "mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads n_mamba_heads"),
    (8, "chunk_size mamba_chunk_size"),
    (16, "mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"),
    (16, "index_head_dim index_n_heads o_lora_rank"),
    (2, "mamba_expand expand linear_num_key_heads o_groups"),
    (4, "time_step_rank mamba_dt_rank linear_num_value_heads d_rel linear_num_heads"),
    (1, "mamba_n_groups n_groups mamba_ngroups"),
    (128, "mamba_d_ssm"),
    (6, "index_topk"),
    (64, "lru_width"),
]
"""Fields that sizes have in any config, and what they are made."""
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "forced_eos_token_id": None}
"""No token ends a sequence, and none is written unasked."""
_MIXED = ["linear_attention", "full_attention"] * 2
_CONVOLVED = ["conv", "full_attention"] * 2
_INDEXED = {"layer_types": ["linear_attention", "indexed_attention"] * 2, "ple_layer_ids": [], "hc_count": 2}
_INDEXED |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "hc_lowrank": 8}
_INDEXED |= {"indexer_compress_ratio": 2}
_ZAMBA = {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **{"layer_types": _MIXED, "num_experts": 8, "num_expert_group": 2, "topk_group": 1, "num_experts_per_token": 2},
        **{"linear_head_dim": 16, "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"] * 2},
        "layer_group_size": 2,
    },
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_state": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {kind: _PLAIN_ROPE for kind in ("full_attention", "sliding_attention")},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "dory": {
        **{"n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2, "num_hidden_layers": 6},
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
    },
    "dots1": {"n_group": 1, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "dots3_note_text": {"head_dim": 24},
    "falcon": {"num_kv_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _MIXED},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "inkling2_text": {"d_rel": 4, "rel_extent": 8, "log_scaling_n_floor": 10, "n_layers_per_attn_res_block": 2},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_dt_rank": 4, "use_mamba_kernels": False},
    },
    "lfm2": {"layer_types": _CONVOLVED},
    "lfm2_moe": {"layer_types": _CONVOLVED},
    "lfm3": {"layer_types": _CONVOLVED},
    "longcat_flash": {"num_layers": 2, "qk_head_dim": 24},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "phi4_multimodal": {
        "vision_config": {
            **{"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
            **{"crop_size": 28, "image_size": 28},
        },
        "audio_config": {
            **{"num_blocks": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
            "nemo_conv_channels": 32,
        },
    },
    # as transformers cuts what it has joined into equal parts when it saves it
    "olmo_hybrid": {"layer_types": _MIXED, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "qwen4_exp": _INDEXED,
    "qwen4_exp_text": _INDEXED,
    "zamba": {
        **_ZAMBA,
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"], "num_hidden_layers": 5},
        **{"n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    },
    "zamba2": {
        **_ZAMBA,
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_headdim": 16},
        **{"kv_channels": 16, "num_query_groups": 4, "mamba_ngroups": 1, "adapter_rank": 8},
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid"] * 4},
}
"""Fields of single types that go with those sizes, or cannot be without."""
UNSAID = {
    "dbrx": ("num_hidden_layers", "hidden_size"),
    "gpt_neo": ("attention_layers",),
    "jamba": ("layer_types", "layers_block_type"),
    "zamba2": ("layer_types",),
}
"""Fields of single types that follow from others."""
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_heads": 2}
VISION |= {"num_attention_heads": 2, "out_hidden_size": 64, "embed_dim": 32, "mm_hidden_size": 32}
SECTIONS = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr", "paddleocr_vl")
"""Types whose positions have three parts by default, of as many dimensions as the default head has."""


Fields = Callable[[PreTrainedConfig], dict[str, Any]]
"""The fields of a decoder's config that are to be otherwise, with their values."""


def shrunk(raw: Mapping[str, Any]) -> PreTrainedConfig:
    """The config of a config.json, tiny: of a decoder, or of one in a wrapper with an image part.

    Fields beside sizes stay, such as the kinds of layers and of positions. Raises as transformers does.
    """
    return _changed(raw, small)


def shortened(raw: Mapping[str, Any], share: float) -> PreTrainedConfig:
    """As `shrunk`, but layers keep their widths: of them there are as many as are `share` of all, from the first on,
    of their experts some, and of the vocabulary a part."""
    return _changed(raw, partial(_short, share=share))


def _short(given: PreTrainedConfig, share: float) -> dict[str, Any]:
    have = given.to_dict()
    layers = next((have[name] for name in _LAYERS.split() if type(have.get(name)) is int), 0)
    left = max(1, math.ceil(share * layers))
    most = {_LAYERS: left, _EXPERTS: SHORT_EXPERTS, _VOCABULARIES: SHORT_VOCAB}
    sizes = {name: size for names, size in most.items() for name in names.split()}
    made = {name: min(have[name], size) for name, size in sizes.items() if type(have.get(name)) is int}
    made |= {name: value for name, value in TOKENS.items() if name in have}
    lists = {name: value for name, value in have.items() if isinstance(value, list)}
    made |= {name: value[:left] for name, value in lists.items() if len(value) == layers > left}
    return {name: value for name, value in made.items() if name not in UNSAID.get(given.model_type, ())}


def _changed(said: Mapping[str, Any], fields: Fields) -> PreTrainedConfig:
    raw: dict[str, Any] = plain(dict(said))
    kind = CONFIG_MAPPING[raw["model_type"]]
    given = kind.from_dict(dict(raw))
    text = given.get_text_config(decoder=True)
    if text is given:
        return kind.from_dict({**raw, **fields(given)})
    own = raw.get("text_config") or (text.to_dict() if "hidden_size" in raw else {})  # some have it beside the rest
    if raw["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and raw["model_type"] not in ("gemma3", "mistral3"):
        return type(text).from_dict({**own, **fields(text)})
    whole = given.to_dict()
    whole["text_config"] |= fields(text)
    whole["vision_config"] |= {key: value for key, value in VISION.items() if key in whole["vision_config"]}
    whole |= {key: VOCAB - 1 for key in whole if re.search(r"(image|video|vision\w*|boi|eoi)_token_(id|index)$", key)}
    rope = whole["text_config"].get("rope_parameters") or {}
    if fields is small and ("mrope_section" in rope or raw["model_type"] in SECTIONS):
        rope["mrope_section"] = [4, 2, 2]
    return kind.from_dict(whole)


def small(given: PreTrainedConfig) -> dict[str, Any]:
    """The fields that make a config tiny, as far as it has them."""
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
    for name, value in have.items():
        if isinstance(value, list) and value and name.endswith("layer_types"):
            made[name] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]
    rope = have.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":  # its factors are of each dimension
        kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        made |= {"rope_parameters": {**kept, "rope_type": "default"}, "rope_scaling": None}
    made |= OWN.get(given.model_type, {})
    if have.get("per_layer_config"):
        made["per_layer_config"] = _of_layers(have, made)
    return {name: value for name, value in made.items() if name not in UNSAID.get(given.model_type, ())}


def _of_layers(have: Mapping[str, Any], made: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The fields of single layers in a config that has some, `made` being those of all: each layer that is left has
    those of the first of its kind. Sizes that are not those of all layers are none in the tiny config, either."""
    said = {int(layer): fields for layer, fields in have["per_layer_config"].items()}
    kinds, left = have.get("layer_types"), made.get("layer_types")
    found = dict[int, dict[str, Any]]()
    for layer in range(made["num_hidden_layers"]):
        fields = said.get(kinds.index(left[layer]) if kinds and left else layer, {})
        sizes = {name for name, value in fields.items() if type(value) is type(made.get(name)) is int}
        own = {name: 2 * made[name] if name in sizes else value for name, value in fields.items()}
        if "qk_nope_head_dim" in own and "head_dim" in made:
            own["head_dim"] = own["qk_nope_head_dim"] + own.get("qk_rope_head_dim", made["qk_rope_head_dim"])
        if own:
            found[layer] = own
    return found


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Its modules, by transformers' own attention, with random weights that leave the next token uncertain."""
    torch.manual_seed(0)
    numbers = 0
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):  # some cannot be made there
        numbers = sum(each.numel() for each in _auto(config).from_config(config).parameters())
    if numbers > MOST:
        raise ValueError(f"it still has {numbers:,} numbers when made small")
    model = _auto(config).from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in _RATES) or not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                wide = parameter.shape[0] == VOCAB and "lm_head" not in name
                parameter.copy_(noise * (1.0 if wide else 1.3 * parameter.shape[-1] ** -0.5))
            else:
                parameter.add_(noise * 0.15)
    made: PreTrainedModel = model
    return made


def _auto(config: PreTrainedConfig) -> Any:
    looks = hasattr(config, "vision_config") and config.model_type != "phi4_multimodal"
    return AutoModelForImageTextToText if looks else AutoModelForCausalLM


_RATES = ("A_log", "dt_bias", ".D", "recurrent_param", "a_param", "rg_lru", "log_decay")
"""Parts of names of what rates of decay are made of, which constructors choose."""
