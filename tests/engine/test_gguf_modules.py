"""GGUF files of architectures that transformers' modules compute: tokens are those of the model that was written."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from tests.checkpoint.gguf_files import FLOATS, Blocks, Kind, in_kind, written
from tests.engine.test_gguf import NEW, check

_THETA = {"rope_type": "default", "rope_theta": 2000.0}
_TIMES = {"attention_in_multiplier": 0.7, "attention_out_multiplier": 1.4, "key_multiplier": 0.6}
_TIMES |= {"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8, "embedding_multiplier": 1.5, "lm_head_multiplier": 0.6}
_SCALES = {"attention_multiplier": 0.3, "embedding_multiplier": 1.5, "residual_multiplier": 0.7, "logits_scaling": 2.0}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "starcoder2": ("starcoder2", {"rope_parameters": _THETA, "sliding_window": None}),
    "stablelm": ("stablelm", {"rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}, "use_qkv_bias": True}),
    "stablelm-12b": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm-whole": ("stablelm", {"rope_parameters": {**_THETA, "partial_rotary_factor": 1.0}}),
    "phi2": ("phi", {"rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}, "tie_word_embeddings": False}),
    "nemotron": ("nemotron", {"rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}}),
    "gemma": ("gemma", {"rope_parameters": _THETA}),
    "olmo": ("olmo", {"clip_qkv": 0.9}),
    "arcee": ("arcee", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                            "original_max_position_embeddings": 32}}),
    "command-r": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "lfm2": ("lfm2", {}),
    "mamba": ("mamba", {}),
    "falcon-mamba": ("falcon_mamba", {}),
    "falcon-h1": ("falcon_h1", {**_TIMES, "mlp_multipliers": [0.7, 1.2], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
                                "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "granitehybrid": ("granitemoehybrid", _SCALES),
    "granitehybrid-dense": ("granitemoehybrid", _SCALES),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    "nemotron_h_moe": ("nemotron_h", {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
                                      "routed_scaling_factor": 1.5}),
    "nemotron_h_moe-latent": ("nemotron_h", {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
                                             "moe_latent_size": 32}),
    "deepseek2": ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                  "original_max_position_embeddings": 32, "mscale": 0.8, "mscale_all_dim": 0.8}}),
    "deepseek2-old": ("deepseek_v2", {"rope_parameters": _THETA, "q_lora_rank": None}),
    "lfm2moe": ("lfm2_moe", {"routed_scaling_factor": 1.5}),
    "qwen3next": ("qwen3_next", {"rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}}),
    "qwen35": ("qwen3_5_text", {"rope_parameters": {**_THETA, "partial_rotary_factor": 1.0}}),
    "qwen35moe": ("qwen3_5_moe_text", {"rope_parameters": {**_THETA, "partial_rotary_factor": 0.5}}),
}  # fmt: skip
"""Of each architecture the type in transformers, and what is said besides sizes."""
READ = ("gpt2", "starcoder2", "stablelm", "nemotron", "lfm2", "mamba")
"""What transformers reads, too."""
HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
UNROTATED = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
PERMUTED, ADDED = ("olmo", "arcee", *UNROTATED), ("gemma", "nemotron", *HYBRIDS)


def stored(row: str, model: PreTrainedModel, name: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor as llama.cpp's converter has it."""
    config = model.config
    if row == "gpt2" and re.search(r"\.c_\w+\.weight$", name):
        return x.T
    if "conv" in name and x.dim() == 3:
        x = x.squeeze(1)
    if row.startswith(UNROTATED) and name.endswith(("A_log", ".D")):
        x = x[:, None]
    if row.startswith(UNROTATED) and name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        x = x.view(config.mamba_n_groups if row.startswith("granite") else config.n_groups, -1)
    if row in PERMUTED and (found := re.search(r"\.([qk])_proj\.weight$", name)):
        heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
        x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
    if name.endswith("A_log"):
        x = -x.exp()
    if row in ADDED and name.endswith(("norm.weight", "layernorm.weight")) and "linear_attn" not in name:
        x = x + 1
    return multiplied(config, name, x) if row == "falcon-h1" else x


def multiplied(config: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor of Falcon-H1, with the config's factors in it."""
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    rows = torch.tensor([inner, inner, state, state, config.mamba_n_heads])
    parts = torch.tensor(config.ssm_multipliers).repeat_interleave(rows)[:, None]
    factors = {
        "feed_forward.down_proj": config.mlp_multipliers[1],
        "feed_forward.gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "mamba.in_proj": config.ssm_in_multiplier * parts,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if name.endswith("mamba.norm.weight"):
        x = x.view(config.mamba_n_groups, -1)
    if name.endswith(("A_log", ".D")):
        x = x[:, None]
    return x * next((factor for part, factor in factors.items() if f"{part}.weight" in name), 1.0)


def tiled(config: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor of Qwen 3.5's mixers: of value heads that share a key, each first one comes before each second."""
    groups, heads, keys = config.linear_num_key_heads, config.linear_num_value_heads, 0
    if "in_proj_qkv." in name or "conv1d" in name:
        keys = 2 * groups * config.linear_key_head_dim
    dim, size = int("out_proj" in name), x.shape[int("out_proj" in name)] - keys
    kept, moved = x.split([keys, size], dim)
    moved = moved.unflatten(dim, (groups, heads // groups, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat([kept, moved], dim)


def parts(row: str, model: PreTrainedModel, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor as llama.cpp's converter has it, in several where it makes several of one, by names for its table."""
    config, x = model.config, stored(row, model, name, x)
    if row.startswith("qwen35") and "linear_attn" in name and ".norm." not in name:
        x = tiled(config, name, x)
    if name.endswith("experts.gate_up_proj"):
        return {name.replace("gate_up", part): each for part, each in zip(("gate", "up"), x.chunk(2, 1), strict=True)}
    if "shared_mlp" in name and not config.num_local_experts:  # the only one, then
        name = name.replace("shared_mlp", "mlp").replace("output_linear", "down_proj")
    if "mlp.input_linear" in name:
        stem = name.replace("shared_mlp", "mlp.shared_mlp")
        return {
            stem.replace("input_linear", part): each
            for part, each in zip(("gate_proj", "up_proj"), x.chunk(2), strict=True)
        }
    if row == "deepseek2" and "kv_b_proj" in name:
        keys, values = x.unflatten(0, (config.num_attention_heads, -1)).split(
            [config.qk_nope_head_dim, config.v_head_dim], 1
        )
        return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    if "in_proj_qkvz" in name:
        key, groups = config.linear_key_head_dim, config.linear_num_key_heads
        own = config.linear_num_value_heads // groups * config.linear_value_head_dim
        *qkv, gates = x.unflatten(0, (groups, -1)).split([key, key, own, own], 1)
        joint = torch.cat([each.flatten(0, 1) for each in qkv])
        return {name.replace("qkvz", "qkv"): joint, name.replace("qkvz", "z"): gates.flatten(0, 1)}
    return {name: x}


def write(path: Path, row: str, model: PreTrainedModel, blocks: Blocks = FLOATS) -> Path:
    word = {"falcon-mamba": "mamba", "deepseek2-old": "deepseek2"}.get(row, row)
    word = "stablelm" if row.startswith("stablelm") else word
    word = word.partition("-")[0] if row.startswith(UNROTATED) else word
    writer, config = gguf.GGUFWriter(str(path), word), model.config
    known = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == word)
    names, lists = gguf.get_tensor_name_map(known, config.num_hidden_layers), dict[str, list[np.ndarray]]()
    keys(writer, word, config, row.endswith("-old"))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, values in parts(row, model, name, tensor.float()).items():
            plain = re.sub(r"\.norms\.\d+", "", part.replace(".dt_bias", ".dt_proj.bias"))
            expert = re.search(r"(\d+)\.\w+\.experts\.(gate|up|down)_proj", plain)
            plain = plain.replace("correction_bias", "correction.bias").replace("expert_bias", "expert_bias.bias")
            if word.startswith("nemotron_h"):
                plain = plain.replace("model.", "backbone.")
            plain = plain.replace("moe.router.weight", "moe.router.layer.weight")
            found = names.get_name(plain, try_suffixes=(".weight", ".bias"))
            found = f"blk.{expert[1]}.ffn_{expert[2]}_exps.weight" if expert else found
            assert found is not None, part
            lists.setdefault(found, []).append(values.contiguous().numpy())
    for name, values in lists.items():
        whole = values[0] if len(values) == 1 else np.stack(values)
        matrix = whole.ndim > 1 and not re.search("norm|conv|ssm_[ad]|gate_inp", name) and whole.shape[-1] % 32 == 0
        data, kind = blocks(name, whole) if matrix else (whole, Kind.F32)
        writer.add_tensor(name, data, raw_dtype=None if kind == Kind.F32 else kind)
    return written(writer, path)


def keys(writer: gguf.GGUFWriter, word: str, config: Any, old: bool = False) -> None:
    heads, hidden, mamba = config.num_attention_heads if word != "mamba" else 0, config.hidden_size, word == "mamba"
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(1 << 20 if mamba else config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    if word.startswith("nemotron_h"):
        sizes = {"moe": config.moe_intermediate_size, "mlp": config.intermediate_size}
        writer.add_feed_forward_length([sizes.get(kind, 0) for kind in config.layer_types])
    elif word != "qwen35moe":  # it has no dense layer
        writer.add_feed_forward_length(0 if mamba else config.n_inner if word == "gpt2" else config.intermediate_size)
    writer.add_head_count(heads)
    rms = word in ("gemma", "arcee", "lfm2", "lfm2moe", "mamba", "falcon-h1", "deepseek2", *HYBRIDS, *UNROTATED)
    eps = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    found = next((getattr(config, name) for name in eps if hasattr(config, name)), 1e-5)
    (writer.add_layer_norm_rms_eps if rms and word != "nemotron_h_moe" else writer.add_layer_norm_eps)(found)
    if word == "nemotron":  # as newer files have it
        writer.add_layer_norm_rms_eps(found)
    if word in UNROTATED:
        return unrotated(writer, word, config)
    rope = getattr(config, "rope_parameters", None)
    if rope:
        dim = getattr(config, "head_dim", None) or hidden // heads
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if word != "deepseek2" and (dim * heads != hidden or word in ("gemma", "falcon-h1", "nemotron")):
            writer.add_key_length(dim)
            writer.add_value_length(dim)
        count = config.num_key_value_heads
        kinds = getattr(config, "layer_types", None) if word.startswith("lfm2") else None
        if word == "deepseek2":
            count = latents(writer, config, old)
        writer.add_head_count_kv([count if kind != "conv" else 0 for kind in kinds] if kinds else count)
    if getattr(config, "num_experts_per_tok", None):
        experts(writer, word, config, old)
    if word in HYBRIDS:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        if word == "qwen35moe":  # as newer files have it
            writer.add_array(f"{word}.attention.recurrent_layers", [True, False, True, False])
        else:
            writer.add_full_attention_interval(2)
    if word in ("qwen35", "qwen35moe"):
        writer.add_rope_dimension_sections([2, 1, 1, 0])
    if word == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if word == "olmo":
        writer.add_clamp_kqv(config.clip_qkv)
    if word == "command-r":
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if word.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if mamba:
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_inner_size(config.intermediate_size)
        writer.add_ssm_state_size(config.state_size)
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")
    if word == "falcon-h1":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_d_ssm)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_group_count(config.mamba_n_groups)


def unrotated(writer: gguf.GGUFWriter, word: str, config: Any) -> None:
    """The keys of hybrids with the second Mamba and attention without positions."""
    granite = word == "granitehybrid"
    heads = config.mamba_n_heads if granite else config.mamba_num_heads
    inner = heads * (config.mamba_d_head if granite else config.mamba_head_dim)
    if not granite:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    kinds = config.layer_types
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.mamba_d_conv if granite else config.conv_kernel)
    writer.add_ssm_state_size(config.mamba_d_state if granite else config.ssm_state_size)
    writer.add_ssm_group_count(config.mamba_n_groups if granite else config.n_groups)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)
    if (granite and config.num_local_experts) or word.endswith("moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if word.endswith("moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)


def latents(writer: gguf.GGUFWriter, config: Any, old: bool) -> int:
    """The keys of latent attention; gives the number of KV heads, which newer files say is that of the latents."""
    rank, turned, nope = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(nope + turned if old else rank + turned)
    writer.add_value_length(config.v_head_dim if old else rank)
    if not old:
        writer.add_key_length_mla(nope + turned)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    return int(config.num_attention_heads) if old else 1


def experts(writer: gguf.GGUFWriter, word: str, config: Any, old: bool) -> None:
    writer.add_expert_count(getattr(config, "n_routed_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if word in HYBRIDS:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        return
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 0) or config.num_dense_layers)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if not old:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if word == "deepseek2":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(not old and config.norm_topk_prob)
    if word == "deepseek2" and not old:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def made(row: str) -> PreTrainedModel:
    kind, changes = ROWS[row]
    config = shrunk({"model_type": kind, **changes})
    if kind == "gpt2":
        config.n_inner = 96
    if kind == "lfm2":
        config.block_auto_adjust_ff_dim = False
    if row == "granitehybrid-dense":
        config.num_local_experts, config.shared_intermediate_size = 0, config.intermediate_size
    if "mamba" in kind:
        config.intermediate_size = config.expand * config.hidden_size
    if row == "deepseek2":  # whole blocks
        config.kv_lora_rank, config.qk_nope_head_dim, config.qk_head_dim = 32, 32, 40
    model = random_model(config)
    with torch.no_grad():  # else none of them would tell an order or a shift
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", ".D")) or "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(torch.linspace(0.2, -0.2, len(buffer)))
    return model


def judged(row: str, model: PreTrainedModel) -> Any:
    """What tells a text's logits. In Nemotron-H transformers' own steps and its forward over all of it differ by up to
    0.003: there by steps, as in its `generate`."""

    def by_steps(ids: torch.Tensor) -> SimpleNamespace:
        found = [model(ids[:, :-NEW], use_cache=True)]
        cache = "cache" if "cache" in found[0] else "past_key_values"
        for at in range(ids.shape[1] - NEW, ids.shape[1]):
            found.append(model(ids[:, at : at + 1], use_cache=True, **{cache: found[-1][cache]}))
        return SimpleNamespace(logits=torch.cat([each.logits for each in found], 1))

    return by_steps if row.startswith("nemotron_h") else model


@pytest.mark.parametrize(
    "row", [row if row == "falcon-h1" else pytest.param(row, marks=pytest.mark.slow) for row in ROWS]
)
def test_tokens_are_those_of_the_model_that_was_written(row: str, tmp_path: Path) -> None:
    model = made(row)
    path = write(tmp_path / "tiny.gguf", row, model)
    llm = check(path, judged(row, model), "disk" if len(row) % 2 else "cpu")
    assert isinstance(llm.model.spec, ModuleSpec)
    if row not in READ:
        return
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert len(tensors) > 10
    for name, found in tensors.items():
        torch.testing.assert_close(found.float(), model.state_dict()[name], atol=1e-6, rtol=1e-5)


_EXPERTS = {"gate", "up", "down", "o_proj"}
PACKED = {
    "deepseek2": {*_EXPERTS, "q_b_proj"},
    "qwen35moe": {*_EXPERTS, "in_proj_qkv"},
    "granitehybrid": {*_EXPERTS, "input_linear", "output_linear", "in_proj"},
    "nemotron_h_moe": {"joint", "down", "o_proj", "in_proj"},
}
"""Some of what is packed."""


@pytest.mark.turns
@pytest.mark.parametrize("row", PACKED)
def test_blocks_of_mixtures_stay_packed(row: str, tmp_path: Path) -> None:
    """Matrices are of two numbers, which blocks of 8 bits have as they are, in whatever direction they lie."""
    model = made(row)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                parameter.copy_(parameter.sign() * 127 * 2.0**-10)
    llm = check(write(tmp_path / "tiny.gguf", row, model, in_kind(Kind.Q8_0)), judged(row, model), "disk")
    packed = {name.split(".")[-2] for name, _ in llm.model.spec.packings}
    assert packed >= PACKED[row]
    assert "kv_b_proj" not in packed  # keys lie on their side in it
    assert llm.last_record is not None
    assert llm.last_record.experts["count"] == 8
    with Engine(str(tmp_path / "tiny.gguf"), eviction=EvictionConfig("h2o", ratio=0.5)) as llm:
        assert len(llm.generate([[5, 9, 30, 7, 12, 3]], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("row", "kind"), [("starcoder2", "Q4_0"), ("stablelm", "Q8_0"), ("nemotron", "Q5_1")])
def test_blocks_stay_packed(row: str, kind: str, tmp_path: Path) -> None:
    """What matrices stand for is what transformers expands them to."""
    model = made(row)
    path = write(tmp_path / "tiny.gguf", row, model, in_kind(Kind[kind]))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    model.tie_weights()
    llm = check(path, model, "disk")
    assert llm.last_record is not None
    assert llm.last_record.quantization["weights"]["format"] == "gguf"
    with Engine(str(path), eviction=EvictionConfig("h2o", ratio=0.5)) as llm:
        assert len(llm.generate([[5, 9, 30, 7, 12, 3]], max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4


def test_another_implementation_and_another_architecture_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "olmo", made("olmo"))
    with pytest.raises(ModelError, match=r"GGUF file of olmo\. needed safetensors for --model-impl native"):
        Engine(str(path), model_impl="native")
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "plamo")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'plamo', which is not supported.* from its checkpoint in safetensors"):
        Engine(str(tmp_path / "other.gguf"))
