"""The config.json that a GGUF file's metadata stands for, of the families that are supported.

Keys are those of ggml's docs/gguf.md and of llama.cpp's converter. A key of the architecture that asks for something
unknown is refused, never left out: the program may not quietly run a different model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from h2o_flexgen.checkpoint.files import CheckpointFile
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.header import GgufHeader
from h2o_flexgen.errors import ModelError

_IDLE = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""Keys that are not needed: the table of tokens says how many there are."""
_SPECIAL = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}
_OTHER_FILES = {
    "mmproj": "the part of a model that reads pictures or sound (mmproj)",
    "adapter": "an adapter (LoRA), which is not read: merge it into its model",
    "imatrix": "a table of how much weights matter (imatrix)",
    "vocab": "a vocabulary without weights",
}
"""What `general.type` may be besides a model."""
_MOST_FACTORS = 4096
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of Llama 3.1 to 3.3; GGUF keeps only the factors that follow from them."""
_GEMMA3_27B_LAYERS, _EXAONE4_32B_LAYERS = 62, 64


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The keys and values of config.json. ModelError for another architecture, and for what is not supported."""
    other = not_a_model(header)
    if other is not None:
        raise ModelError(f"{header.path} is {other}", "needed a language model", "name its .gguf file with --model")
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(
            f"{header.path} is of the architecture {str(architecture)[:80]!r}, which is not supported",
            f"needed one of {', '.join(ARCHITECTURES)}",
        )
    if header.metadata.get("general.quantization_version", 2) != 2:
        raise ModelError(f"{header.path} has blocks of another version", "needed general.quantization_version 2")
    keys = _Keys(header, architecture)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path} has no matrix token_embd.weight", "needed the weights of a model")
    vocab, tokens = embedding.shape[0], header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab:
        raise ModelError(f"{header.path} has {len(tokens)} tokens", f"needed at most {vocab}, the rows of token_embd")
    if keys.whole("block_count") > len(header.tensors):  # a number of layers that can be no other is not counted up to
        raise keys.error("block_count", f"no more layers than there are tensors, {len(header.tensors)}")
    config = {
        "vocab_size": vocab,
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": keys.whole("attention.head_count"),
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": stored_dtype(header),
        **_special_tokens(header, vocab),
        **ARCHITECTURES[architecture].read(keys),
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


class _Keys:
    """Typed access to the keys of one architecture; remembers which were asked for. ModelError names the key."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header, self._prefix = header, f"{architecture}."
        self._values = {
            key.removeprefix(self._prefix): value
            for key, value in header.metadata.items()
            if key.startswith(self._prefix)
        }
        self._asked = set(_IDLE)

    def value(self, key: str) -> Any:
        """As it is; None where there is no such key."""
        self._asked.add(key)
        return self._values.get(key)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1; without a default the key has to be there."""
        value = self.value(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value < 1 << 50:
            raise self.error(key, "a whole number, at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; without a default the key has to be there."""
        value = self.value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise self.error(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def error(self, key: str, needed: str) -> ModelError:
        """That the value of `key` will not do."""
        value = self._values.get(key)
        found = "missing" if value is None else repr(value)[:80]
        return ModelError(f"{self.header.path}: {self._prefix}{key} is {found}", f"needed {needed}")

    def refuse_rest(self) -> None:
        """ModelError for the first key that nothing asked for, unless it is 0, false or empty."""
        for key, value in self._values.items():
            there = value.size and value.any() if isinstance(value, np.ndarray) else value
            if key not in self._asked and there:
                raise self.error(key, "a model without it: it is not supported")


def _special_tokens(header: GgufHeader, vocab: int) -> dict[str, Any]:
    """bos, eos and pad. A model of conversations has a token that ends a turn besides the one that ends a text."""
    found: dict[str, Any] = {}
    for name, words in _SPECIAL.items():
        ids = []
        for word in words:
            key = f"tokenizer.ggml.{word}_token_id"
            token = header.metadata.get(key)
            if token is not None and (type(token) is not int or not 0 <= token < vocab):
                raise ModelError(f"{header.path}: {key} is {str(token)[:80]!r}", f"needed a token id below {vocab}")
            ids += [] if token is None or token in ids else [token]
        found[name] = ids if len(ids) > 1 else ids[0] if ids else None
    return found


def _rms(keys: _Keys) -> dict[str, Any]:
    """The fields of all architectures but GPT-NeoX: RMS norms, KV heads, the size of a head."""
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    head_dim = keys.whole("attention.key_length", max(1, hidden // heads))
    if keys.whole("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"that of a key, {head_dim}")
    if not keys.flag("attention.causal", True):
        raise keys.error("attention.causal", "true")
    return {
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
    }


def _whole_heads(keys: _Keys) -> dict[str, Any]:
    """`_rms` of a family whose heads turn whole, and the scaling of its rotary positions."""
    config = _rms(keys)
    if keys.whole("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise keys.error("rope.dimension_count", f"whole heads, of {config['head_dim']} dimensions")
    return {**config, "rope_scaling": _scaling(keys, config["rope_theta"], config["head_dim"])}


def _scaling(keys: _Keys, theta: float, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json."""
    factors = _factors(keys.header, "rope_freqs.weight")
    kind = keys.value("rope.scaling.type")
    if factors is not None:
        if kind not in (None, "none"):
            raise keys.error("rope.scaling.type", "none beside rope_freqs.weight")
        return _by_factors(keys, factors, theta, head_dim)
    if kind == "linear" or (kind is None and keys.value("rope.scale_linear")):
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor", keys.value("rope.scale_linear"))}
    if kind == "yarn":
        for key, usual in (("rope.scaling.attn_factor", 1.0), ("rope.scaling.yarn_ext_factor", 1.0)):
            if keys.number(key, usual) != usual:
                raise keys.error(key, f"{usual:g}: others are not supported")
        return {
            "rope_type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
            "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length"),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind not in (None, "none"):
        raise keys.error("rope.scaling.type", "one of none, linear, yarn")
    for key in ("rope.scaling.factor", "rope.scaling.attn_factor"):
        if keys.number(key, 1.0) != 1:
            raise keys.error(key, "a rope.scaling.type that it belongs to")
    keys.value("rope.scaling.original_context_length")
    return None


def _by_factors(keys: _Keys, factors: list[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The divisors of rotary frequencies: Llama 3's scaling where that gives the same, else one by one."""
    if len(factors) != head_dim // 2:
        raise ModelError(f"{keys.header.path}: rope_freqs.weight has {len(factors)} numbers", f"needed {head_dim // 2}")
    # Of the lowest frequency; where only some are stretched, this is the factor.
    usual = {"rope_type": "llama3", "factor": round(max(factors), 6), **_LLAMA3}
    if np.allclose(factors, _llama3_factors(usual, theta, head_dim), rtol=1e-5, atol=0):
        return usual
    positions = keys.whole("context_length")
    own = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
    return {"rope_type": "longrope", **own, "original_max_position_embeddings": positions}


def _llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Grattafiori et al., arXiv 2407.21783: long waves are stretched by the factor, short ones not at all."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (scaling["original_max_position_embeddings"] / waves - low) / (high - low)
    return 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))


def _factors(header: GgufHeader, name: str) -> list[float] | None:
    """The numbers of a small tensor that belongs to the config; None where there is none."""
    tensor = header.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FACTORS:
        raise ModelError(f"{header.path}: {name} is {tensor.kind} of shape {tensor.shape}", "needed a list in F32")
    part = header.parts[tensor.part]
    file = CheckpointFile(part.path)
    try:
        factors = np.frombuffer(file.head(tensor.nbytes, tensor.offset), "<f4").astype(float)
    finally:
        file.close()
    if len(factors) != tensor.shape[0] or not np.isfinite(factors).all() or (factors <= 0).any():
        raise ModelError(f"{header.path}: {name} has numbers that are not above 0", change="download it again")
    return [float(factor) for factor in factors]


def _llama(keys: _Keys) -> dict[str, Any]:
    tensors = keys.header.tensors
    if keys.value("expert_count"):
        return {"model_type": "mixtral", **_whole_heads(keys), **_experts(keys)}
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return {"model_type": "llama", **_whole_heads(keys), **biases}


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return {"model_type": "qwen2", **_whole_heads(keys)}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    biased = "blk.0.attn_q.bias" in keys.header.tensors
    return {"model_type": "qwen3", **_whole_heads(keys), "attention_bias": biased}


def _experts(keys: _Keys) -> dict[str, Any]:
    return {"num_experts": keys.whole("expert_count"), "num_experts_per_tok": keys.whole("expert_used_count")}


def _olmoe(keys: _Keys) -> dict[str, Any]:
    keys.value("expert_feed_forward_length")
    return {"model_type": "olmoe", **_whole_heads(keys), **_experts(keys)}


def _qwen2_moe(keys: _Keys) -> dict[str, Any]:
    sizes = {"moe_intermediate_size": keys.whole("expert_feed_forward_length")}
    sizes["shared_expert_intermediate_size"] = keys.whole("expert_shared_feed_forward_length")
    return {"model_type": "qwen2_moe", **_whole_heads(keys), **_experts(keys), **sizes}


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    """All of its models divide the weights of the experts that a token chose by their sum: no key says so."""
    size = {"moe_intermediate_size": keys.whole("expert_feed_forward_length"), "norm_topk_prob": True}
    return {"model_type": "qwen3_moe", **_whole_heads(keys), **_experts(keys), **size}


def _gpt_oss(keys: _Keys) -> dict[str, Any]:
    """Every second layer has a window, from the first on, and YaRN's bounds are not rounded: no keys say so."""
    config, size = _whole_heads(keys), keys.whole("expert_feed_forward_length")
    if size != keys.whole("feed_forward_length", size):
        raise keys.error("expert_feed_forward_length", "feed_forward_length")
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False
    pattern = _pattern(keys, keys.whole("block_count"), 2)
    if pattern.get("sliding_window_pattern", 2) != 2:
        raise keys.error("attention.sliding_window_pattern", "2, or true or false for each layer")
    biased = "blk.0.attn_q.bias" in keys.header.tensors
    window = {"sliding_window": keys.whole("attention.sliding_window"), **pattern}
    return {"model_type": "gpt_oss", **config, **_experts(keys), **window, "attention_bias": biased}


def _olmo2(keys: _Keys) -> dict[str, Any]:
    return {"model_type": "olmo2", **_whole_heads(keys)}


def _smollm3(keys: _Keys) -> dict[str, Any]:
    """In all of its models every fourth layer has no positions: no key says so."""
    return {"model_type": "smollm3", **_whole_heads(keys), "no_rope_layer_interval": 4}


def _exaone4(keys: _Keys) -> dict[str, Any]:
    """The large one has windows even where no key says so."""
    config, layers = _whole_heads(keys), keys.whole("block_count")
    if keys.value("attention.sliding_window") is None and layers != _EXAONE4_32B_LAYERS:
        return {"model_type": "exaone4", **config, "sliding_window": None, "layer_types": ["full_attention"] * layers}
    window = keys.whole("attention.sliding_window", 4096)
    return {"model_type": "exaone4", **config, "sliding_window": window, **_pattern(keys, layers, 4)}


def _seed_oss(keys: _Keys) -> dict[str, Any]:
    biases = {
        name: f"blk.0.{part}.bias" in keys.header.tensors
        for name, part in (("attention_bias", "attn_q"), ("attention_out_bias", "attn_output"), ("mlp_bias", "ffn_up"))
    }
    return {"model_type": "seed_oss", **_whole_heads(keys), **biases}


def _granite(keys: _Keys) -> dict[str, Any]:
    tensors = keys.header.tensors
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return {"model_type": "granite", **_whole_heads(keys), **biases, **_granite_scales(keys)}


def _granite_scales(keys: _Keys) -> dict[str, Any]:
    return {
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale"),
        "residual_multiplier": keys.number("residual_scale"),
        "logits_scaling": keys.number("logit_scale"),
    }


def _granite_moe(keys: _Keys) -> dict[str, Any]:
    return {"model_type": "granitemoe", **_whole_heads(keys), **_experts(keys), **_granite_scales(keys)}


def _phi3(keys: _Keys) -> dict[str, Any]:
    config, positions = _rms(keys), keys.whole("context_length")
    turned = keys.whole("rope.dimension_count", config["head_dim"])
    original = keys.whole("rope.scaling.original_context_length", positions)
    scaling, attention = None, keys.number("rope.scaling.attn_factor", 1.0)
    short, long = (_factors(keys.header, f"rope_factors_{word}.weight") for word in ("short", "long"))
    if keys.value("rope.scaling.type") not in (None, "none", "longrope") or (short is None) != (long is None):
        raise keys.error("rope.scaling.type", "longrope with its two tensors of factors, or none")
    if short is not None and long is not None:
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
    return {
        "model_type": "phi3",
        **config,
        "partial_rotary_factor": _share(turned, config["head_dim"]),
        "rope_scaling": scaling,
        "original_max_position_embeddings": original,
        "sliding_window": keys.value("attention.sliding_window") or None,
    }


def _share(turned: int, head_dim: int) -> float:
    """The share of a head's dimensions that rotates; rounding down gives `turned` again."""
    return 1.0 if turned == head_dim else (turned + 0.5) / head_dim


def _gemma3(keys: _Keys) -> dict[str, Any]:
    config, layers = _whole_heads(keys), keys.whole("block_count")
    # The one size whose scale is not that of a head is known by its layers: no key says so.
    by_hidden = layers == _GEMMA3_27B_LAYERS
    scalar = keys.whole("embedding_length") // keys.whole("attention.head_count") if by_hidden else config["head_dim"]
    return {
        "model_type": "gemma3_text",
        **config,
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.whole("attention.sliding_window"),
        **_pattern(keys, layers),
    }


def _pattern(keys: _Keys, layers: int, usual: int = 6) -> dict[str, Any]:
    """Which layers have the window: all but every n-th, or one flag for each; `usual`: n where nothing says it."""
    pattern = keys.value("attention.sliding_window_pattern")
    if not isinstance(pattern, np.ndarray):
        return {"sliding_window_pattern": keys.whole("attention.sliding_window_pattern", usual)}
    if pattern.dtype != bool or len(pattern) != layers:
        raise keys.error("attention.sliding_window_pattern", f"a number, or true or false for each of {layers} layers")
    return {"layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern]}


def _gptneox(keys: _Keys) -> dict[str, Any]:
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    turned = keys.whole("rope.dimension_count", max(1, hidden // heads))
    return {
        "model_type": "gpt_neox",
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "rotary_pct": _share(turned, max(1, hidden // heads)),
        "rotary_emb_base": keys.number("rope.freq_base", 10000.0),
        "attention_bias": "blk.0.attn_qkv.bias" in keys.header.tensors,
    }


class Architecture(NamedTuple):
    """One of GGUF's architectures: a row is all that the reading of its files has to know.

    read    what it adds to the keys of config.json that all have
    turned  whether rows of q and k are in another order: see StoredRows.heads
    names   GGUF's names of canonical parts, where they are not the usual ones; parts of one name are one tensor, one
            after another
    """

    read: Callable[[_Keys], dict[str, Any]]
    turned: bool = False
    names: Mapping[str, str] = {}


_QKV = dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attn_qkv")
ARCHITECTURES = {
    "llama": Architecture(_llama, turned=True),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "olmo2": Architecture(_olmo2),
    "olmoe": Architecture(_olmoe),
    "gpt-oss": Architecture(_gpt_oss, names={"mlp.norm": "post_attention_norm"}),
    "qwen2moe": Architecture(_qwen2_moe),
    "qwen3moe": Architecture(_qwen3_moe),
    "granite": Architecture(_granite, turned=True),
    "granitemoe": Architecture(_granite_moe, turned=True),
    "smollm3": Architecture(_smollm3, turned=True),
    "exaone4": Architecture(_exaone4),
    "seed_oss": Architecture(_seed_oss, names={"mlp.norm": "post_attention_norm"}),
    "phi3": Architecture(_phi3, names={**_QKV, "mlp.gate": "ffn_up", "mlp.up": "ffn_up"}),
    "gemma3": Architecture(_gemma3),
    "gptneox": Architecture(_gptneox, names=_QKV),
}
"""The architectures that are read, by GGUF's word."""
