"""The config.json that a GGUF file's metadata stands for, of the families that are supported.

A key of the architecture that asks for something unknown is refused, never left out: the program may not quietly run a
different model.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from h2o_flexgen.checkpoint.gguf.architectures import (
    ARCHITECTURES,
    BIASES,
    EXPERT_SIZE,
    EXPERTS,
    GRANITE,
    LAYER_NORM,
    LOGIT_SCALE,
    QUERY_BIAS,
    ROOT_MEAN_SQUARE,
    SHARED_EXPERT,
    Architecture,
    Config,
    always,
    any_window,
    biased,
    head_size,
    heads_of,
    layers_of,
    numbers,
    positions_of,
    query_norm,
    routed,
)
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.header import GgufHeader
from h2o_flexgen.checkpoint.gguf.keys import GgufKeys
from h2o_flexgen.errors import ModelError

_SPECIAL = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}
_OTHER_FILES = {
    "mmproj": "the part of a model that reads pictures or sound (mmproj)",
    "adapter": "an adapter (LoRA), which is not read: merge it into its model",
    "imatrix": "a table of how much weights matter (imatrix)",
    "vocab": "a vocabulary without weights",
}
"""Values of `general.type` besides a model, and what such a file is."""


def _own_heads(keys: GgufKeys) -> Config:
    """Where the size of a head follows from the model's."""
    return _without_size(keys, heads_of(keys))


def _without_size(keys: GgufKeys, heads: Config) -> Config:
    """`heads` less their size, which follows from the model's."""
    if heads.pop("head_dim") * keys.whole("attention.head_count") != keys.whole("embedding_length"):
        raise keys.error("attention.key_length", "the model's size over its heads")
    return heads


def _gpt2(keys: GgufKeys) -> Config:
    keys.value("attention.head_count_kv")  # each has its own
    epsilon = keys.number("attention.layer_norm_epsilon")
    return {"n_inner": keys.whole("feed_forward_length"), "layer_norm_epsilon": epsilon}


def _stablelm(keys: GgufKeys) -> Config:
    parallel, tensors = keys.flag("use_parallel_residual", True), keys.header.tensors
    return {
        "use_parallel_residual": parallel and "blk.0.ffn_norm.weight" not in tensors,
        "use_qkv_bias": keys.biased("attn_q"),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in tensors,
    }


def _nemotron(keys: GgufKeys) -> Config:
    """Newer files have the number of its norms under both keys."""
    keys.value("attention.layer_norm_rms_epsilon")
    return {"norm_eps": keys.number("attention.layer_norm_epsilon")}


def _olmo(keys: GgufKeys) -> Config:
    """Its norms have no weights, and one number that is the same in all."""
    if abs(keys.number("attention.layer_norm_epsilon", 1e-5) - 1e-5) > 1e-9:
        raise keys.error("attention.layer_norm_epsilon", "1e-05")
    clip = keys.number("attention.clamp_kqv") if keys.value("attention.clamp_kqv") else None
    return {"clip_qkv": clip}


def _lfm2_moe(keys: GgufKeys) -> Config:
    found = routed(keys, 2)
    return {
        "num_dense_layers": found["first_k_dense_replace"],
        "routed_scaling_factor": found["routed_scaling_factor"],
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
    }


def _attending(keys: GgufKeys) -> tuple[int, list[bool]]:
    """The KV heads of the layers that attend, and which layers these are."""
    counts, layers = keys.value("attention.head_count_kv"), keys.whole("block_count")
    found = {int(count) for count in counts if count > 0} if isinstance(counts, np.ndarray) else set()
    if len(found) != 1 or len(counts) != layers:
        raise keys.error("attention.head_count_kv", f"one number of KV heads, or 0, for each of {layers} layers")
    return found.pop(), [bool(count > 0) for count in counts]


def _convolved(keys: GgufKeys) -> Config:
    """The layers without KV heads are convolutions."""
    (kv_heads, attend), hidden = _attending(keys), keys.whole("embedding_length")
    return {
        "num_key_value_heads": kv_heads,
        **positions_of(keys, max(1, hidden // keys.whole("attention.head_count"))),
        "layer_types": ["full_attention" if each else "conv" for each in attend],
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.whole("shortconv.l_cache"),
        "conv_bias": keys.biased("shortconv.conv"),
    }


_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Of DeepSeek's experts, by their number: how many groups they are in, and how many of these a token chooses from.
Files from before there was a key for it do not say."""


def _deepseek2(keys: GgufKeys) -> Config:
    """Latent attention, and experts: DeepSeek V2, whose router takes a softmax, and V3 and others with a sigmoid.

    Newer files have what keys and values are made of by head, and name the sizes of the latents as those of a head.
    """
    heads, turned = keys.whole("attention.head_count"), keys.whole("rope.dimension_count")
    rank, by_head = keys.whole("attention.kv_lora_rank"), keys.value("attention.key_length_mla") is not None
    sizes = {"attention.head_count_kv": 1 if by_head else heads}
    sizes |= {"attention.key_length": rank + turned, "attention.value_length": rank} if by_head else {}
    for name, size in sizes.items():
        if keys.whole(name, size) != size:
            raise keys.error(name, str(size))
    key, value = (keys.whole(f"attention.{part}_length{'_mla' * by_head}") for part in ("key", "value"))
    if key <= turned:
        raise keys.error("rope.dimension_count", f"less than the {key} of a key")
    softmax = keys.whole("expert_gating_func", 1) == 1
    experts, norms = routed(keys, 1 if softmax else 2), keys.flag("expert_weights_norm", False)
    if keys.value("expert_group_count") is None:
        experts["n_group"], experts["topk_group"] = _GROUPS.get(experts["n_routed_experts"], (1, 1))
    if softmax and norms:
        raise keys.error("expert_weights_norm", "false where expert_gating_func is 1, a softmax")
    grouped = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    rope = positions_of(keys, turned)
    scaling = rope["rope_scaling"] or {}
    if scaling.get("rope_type") == "yarn":  # by which both cosines and logits grow, so that the first grow by nothing
        share = round(keys.number("rope.scaling.yarn_log_multiplier") / 0.1, 6)
        scaling |= {"mscale": share, "mscale_all_dim": share}
    return {
        "model_type": "deepseek_v2" if softmax else "deepseek_v3",
        **({"topk_method": grouped} if softmax else {"norm_topk_prob": norms}),
        "num_hidden_layers": layers_of(keys),
        "num_key_value_heads": heads,
        "q_lora_rank": keys.count("attention.q_lora_rank") or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
        **rope,
        "num_nextn_predict_layers": 0,
        **experts,
    }


def _qwen35(keys: GgufKeys) -> Config:
    """Qwen 3.5 and 3.6. Value heads that share a key are not neighbours in these files: here each has a key of its own,
    see `names`, which is the same model. Positions have three parts, which are one in texts."""
    keys.value("rope.dimension_sections")
    config = {**_delta(keys), "linear_num_key_heads": keys.whole("ssm.time_step_rank")}
    if keys.value("expert_count"):
        experts = {**EXPERTS(keys), **EXPERT_SIZE(keys), **SHARED_EXPERT(keys)}
        return {"model_type": "qwen3_5_moe_text", **config, **experts}
    return config


def _delta(keys: GgufKeys) -> Config:
    """Hybrids of Qwen: gated delta rules, attention in every n-th layer."""
    config, values = heads_of(keys), keys.whole("ssm.time_step_rank")
    if values % keys.whole("ssm.group_count") or keys.whole("ssm.inner_size") % values:
        raise keys.error("ssm.time_step_rank", "a multiple of ssm.group_count by which ssm.inner_size can be divided")
    layers, every = layers_of(keys), keys.whole("full_attention_interval", 4)
    attend = [(i + 1) % every == 0 for i in range(layers)]
    recurrent = keys.value("attention.recurrent_layers")  # newer files say it of each layer
    if recurrent is not None:
        if not isinstance(recurrent, np.ndarray) or recurrent.dtype != bool or len(recurrent) < layers:
            raise keys.error("attention.recurrent_layers", f"true or false for each of {layers} layers")
        attend = (~recurrent).tolist()[:layers]
    return {
        **config,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if each else "linear_attention" for each in attend],
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        "linear_value_head_dim": keys.whole("ssm.inner_size") // values,
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": values,
    }


def _expansion(keys: GgufKeys) -> int:
    """How many times as wide as the model a mixer is."""
    inner, hidden = keys.whole("ssm.inner_size"), keys.whole("embedding_length")
    if inner % hidden:
        raise keys.error("ssm.inner_size", f"a multiple of {hidden}")
    return inner // hidden


def _mamba(keys: GgufKeys) -> Config:
    return {
        **({"model_type": "falcon_mamba"} if keys.flag("ssm.dt_b_c_rms", False) else {}),
        "expand": _expansion(keys),
        "intermediate_size": keys.whole("ssm.inner_size"),
        "conv_kernel": keys.whole("ssm.conv_kernel"),
        "state_size": keys.whole("ssm.state_size"),
        "time_step_rank": keys.whole("ssm.time_step_rank"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "use_bias": keys.biased("ssm_in"),
        "use_conv_bias": keys.biased("ssm_conv1d"),
    }


def _second_mamba(keys: GgufKeys) -> Config:
    inner, heads = keys.whole("ssm.inner_size"), keys.whole("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_d_conv": keys.whole("ssm.conv_kernel"),
        "mamba_d_state": keys.whole("ssm.state_size"),
        "mamba_n_groups": keys.whole("ssm.group_count", 1),
        "mamba_conv_bias": keys.biased("ssm_conv1d"),
        "mamba_proj_bias": keys.biased("ssm_in"),
    }


def _falcon_h1(keys: GgufKeys) -> Config:
    """The factors by which its config multiplies products are in the weights already."""
    ones = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out", "lm_head", "embedding")
    return {
        **_second_mamba(keys),
        "mamba_d_ssm": keys.whole("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in keys.header.tensors,
        "mamba_norm_before_gate": False,
        **{f"{part}_multiplier": 1.0 for part in ones},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


def _without_positions(keys: GgufKeys) -> tuple[Config, list[bool]]:
    """Of a hybrid whose queries and keys are not rotated: its heads, and which layers attend."""
    for key in ("rope.dimension_count", "rope.freq_base"):  # there all the same
        keys.value(key)
    if keys.flag("rope.scaling.finetuned", True):
        raise keys.error("rope.scaling.finetuned", "false: a model without rotary positions")
    kv_heads, attend = _attending(keys)
    return {"num_key_value_heads": kv_heads, "head_dim": head_size(keys)}, attend


def _granite_hybrid(keys: GgufKeys) -> Config:
    """Granite 4: the MLP of all layers is the shared expert's, where there are others beside it or not."""
    expansion, (heads, attend) = _expansion(keys), _without_positions(keys)
    return {
        **_without_size(keys, heads),
        **_second_mamba(keys),
        "mamba_expand": expansion,
        "layer_types": ["attention" if each else "mamba" for each in attend],
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "shared_intermediate_size": keys.whole("expert_shared_feed_forward_length", keys.whole("feed_forward_length")),
    }


def _nemotron_h(keys: GgufKeys) -> Config:
    """Each layer is one of three: a mixer, attention, or an MLP, all of which are mixtures or none."""
    config, attend = _without_positions(keys)
    sizes, experts = keys.value("feed_forward_length"), keys.count("expert_count")
    found = {int(size) for size in sizes if size > 0} if isinstance(sizes, np.ndarray) else set()
    if len(found) != 1 or len(sizes) != len(attend):
        raise keys.error("feed_forward_length", f"one size, or 0, for each of {len(attend)} layers")
    kinds = zip(attend, sizes > 0, strict=True)
    epsilon = keys.value("attention.layer_norm_epsilon")  # of norms of another kind, and of all without the next key
    mamba = _second_mamba(keys)
    config |= {
        "intermediate_size": found.pop(),
        "hybrid_override_pattern": "".join("*" if a else ("E" if experts else "-") if m else "M" for a, m in kinds),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon", epsilon),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
    }
    if not experts:
        return config
    return {
        **config,
        **routed(keys, 2),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "moe_shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.count("moe_latent_size") or None,
    }


_QWEN = {"ffn_norm": "post_attention_norm"}
_NORM_EPSILON = numbers(norm_epsilon="attention.layer_norm_epsilon")
_QWEN35 = Architecture("qwen3_5_text", (_qwen35, ROOT_MEAN_SQUARE), names=_QWEN, offset=1.0)
_NEMOTRON_H = Architecture("nemotron_h", (_nemotron_h,))
MODULES = {
    "gpt2": Architecture("gpt2", (_gpt2,)),
    "starcoder2": Architecture("starcoder2", (_own_heads, _NORM_EPSILON, biased(use_bias="attn_q"), any_window)),
    "stablelm": Architecture("stablelm", (_own_heads, LAYER_NORM, _stablelm)),
    "phi2": Architecture("phi", (_own_heads, LAYER_NORM, always(tie_word_embeddings=False))),
    "nemotron": Architecture("nemotron", (heads_of, BIASES, _nemotron), offset=1.0),
    "gemma": Architecture("gemma", (heads_of, ROOT_MEAN_SQUARE), offset=1.0),
    "olmo": Architecture("olmo", (_own_heads, _olmo), "all"),
    "arcee": Architecture("arcee", (heads_of, BIASES, ROOT_MEAN_SQUARE), "all"),
    "command-r": Architecture("cohere", (_own_heads, LAYER_NORM, LOGIT_SCALE, QUERY_BIAS, query_norm)),
    "lfm2": Architecture("lfm2", (_convolved, always(block_auto_adjust_ff_dim=False))),
    "lfm2moe": Architecture("lfm2_moe", (_convolved, EXPERTS, EXPERT_SIZE, _lfm2_moe)),
    "deepseek2": Architecture("deepseek_v3", (_deepseek2, ROOT_MEAN_SQUARE)),
    "qwen3next": Architecture(
        "qwen3_next",
        (_delta, ROOT_MEAN_SQUARE, EXPERTS, EXPERT_SIZE, SHARED_EXPERT, always(norm_topk_prob=True)),
        names=_QWEN,
        offset=1.0,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "qwen3moe": ARCHITECTURES["qwen3moe"],
    "glm4moe": ARCHITECTURES["glm4moe"]._replace(names=_QWEN),
    "mamba": Architecture("mamba", (_mamba,), attends=False),
    "falcon-h1": Architecture("falcon_h1", (heads_of, _falcon_h1, ROOT_MEAN_SQUARE, BIASES)),
    # rows of q and k are in another order in them, which is the same in all heads, and nothing rotates
    "granitehybrid": Architecture("granitemoehybrid", (_granite_hybrid, ROOT_MEAN_SQUARE, GRANITE)),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}
"""By GGUF's name; an architecture that has a family as well is read as for the family."""


def config_of(header: GgufHeader) -> Config:
    """The keys and values of config.json. ModelError for another architecture, and for what is not supported."""
    other = not_a_model(header)
    if other is not None:
        raise ModelError(f"{header.path} is {other}", "needed a language model", "name its .gguf file with --model")
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in {**ARCHITECTURES, **MODULES}:
        raise ModelError(
            f"{header.path} is of the architecture {str(architecture)[:80]!r}, which is not supported",
            f"needed one of {', '.join({**ARCHITECTURES, **MODULES})}",
            "the model may run from its checkpoint in safetensors",
        )
    if header.metadata.get("general.quantization_version", 2) != 2:
        raise ModelError(f"{header.path} has blocks of another version", "needed general.quantization_version 2")
    keys = GgufKeys(header, architecture)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path} has no matrix token_embd.weight", "needed the weights of a model")
    vocab, tokens = embedding.shape[0], header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab:
        raise ModelError(f"{header.path} has {len(tokens)} tokens", f"needed at most {vocab}, the rows of token_embd")
    if keys.whole("block_count") > len(header.tensors):  # a number of layers that can be no other is not counted up to
        raise keys.error("block_count", f"no more layers than there are tensors, {len(header.tensors)}")
    row = ARCHITECTURES.get(architecture) or MODULES[architecture]
    own: Config = {"model_type": row.model_type}
    for part in row.parts:
        own |= part(keys)
    dense = row.attends and (architecture in ARCHITECTURES or not keys.value("expert_count"))
    heads, ffn = keys.whole if row.attends else keys.count, keys.whole if dense else keys.count
    ffn_size = own.get("intermediate_size") or ffn("feed_forward_length")
    layers = {"intermediate_size": ffn_size, "num_attention_heads": heads("attention.head_count")}
    config = {
        "vocab_size": vocab,
        "hidden_size": keys.whole("embedding_length"),
        "num_hidden_layers": keys.whole("block_count"),
        **{name: size for name, size in layers.items() if size},
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": stored_dtype(header),
        **_special_tokens(header, vocab),
        **own,
    }
    keys.refuse_rest()
    return config


def not_a_model(header: GgufHeader) -> str | None:
    """The description of a GGUF file that is no language model; None: it may be one."""
    kind, architecture = header.metadata.get("general.type", "model"), header.metadata.get("general.architecture")
    if kind in _OTHER_FILES:
        return _OTHER_FILES[kind]
    if architecture in ("clip", "mmproj"):
        return _OTHER_FILES["mmproj"]
    if architecture == "imatrix":
        return _OTHER_FILES["imatrix"]
    if kind != "model":
        return f"of the type {str(kind)[:80]!r}"
    return "a vocabulary without weights" if not header.tensors else None


def stored_dtype(header: GgufHeader) -> str:
    """The dtype of most numbers in matrices; blocks, whose numbers are in none, count as bfloat16."""
    numbers = Counter[str]()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            numbers[FORMATS[tensor.kind].dtype or "bfloat16"] += math.prod(tensor.shape)
    return max(numbers, key=lambda dtype: (numbers[dtype], dtype))


def _special_tokens(header: GgufHeader, vocab: int) -> Config:
    """bos, eos and pad. A model of conversations has a token that ends a turn besides the one that ends a text.

    An id that is no token's is none: -1, which is 4294967295 in 32 bits, stands in files of many converters.
    """
    found: dict[str, Any] = {}
    for name, words in _SPECIAL.items():
        ids = []
        for word in words:
            key = f"tokenizer.ggml.{word}_token_id"
            token = header.metadata.get(key)
            if token is not None and type(token) is not int:
                raise ModelError(f"{header.path}: {key} is {str(token)[:80]!r}", "needed the id of a token")
            ids += [token] if token is not None and 0 <= token < vocab and token not in ids else []
        found[name] = ids if len(ids) > 1 else ids[0] if ids else None
    return found
