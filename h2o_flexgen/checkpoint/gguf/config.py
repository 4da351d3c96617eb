"""The config.json that a GGUF file's metadata stands for, of the families that are supported.

A key of the architecture that asks for something unknown is refused, never left out: the program may not quietly run a
different model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from h2o_flexgen.checkpoint.gguf.architectures import ARCHITECTURES, heads_of
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.header import GgufHeader
from h2o_flexgen.checkpoint.gguf.keys import GgufKeys, scaling_of
from h2o_flexgen.errors import ModelError

_SPECIAL = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}
_OTHER_FILES = {
    "mmproj": "the part of a model that reads pictures or sound (mmproj)",
    "adapter": "an adapter (LoRA), which is not read: merge it into its model",
    "imatrix": "a table of how much weights matter (imatrix)",
    "vocab": "a vocabulary without weights",
}
"""What `general.type` may be besides a model."""


class ModuleArchitecture(NamedTuple):
    """An architecture that has no family here, and is computed by transformers' modules: `read` adds to the keys of
    their config.json that all have.

    Keys are those of llama.cpp's converter, which also changes some values: it adds 1 to norms, turns rows of q and k,
    stores rates of decay as what they stand for, and multiplies weights by what a config multiplies products by.

    turned   whether the rows of q and k are in the order of llama.cpp's Llama
    offset   what norms have too much
    attends  whether layers attend at all, and have an MLP
    """

    read: Callable[[GgufKeys], dict[str, Any]]
    turned: bool = False
    offset: float = 0.0
    attends: bool = True


def _rope(keys: GgufKeys, head_dim: int) -> dict[str, Any]:
    """Rotary positions, of part of a head where the metadata says so."""
    theta, turned = keys.number("rope.freq_base", 10000.0), keys.whole("rope.dimension_count", head_dim)
    if turned > head_dim or turned % 2:
        raise keys.error("rope.dimension_count", f"an even part of heads of {head_dim} dimensions")
    scaling = scaling_of(keys, theta, turned) or {"rope_type": "default"}
    part = {} if turned == head_dim else {"partial_rotary_factor": (turned + 0.5) / head_dim}
    return {"rope_parameters": {**scaling, "rope_theta": theta, **part}}


def _heads(keys: GgufKeys) -> dict[str, Any]:
    """KV heads, the size of a head and its positions."""
    config = heads_of(keys)
    del config["rope_theta"]  # among its positions
    return {**config, **_rope(keys, config["head_dim"])}


def _whole_heads(keys: GgufKeys) -> dict[str, Any]:
    """The same where the size of a head follows from the model's."""
    config = _heads(keys)
    if config.pop("head_dim") * keys.whole("attention.head_count") != keys.whole("embedding_length"):
        raise keys.error("attention.key_length", "the model's size over its heads")
    return config


def _biased(keys: GgufKeys, part: str) -> bool:
    return f"blk.0.{part}.bias" in keys.header.tensors


def _gpt2(keys: GgufKeys) -> dict[str, Any]:
    keys.whole("attention.head_count_kv", keys.whole("attention.head_count"))
    return {
        "model_type": "gpt2",
        "n_embd": keys.whole("embedding_length"),
        "n_head": keys.whole("attention.head_count"),
        "n_layer": keys.whole("block_count"),
        "n_positions": keys.whole("context_length"),
        "n_inner": keys.whole("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


def _starcoder2(keys: GgufKeys) -> dict[str, Any]:
    eps = keys.number("attention.layer_norm_epsilon")
    window = {"sliding_window": keys.value("attention.sliding_window") or None}
    return {
        "model_type": "starcoder2", **_whole_heads(keys), **window, "norm_epsilon": eps,
        "use_bias": _biased(keys, "attn_q"),
    }  # fmt: skip


def _stablelm(keys: GgufKeys) -> dict[str, Any]:
    return {
        "model_type": "stablelm",
        **_whole_heads(keys),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": keys.flag("use_parallel_residual", True)
        and "blk.0.ffn_norm.weight" not in keys.header.tensors,
        "use_qkv_bias": _biased(keys, "attn_q"),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in keys.header.tensors,
    }


def _phi2(keys: GgufKeys) -> dict[str, Any]:
    eps = keys.number("attention.layer_norm_epsilon")
    return {"model_type": "phi", **_whole_heads(keys), "layer_norm_eps": eps, "tie_word_embeddings": False}


def _nemotron(keys: GgufKeys) -> dict[str, Any]:
    biases = {"attention_bias": _biased(keys, "attn_q"), "mlp_bias": _biased(keys, "ffn_up")}
    return {
        "model_type": "nemotron", **_heads(keys), **biases, "norm_eps": keys.number("attention.layer_norm_epsilon"),
    }  # fmt: skip


def _gemma(keys: GgufKeys) -> dict[str, Any]:
    return {"model_type": "gemma", **_heads(keys), "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


def _olmo(keys: GgufKeys) -> dict[str, Any]:
    """Its norms have no weights, and one number that is the same in all."""
    if abs(keys.number("attention.layer_norm_epsilon", 1e-5) - 1e-5) > 1e-9:
        raise keys.error("attention.layer_norm_epsilon", "1e-05")
    clip = keys.number("attention.clamp_kqv") if keys.value("attention.clamp_kqv") else None
    return {"model_type": "olmo", **_whole_heads(keys), "clip_qkv": clip}


def _arcee(keys: GgufKeys) -> dict[str, Any]:
    eps = keys.number("attention.layer_norm_rms_epsilon")
    biases = {"attention_bias": _biased(keys, "attn_q"), "mlp_bias": _biased(keys, "ffn_up")}
    return {"model_type": "arcee", **_heads(keys), **biases, "rms_norm_eps": eps}


def _command_r(keys: GgufKeys) -> dict[str, Any]:
    return {
        "model_type": "cohere",
        **_whole_heads(keys),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
        "attention_bias": _biased(keys, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.header.tensors,
    }


def _lfm2(keys: GgufKeys) -> dict[str, Any]:
    """The layers without KV heads are convolutions."""
    counts, layers = keys.value("attention.head_count_kv"), keys.whole("block_count")
    found = {int(count) for count in counts if count > 0} if isinstance(counts, np.ndarray) else set()
    if len(found) != 1 or len(counts) != layers:
        raise keys.error("attention.head_count_kv", f"one number of KV heads, or 0, for each of {layers} layers")
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    return {
        "model_type": "lfm2",
        "num_key_value_heads": found.pop(),
        **_rope(keys, max(1, hidden // heads)),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.whole("shortconv.l_cache"),
        "conv_bias": _biased(keys, "shortconv.conv"),
        "block_auto_adjust_ff_dim": False,
    }


def _mamba(keys: GgufKeys) -> dict[str, Any]:
    inner, hidden = keys.whole("ssm.inner_size"), keys.whole("embedding_length")
    if inner % hidden:
        raise keys.error("ssm.inner_size", f"a multiple of {hidden}")
    return {
        "model_type": "falcon_mamba" if keys.flag("ssm.dt_b_c_rms", False) else "mamba",
        "expand": inner // hidden,
        "intermediate_size": inner,
        "conv_kernel": keys.whole("ssm.conv_kernel"),
        "state_size": keys.whole("ssm.state_size"),
        "time_step_rank": keys.whole("ssm.time_step_rank"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "use_bias": _biased(keys, "ssm_in"),
        "use_conv_bias": _biased(keys, "ssm_conv1d"),
    }


def _falcon_h1(keys: GgufKeys) -> dict[str, Any]:
    """What its config multiplies products by is in the weights already."""
    inner, heads = keys.whole("ssm.inner_size"), keys.whole("ssm.time_step_rank")
    ones = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out", "lm_head", "embedding")
    return {
        "model_type": "falcon_h1",
        **_heads(keys),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_d_conv": keys.whole("ssm.conv_kernel"),
        "mamba_d_state": keys.whole("ssm.state_size"),
        "mamba_n_groups": keys.whole("ssm.group_count", 1),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in keys.header.tensors,
        "mamba_conv_bias": _biased(keys, "ssm_conv1d"),
        "mamba_proj_bias": _biased(keys, "ssm_in"),
        "attention_bias": _biased(keys, "attn_q"),
        "mlp_bias": _biased(keys, "ffn_up"),
        **{f"{part}_multiplier": 1.0 for part in ones},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


MODULES = {
    "gpt2": ModuleArchitecture(_gpt2),
    "starcoder2": ModuleArchitecture(_starcoder2),
    "stablelm": ModuleArchitecture(_stablelm),
    "phi2": ModuleArchitecture(_phi2),
    "nemotron": ModuleArchitecture(_nemotron, offset=1.0),
    "gemma": ModuleArchitecture(_gemma, offset=1.0),
    "olmo": ModuleArchitecture(_olmo, turned=True),
    "arcee": ModuleArchitecture(_arcee, turned=True),
    "command-r": ModuleArchitecture(_command_r),
    "lfm2": ModuleArchitecture(_lfm2),
    "mamba": ModuleArchitecture(_mamba, attends=False),
    "falcon-h1": ModuleArchitecture(_falcon_h1, turned=True),
}
"""By GGUF's word."""


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The keys and values of config.json. ModelError for another architecture, and for what is not supported."""
    other = not_a_model(header)
    if other is not None:
        raise ModelError(f"{header.path} is {other}", "needed a language model", "name its .gguf file with --model")
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in {**ARCHITECTURES, **MODULES}:
        raise ModelError(
            f"{header.path} is of the architecture {str(architecture)[:80]!r}, which is not supported",
            f"needed one of {', '.join([*ARCHITECTURES, *MODULES])}",
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
    layers = {"intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count"}
    read = keys.whole if architecture in ARCHITECTURES or MODULES[architecture].attends else keys.count
    config = {
        "vocab_size": vocab,
        "hidden_size": keys.whole("embedding_length"),
        "num_hidden_layers": keys.whole("block_count"),
        **{name: size for name, key in layers.items() if (size := read(key))},
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": stored_dtype(header),
        **_special_tokens(header, vocab),
        **row.read(keys),
    }
    keys.refuse_rest()
    return config


def not_a_model(header: GgufHeader) -> str | None:
    """What a GGUF file is that is no language model; None: it may be one."""
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
    numbers: dict[str, int] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            dtype = FORMATS[tensor.kind].dtype or "bfloat16"
            numbers[dtype] = numbers.get(dtype, 0) + math.prod(tensor.shape)
    return max(numbers, key=lambda dtype: (numbers[dtype], dtype))


def _special_tokens(header: GgufHeader, vocab: int) -> dict[str, Any]:
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
