"""GGUF files of tiny models, written by the `gguf` package as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_gguf_pytorch_utils
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.tiny import make_model

gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)  # transformers asks for it module by module
Kind = gguf.GGMLQuantizationType

SIZES: dict[str, Any] = {"intermediate_size": 64, "hidden_size": 64}
"""What rows of blocks of 32 need. GGUF keeps nothing of what the other settings of a row in tests/tiny.py change."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa": ("llama-gqa", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": False}),
    "phi3": ("phi3", {}),
    "gemma3": (
        "gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.5}),
    "mistral3": ("ministral3", {"head_dim": 16}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "no_rope_layers": None}),
    "olmo2": ("olmo2", {}),
    "seed_oss": ("seed-oss", {"head_dim": 16}),
    "exaone4": ("exaone4", {}),
    "exaone4-full": ("exaone4-full", {}),
    "olmo3": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "cohere2": (
        "cohere2",
        {"num_hidden_layers": 5, "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]},
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "gptneox": ("gpt-neox", {}),
    "gptneox-serial": ("gpt-neox-serial", {}),
}
"""Models that are made: a row of tests/tiny.py, and what is changed."""
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {"clip_qkv": None}),  # GGUF has no key for it
    "qwen2moe": ("qwen2-moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "qwen3moe": ("qwen3-moe", {"moe_intermediate_size": 32, "mlp_only_layers": []}),
    "granitemoe": ("granite-moe", {}),
    "gpt-oss": ("gpt-oss", {"head_dim": 16, "swiglu_limit": 7.0}),
    "glm4moe": ("glm4-moe", {"head_dim": 16, "moe_intermediate_size": 32}),
    "dots1": ("dots1", {"moe_intermediate_size": 32, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ernie4_5-moe": ("ernie4.5-moe", {"moe_intermediate_size": 32}),
    "minimax-m2": ("minimax-m2", {"head_dim": 16}),
}
"""The same of models with experts, which transformers does not read from GGUF, or only in part."""

_NEOX = {
    "embed_in": "token_embd", "final_layer_norm": "output_norm", "lm_head": "output", "embed_out": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip


def tiny_model(row: str) -> PreTrainedModel:
    name, changes = {**ROWS, **MIXTURES}[row]
    return make_model(name, **{**SIZES, **changes})


def architecture_of(model: PreTrainedModel) -> str:
    others = {"seed_oss": "seed_oss", "gemma3_text": "gemma3", "gpt_neox": "gptneox", "mixtral": "llama"}
    others |= {"gpt_oss": "gpt-oss", "olmo3": "olmo2", "ernie4_5_moe": "ernie4_5-moe", "minimax_m2": "minimax-m2"}
    others |= {"ministral3": "mistral3"}
    return others.get(model.config.model_type, model.config.model_type.replace("_", ""))


def stored_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The weights as GGUF has them: q and k of Llama with halves that take turns, 1 added to Gemma's norms, q, k and v
    of GPT-NeoX one after another."""
    architecture, config = architecture_of(model), model.config
    found: dict[str, np.ndarray] = {}
    for name, parameter in _one_by_one(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, stored = parameter.float().numpy(), _stored_name(architecture, config.num_hidden_layers, name)
        if architecture in ("llama", "granite", "granitemoe", "smollm3", "mistral3") and re.search(
            r"attn_[qk]\.", stored
        ):
            heads = config.num_attention_heads if "attn_q." in stored else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture in ("gemma2", "gemma3") and stored.endswith("norm.weight"):
            values = values + 1
        if architecture == "gptneox" and "attn_qkv" in stored:
            heads = config.num_attention_heads
            values = values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        found[stored] = np.ascontiguousarray(values.squeeze() if "exp_probs" in stored else values)
    return found


def _one_by_one(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Gates and ups of experts apart, as GGUF has them."""
    for name, tensor in model.state_dict().items():
        if model.config.model_type == "gpt_oss" and ".experts." in name:
            stem, part = name.rsplit(".", 1)
            ending, values = (".bias", tensor) if part.endswith("_bias") else (".weight", tensor.transpose(1, 2))
            if part.startswith("gate_up"):
                yield f"{stem}.gate_proj{ending}", values[:, ::2]
                yield f"{stem}.up_proj{ending}", values[:, 1::2]
            else:
                yield f"{stem}.down_proj{ending}", values
        elif name.endswith("experts.gate_up_proj"):
            for part, values in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}", values
        else:
            yield name, tensor


def _stored_name(architecture: str, layers: int, name: str) -> str:
    expert = re.fullmatch(r"model\.layers\.(\d+)\..*\.experts\.(gate|up|down)_proj(\.weight|\.bias|)", name)
    if expert:
        return f"blk.{expert[1]}.ffn_{expert[2]}_exps{expert[3] or '.weight'}"
    router = re.fullmatch(r"model\.layers\.(\d+)\..*\.(gate|router)\.(weight|bias)", name)
    if router:
        return f"blk.{router[1]}.ffn_gate_inp.{router[3]}"
    if name.endswith(".sinks"):
        name += ".weight"
    if name.endswith("correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    name, _, suffix = name.rpartition(".")
    if architecture == "gptneox":
        inner = re.fullmatch(r"gpt_neox\.layers\.(\d+)\.(.+)", name)
        if inner:
            return f"blk.{inner[1]}.{_NEOX[inner[2]]}.{suffix}"
        return f"{_NEOX[name.removeprefix('gpt_neox.')]}.{suffix}"
    known = next(arch for arch, word in gguf.MODEL_ARCH_NAMES.items() if word == architecture)
    stored = gguf.get_tensor_name_map(known, layers).get_name(name)
    assert stored is not None, name
    return f"{stored}.{suffix}"


def model_keys(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """The keys that say what the model's shape is."""
    config, architecture = model.config, architecture_of(model)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(1)
    if architecture == "gptneox":
        writer.add_rope_dimension_count(int(config.hidden_size // config.num_attention_heads * _turned(config)))
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(config.use_parallel_residual)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("full_attention", rope)["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.get("full_attention", rope)["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("full_attention", rope)["original_max_position_embeddings"])
    if getattr(config, "num_experts_per_tok", None):
        _expert_keys(writer, config, architecture)
    windowed = getattr(config, "sliding_window", None) is not None
    if windowed and architecture in ("gemma2", "gemma3", "exaone4", "gpt-oss", "olmo2", "cohere2"):
        writer.add_sliding_window(config.sliding_window)
    if windowed and architecture == "olmo2":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if windowed and architecture in ("exaone4", "olmo2"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if architecture.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _expert_keys(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    writer.add_expert_count(next(getattr(config, name) for name in counts if hasattr(config, name)))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture in ("glm4moe", "dots1"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "ernie4_5-moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if architecture == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture.startswith("qwen"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _turned(config: Any) -> float:
    return float(config.rope_parameters.get("partial_rotary_factor", 1.0))


Blocks = Callable[[str, np.ndarray], tuple[np.ndarray, Kind]]
"""Of a matrix, by its name: its bytes, and what they are."""


def in_kind(kind: Kind) -> Blocks:
    """All matrices in one kind, rounded as the package does it."""
    return lambda name, values: (values if kind == Kind.F32 else gguf.quants.quantize(values, kind), kind)


FLOATS = in_kind(Kind.F32)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    blocks: Blocks = FLOATS,
    *,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """The model as a GGUF file. Lists of numbers are in F32, as they are everywhere.

    `extra` adds keys, `tensors` tensors.
    """
    writer = gguf.GGUFWriter(str(path), architecture_of(model))
    writer.add_name("tiny")
    model_keys(writer, model)
    extra(writer)
    for name, values in {**stored_tensors(model), **(tensors or {})}.items():
        plain = values.ndim == 1 or name.endswith(".bias")
        data, kind = (values.astype(np.float32), Kind.F32) if plain else blocks(name, values)
        writer.add_tensor(name, data, raw_dtype=None if kind == Kind.F32 else kind)
    return written(writer, path)


def written(writer: gguf.GGUFWriter, path: Path) -> Path:
    """The file with all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def by_transformers(path: Path) -> PreTrainedModel:
    """The model that transformers makes of the file: dequantised, in float32."""
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    if config.model_type == "gemma3_text":  # GGUF has no word for it, and transformers takes that of the large ones
        config.query_pre_attn_scalar = config.head_dim
    if config.model_type == "gemma2":  # and leaves out what is said here
        config.query_pre_attn_scalar = config.head_dim
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            setattr(config, key, float(gguf.GGUFReader(path).fields[f"gemma2.{key}"].contents()))
    with no_init_weights():  # all are read
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing
    model.tie_weights()
    return model.eval().to(torch.float32)


@contextmanager
def read_once(path: Path) -> Iterator[gguf.GGUFReader]:
    """The gguf package takes long to read many words, from a file mapped to memory above all: within, it reads them
    once, for everybody."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8))
        made = gguf.GGUFReader(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda path: made)
        yield made


def large_by_transformers(path: Path) -> PreTrainedModel:
    """As by_transformers, which would make texts of all words, twice."""
    parse = modeling_gguf_pytorch_utils._gguf_parse_value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            modeling_gguf_pytorch_utils,
            "_gguf_parse_value",
            lambda value, kinds: parse(value, kinds) if len(kinds) == 1 else 0,
        )
        return by_transformers(path)
