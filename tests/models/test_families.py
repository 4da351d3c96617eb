"""Every family's ModelSpec against transformers: tensors, names and sizes of tiny random models."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.families import FAMILIES, checkpoint_names, spec_from_config
from h2o_flexgen.models.rope_fields import KINDS
from h2o_flexgen.models.stored import Stored
from tests.oracles.parameters import parameters_of
from tests.seeds import moved

TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 3.0]}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-multi-head": {"num_key_value_heads": None},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-head-dim": {"head_dim": 10},
    "mistral": {"sliding_window": 8},
    "mistral-no-window": {"sliding_window": None, "head_dim": 10},
    "qwen2": {},
    "qwen2-windows": {**WINDOWS, "tie_word_embeddings": True},
    "qwen2-layers": {**WINDOWS, **LAYERS},
    "qwen3": {"head_dim": 16},
    "qwen3-windows": {**WINDOWS, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    "phi3": {},
    "phi3-partial": {"partial_rotary_factor": 0.75, "rope_scaling": LONG, "sliding_window": 8},
    "phi3-multi-head": {"num_key_value_heads": None, "tie_word_embeddings": True, "head_dim": 6},
    "gemma3_text": {"head_dim": 16, "sliding_window_pattern": 2, "sliding_window": 8},
    "gemma3_text-layers": {**LAYERS, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": False},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 12},
    "gemma2-no-caps": {
        **LAYERS,
        "head_dim": 8,
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "ministral3": {"head_dim": 10},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_neox-serial": {"rotary_pct": 1.0, "use_parallel_residual": False, "tie_word_embeddings": True},
    "gpt_neox-no-bias": {"rotary_pct": 0.5, "attention_bias": False},
    "mixtral": {"num_local_experts": 4, "sliding_window": 8},
    "qwen2_moe": {**EXPERTS, **WINDOWS, "norm_topk_prob": True, "shared_expert_intermediate_size": 24},
    "qwen2_moe-dense": {**EXPERTS, "decoder_sparse_step": 2, "qkv_bias": False},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "attention_bias": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, **LAYERS},
    "granitemoe": {"num_local_experts": 4, "tie_word_embeddings": True},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "olmo2": {"attention_bias": True},
    "glm4_moe": {**ROUTED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True, "n_group": 2},
    "dots1": {**ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 1},
    "ernie4_5_moe-some": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 2,
        "tie_word_embeddings": False,
    },
    "hy_v3": {**EXPERTS, "head_dim": 10, "attention_bias": True},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 10},
    "olmo3": {"attention_bias": True},
    "exaone4": {"head_dim": 10, "tie_word_embeddings": True},
    "cohere2": {"attention_bias": True},
    "glm4": {"head_dim": 8},
    "glm4-no-bias": {"head_dim": 12, "attention_bias": False, "tie_word_embeddings": True},
    "smollm3": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True, "head_dim": 10},
}


def written(variant: str) -> dict[str, Any]:
    """The config.json of a variant, every key spelled out, as save_pretrained of transformers 5 writes it."""
    config = AutoConfig.for_model(variant.partition("-")[0], **{**TINY, **VARIANTS[variant]})
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return plain


def tiny(variant: str) -> tuple[torch.nn.Module, ModelSpec]:
    config = written(variant)
    torch.manual_seed(moved(0))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    return model, spec_from_config(config, variant)


def stored_in(places: tuple[str | Stored, ...], state: dict[str, torch.Tensor]) -> Stored:
    """The first of the places that a checkpoint has."""
    every = [place if isinstance(place, Stored) else Stored(place) for place in places]
    return next(place for place in every if place.name in state)


def flat(place: Stored, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of more dimensions as rows."""
    return tensor.reshape(place.rows, *place.shape[2:])


def covered(spec: ModelSpec, state: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """How often each row of each stored tensor is used; checks that every canonical tensor gets its shape."""
    names = checkpoint_names(spec)
    every = [place for places in names.values() for place in places if isinstance(place, Stored) and place.shape]
    state = {**state, **{each.name: flat(each, state[each.name]) for each in every if each.name in state}}
    uses = {name: [0] * len(tensor) for name, tensor in state.items()}
    tensors = {tensor.name: tensor for group in spec.weight_groups for tensor in group.tensors}
    assert set(names) == set(tensors)
    for name, tensor in tensors.items():
        place = stored_in(names[name], state)
        whole = state[place.name]
        assert place.spans is None or place.rows == len(whole), name
        rows = [row for start, stop in place.spans or [(0, len(whole))] for row in range(start, stop)]
        shape = (len(rows), *whole.shape[1:])
        assert (tuple(reversed(shape)) if place.transposed else shape) == tensor.shape, name
        for row in rows:
            uses[place.name][row] += 1
    return uses


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_of_a_checkpoint_is_used_once(variant: str, tmp_path: Path) -> None:
    """Of the names in memory and of those in a saved file, which are not the same for gpt_neox."""
    from safetensors.torch import load_file

    model, spec = tiny(variant)
    model.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    if spec.arch.tied_head:
        del state["lm_head.weight"]
    for tensors in (state, load_file(tmp_path / "model.safetensors")):
        for name, rows in covered(spec, tensors).items():
            both = spec.arch.family == "cohere2" and "input_layernorm" in name  # each half has a copy
            assert set(rows) == {2 if both else 1}, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_those_of_transformers(variant: str) -> None:
    model, spec = tiny(variant)
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
    assert parameters_of(spec) == sum(parameter.numel() for parameter in model.parameters()) + biases
    assert spec.arch.family == variant.partition("-")[0]


@pytest.mark.parametrize("family", FAMILIES.names())
def test_an_empty_config_has_the_defaults_of_transformers(family: str) -> None:
    spec, theirs = spec_from_config({"model_type": family}, "x"), AutoConfig.for_model(family)
    raw = json.loads(theirs.to_json_string(use_diff=False))
    if family == "glm4_moe":  # 4096 / 96 is no size of a head
        raw["head_dim"] = 128
    full = spec_from_config(raw, "x")
    assert replace(full, dtype=spec.dtype) == spec
    assert (spec.hidden_size, spec.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (spec.max_positions, spec.vocab_size) == (theirs.max_position_embeddings, theirs.vocab_size)
    assert spec.pad_token_id == theirs.pad_token_id
    eos = theirs.eos_token_id
    assert spec.eos_token_ids == tuple(eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert spec.dtype == ("float16" if family == "opt" else "float32")


@pytest.mark.parametrize("family", sorted(set(FAMILIES.names()) - {"opt"}))
def test_switches_of_a_plain_config(family: str) -> None:
    arch, theirs = spec_from_config({"model_type": family}, "x").arch, AutoConfig.for_model(family)
    assert arch.family == family
    assert arch.positions == "rotary"
    layernorms = ("gpt_neox", "cohere2")
    assert arch.norm == ("layernorm" if family in layernorms else "rmsnorm")
    assert arch.norm_eps == (theirs.layer_norm_eps if family in layernorms else theirs.rms_norm_eps)
    assert arch.gated_mlp == (family != "gpt_neox")
    assert arch.parallel == (family in layernorms)
    assert arch.qkv_bias == (family in ("gpt_neox", "qwen2", "qwen2_moe", "gpt_oss", "seed_oss", "glm4"))
    assert arch.output_bias == (family in ("gpt_neox", "gpt_oss"))
    assert arch.mlp_bias == (family == "gpt_neox")
    normed = ("qwen3", "gemma3_text", "qwen3_moe", "olmoe", "olmo2", "olmo3", "exaone4", "dots1", "hy_v3", "minimax_m2")
    assert arch.qk_norm == (family in normed)
    assert arch.tied_head == theirs.tie_word_embeddings
    assert arch.activation == {"gpt_neox": "gelu", "gemma2": "gelu_tanh", "gemma3_text": "gelu_tanh"}.get(
        family, "silu"
    )


def test_what_is_special_in_gemma3() -> None:
    spec = spec_from_config({**TINY, "model_type": "gemma3_text", "query_pre_attn_scalar": 64}, "x")
    arch = spec.arch
    assert (arch.norm_offset, arch.post_norms, arch.embed_scale, arch.attention_scale) == (1, True, 32**0.5, 0.125)
    assert spec.head_dim == 256
    assert arch.local_rotary is not None
    assert arch.rotary is not None
    assert (arch.local_rotary.theta, arch.rotary.theta) == (1e4, 1e6)


WINDOW_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"sliding_window": 8}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}),
    ("mistral", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 8}),
    ("qwen2", {}),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True}),
    ("qwen2", {**WINDOWS, "max_window_layers": 0}),
    ("qwen2", WINDOWS),
    ("qwen2", {**WINDOWS, **LAYERS}),
    ("qwen2", {**WINDOWS, "sliding_window": None}),
    ("qwen2", {"layer_types": ["full_attention"] * 3, **WINDOWS}),
    ("qwen3", {**WINDOWS, "max_window_layers": 2}),
    ("mixtral", {"sliding_window": 8}),
    ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4}),
    ("qwen2_moe", {**EXPERTS, **WINDOWS, "max_window_layers": 2}),
    ("qwen2_moe", EXPERTS),
    ("qwen3_moe", {**EXPERTS, **WINDOWS}),
    ("olmo3", {}),
    ("olmo3", {**LAYERS, "sliding_window": 8}),
    ("exaone4", {}),
    ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("cohere2", {}),
    ("cohere2", {"sliding_window": 8, "sliding_window_pattern": 2}),
    ("cohere2", {**LAYERS, "sliding_window": 8}),
    ("smollm3", {}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0, 1, 0]}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 8, **LAYERS}),
    ("gemma2", {}),
    ("gemma2", {**LAYERS, "sliding_window": 5}),
    ("ministral3", {"sliding_window": 8}),
    ("gemma3_text", {}),
    ("gemma3_text", {"sliding_window_pattern": 2, "sliding_window": 5}),
    ("gemma3_text", {"sliding_window_pattern": 1}),
    ("gemma3_text", LAYERS),
]


@pytest.mark.parametrize(("family", "changes"), WINDOW_CASES)
def test_windows_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    """The window that each attention module has, or the config where all have the same."""
    raw = {**TINY, "model_type": family, "head_dim": 8, **changes}
    spec, config = spec_from_config(raw, "x"), AutoConfig.for_model(**json.loads(json.dumps(raw)))
    model = AutoModelForCausalLM.from_config(config)
    for layer in range(spec.num_layers):
        everywhere = config.sliding_window if family in ("mistral", "ministral3", "phi3", "mixtral") else None
        theirs = getattr(model.model.layers[layer].self_attn, "sliding_window", everywhere)
        attention = model.model.layers[layer].self_attn
        if family == "exaone4" and not attention.is_sliding:
            theirs = None
        assert spec.arch.window_of(layer) == theirs
        local = family in ("gemma3_text", "olmo3") and theirs is not None
        turned = getattr(attention, "use_rope", family not in ("cohere2", "exaone4") or theirs is not None)
        turned = turned or (family == "exaone4" and config.sliding_window is None)
        expected = (spec.arch.local_rotary if local else spec.arch.rotary) if turned else None
        assert spec.arch.rotary_of(layer) == expected
    again = spec_from_config(json.loads(config.to_json_string(use_diff=False)), "x")
    assert again.arch == spec.arch


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "x: quantization_config.bits is missing"),
        ("opt", {"quantization_config": {"quant_method": "aqlm"}}, "x: quantization_config.quant_method is 'aqlm'"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is 8"),
        ("llama", {"is_causal": False}, "is_causal is False"),
        ("gpt_oss", {"is_causal": False}, "is_causal is False"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ("llama", {"hidden_size": 33}, "hidden_size 33 is not a multiple of num_attention_heads 4"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads do not divide among 3 KV heads"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ("llama", {"head_dim": -8}, "head_dim is -8"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ("llama", {"attention_bias": 1}, "attention_bias is 1"),
        ("llama", {"intermediate_size": [1] * 100}, r"intermediate_size is \[1, 1, .*\.\.\. in config.json"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", LAYERS, "layer_types is .*the same for all layers"),
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, "layer_types is"),
        ("mistral", {**LAYERS, "sliding_window": None}, "sliding_window is missing"),
        ("qwen2", {**WINDOWS, "layer_types": ["full_attention"]}, "layer_types is .*a list of 3"),
        ("qwen2", {**WINDOWS, "layer_types": ["full_attention", "linear_attention", 1]}, "'linear_attention' in"),
        ("qwen2", LAYERS, "sliding_window is missing in .*a window in use, which layer 0 asks for"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers is -1"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ("ministral3", {**LAYERS, "sliding_window": 8}, "layer_types is .*the same for all layers"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("llava", {}, "x is of the family 'llava', which is not supported"),
        ("deepseek_v3", {}, "x is of the family 'deepseek_v3', which is not supported"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True"),
        ("ernie4_5_moe", {"moe_k": 65}, "moe_k is 65"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*a list of 3"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias is True"),
        ("dots1", {**ROUTED, "n_group": 3}, "n_routed_experts 4 is not a multiple of n_group 3"),
        ("dots1", {**ROUTED, "n_group": 2, "topk_group": 3}, "topk_group is 3"),
        ("dots1", {**ROUTED, "n_group": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("cohere2", {"sliding_window": None}, "sliding_window is missing"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*a list of 3 numbers"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers is .*a list of 3 numbers"),
        ("smollm3", {**LAYERS, "sliding_window": 8}, "sliding_window is .*a window in use, which layer 0 asks for"),
        ("olmoe", {"clip_qkv": 0.0}, "clip_qkv is 0.0"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9 in config.json. needed at most"),
    ],
)
def test_what_is_not_done_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        spec_from_config({**TINY, "model_type": family, **changes}, "x")
    assert caught.value.exit_code == 4


JUNK = [0, -1, 1, 2, 3, 7, 10**400, 1e-300, 1e300, float("nan"), "", "x", True, False, [], [1], {}, {"a": 1}, None]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_junk_is_a_model_error(data: st.DataObject) -> None:
    """Whatever stands under some of the keys, even inside the rotary fields, no other exception comes out."""
    family = data.draw(st.sampled_from(FAMILIES.names()))
    config: dict[str, Any] = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    rope = {"rope_type": data.draw(st.sampled_from(sorted(KINDS))), "factor": 4.0, "rope_theta": 1e4}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}
    if data.draw(st.booleans()):
        config["rope_scaling"] = rope
    for target in (config, rope):
        for key in data.draw(st.lists(st.sampled_from(sorted(target)), max_size=3)):
            if key != "model_type":
                target[key] = data.draw(st.sampled_from(JUNK))
    with contextlib.suppress(ModelError):
        assert spec_from_config(config, "x").max_positions > 0


def test_harmless_keys_are_left_alone() -> None:
    raw = {**TINY, "model_type": "llama"}
    harmless = {"pretraining_tp": 2, "attention_dropout": 0.1, "quantization_config": None, "num_experts": 0}
    assert spec_from_config({**raw, **harmless}, "x") == spec_from_config(raw, "x")


def test_special_tokens() -> None:
    raw = {**TINY, "model_type": "qwen2", "bos_token_id": None, "eos_token_id": [7, 8]}
    spec = spec_from_config(raw, "x")
    assert (spec.bos_token_id, spec.eos_token_id) == (7, (7, 8))


def test_every_family_has_a_variant() -> None:
    assert {variant.partition("-")[0] for variant in VARIANTS} == set(FAMILIES.names()) - {"opt"}
