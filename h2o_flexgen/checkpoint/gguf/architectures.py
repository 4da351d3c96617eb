"""The architectures of GGUF files that are read: their metadata in config.json's keys, and their tensors' names.

Keys are those of llama.cpp's converter. A key that asks for something unknown is refused, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from h2o_flexgen.checkpoint.gguf.keys import GgufKeys, factors_of, scaling_of

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS, _EXAONE4_32B_LAYERS = 46, 62, 64

Config = dict[str, Any]
Part = Callable[[GgufKeys], Config]


class Architecture(NamedTuple):
    """One of GGUF's architectures: a row is all that the reading of its files has to know.

    Keys are those of llama.cpp's converter, which also changes some values: it adds 1 to norms, turns rows of q and k,
    stores rates of decay as what they stand for, and multiplies weights by what a config multiplies products by.

    model_type  of config.json, if none of the parts says another
    parts    what it adds to the keys of config.json that all have
    turned   the layers in which pairs that are rotated lie side by side in the rows of q and k, see StoredRows.heads:
             "all" where llama.cpp's converter turned them, "rotated" where the family has them so, "" for none
    names    GGUF's names of canonical parts, where they are not the usual ones, by which those of modules stand; parts
             of one name are one tensor, one after another
    offset   of transformers' modules: the surplus of norms
    attends  of modules: whether layers attend at all, and have an MLP
    """

    model_type: str
    parts: tuple[Part, ...]
    turned: str = ""
    names: Mapping[str, str] = {}
    offset: float = 0.0
    attends: bool = True


def wholes(**names: str) -> Part:
    """Whole numbers, `numbers`, and whether parts are `biased`: by the config's names those of GGUF."""
    return lambda keys: {name: keys.whole(key) for name, key in names.items()}


def numbers(**names: str) -> Part:
    return lambda keys: {name: keys.number(key) for name, key in names.items()}


def biased(**names: str) -> Part:
    return lambda keys: {name: keys.biased(part) for name, part in names.items()}


def query_norm(keys: GgufKeys) -> Config:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in keys.header.tensors}


def always(**values: Any) -> Part:
    """Values that no key tells."""
    return lambda keys: values


ROOT_MEAN_SQUARE = numbers(rms_norm_eps="attention.layer_norm_rms_epsilon")
LAYER_NORM = numbers(layer_norm_eps="attention.layer_norm_epsilon")
LOGIT_SCALE = numbers(logit_scale="logit_scale")
QUERY_BIAS = biased(attention_bias="attn_q")
BIASES = biased(attention_bias="attn_q", mlp_bias="ffn_up")
EXPERTS = wholes(num_experts="expert_count", num_experts_per_tok="expert_used_count")
EXPERT_SIZE = wholes(moe_intermediate_size="expert_feed_forward_length")
SHARED_EXPERT = wholes(shared_expert_intermediate_size="expert_shared_feed_forward_length")
GRANITE = numbers(
    attention_multiplier="attention.scale",
    embedding_multiplier="embedding_scale",
    residual_multiplier="residual_scale",
    logits_scaling="logit_scale",
)


def head_size(keys: GgufKeys) -> int:
    """Numbers of a key, and of a value."""
    size = keys.whole("embedding_length") // keys.whole("attention.head_count")
    head_dim = keys.whole("attention.key_length", max(1, size))
    if keys.whole("attention.value_length", head_dim) != head_dim:
        raise keys.error("attention.value_length", f"that of a key, {head_dim}")
    return head_dim


def heads_of(keys: GgufKeys) -> Config:
    """KV heads, the size of a head, its rotary positions."""
    config = _plain_heads(keys)
    return {**config, **positions_of(keys, config["head_dim"])}


def _plain_heads(keys: GgufKeys) -> Config:
    if not keys.flag("attention.causal", True):
        raise keys.error("attention.causal", "true")
    kv_heads = keys.whole("attention.head_count_kv", keys.whole("attention.head_count"))
    return {"num_key_value_heads": kv_heads, "head_dim": head_size(keys)}


def positions_of(keys: GgufKeys, head_dim: int) -> Config:
    """Rotary positions, of part of a head where the metadata says so."""
    theta, turned = keys.number("rope.freq_base", 10000.0), turned_of(keys, head_dim)
    scaling, share = scaling_of(keys, theta, turned), share_of(turned, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling, "partial_rotary_factor": share}


def turned_of(keys: GgufKeys, head_dim: int) -> int:
    """The dimensions of a head that turn."""
    turned = keys.whole("rope.dimension_count", head_dim)
    if turned > head_dim or (turned % 2 and turned != head_dim):
        raise keys.error("rope.dimension_count", f"an even part of heads of {head_dim} dimensions")
    return turned


def _whole_heads(keys: GgufKeys) -> Config:
    """Of a family whose heads turn whole."""
    config = heads_of(keys)
    if config["partial_rotary_factor"] != 1:
        raise keys.error("rope.dimension_count", f"whole heads, of {config['head_dim']} dimensions")
    return config


def _part_of_heads(keys: GgufKeys) -> Config:
    """Of a family of whose heads a part turns, without any scaling."""
    config = heads_of(keys)
    if config["rope_scaling"] is not None:
        raise keys.error("rope.scaling.type", "none: another one is not supported for this architecture")
    return config


def _llama(keys: GgufKeys) -> Config:
    return {"model_type": "mixtral", **EXPERTS(keys)} if keys.value("expert_count") else BIASES(keys)


def _granite(keys: GgufKeys) -> Config:
    """Granite 4 without mixers: its files have keys of mixers all the same, and its MLP is a shared one."""
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        keys.value(f"ssm.{key}")
    size = keys.whole("feed_forward_length")
    if keys.whole("expert_shared_feed_forward_length", size) != size:
        raise keys.error("expert_shared_feed_forward_length", "feed_forward_length")
    if not keys.flag("rope.scaling.finetuned", True):
        raise keys.error("rope.scaling.finetuned", "true: a model with rotary positions")
    return BIASES(keys)


def _mistral3(keys: GgufKeys) -> Config:
    """Ministral 3: the factor of YaRN's cosines and sines follows from a key of its own."""
    config = _whole_heads(keys)
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    if keys.value("rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier")}
    if keys.value("attention.temperature_scale"):
        scaling |= {"llama_4_scaling_beta": keys.number("attention.temperature_scale")}
    return {**config, "rope_scaling": scaling}


def _gpt_oss(keys: GgufKeys) -> Config:
    """Every second layer has a window, from the first on, and YaRN's bounds are not rounded: no keys say so."""
    config, size = _whole_heads(keys), keys.whole("expert_feed_forward_length")
    if size != keys.whole("feed_forward_length", size):
        raise keys.error("expert_feed_forward_length", "feed_forward_length")
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False
    return {**config, **_window(keys, 2)}


def _olmo2(keys: GgufKeys) -> Config:
    """OLMo 3 is known by its windows; where no key says another base, it has one for all layers."""
    if not keys.value("attention.sliding_window"):
        return {}
    theta = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0))
    windowed = {"rope_type": "default", "rope_theta": theta}
    return {"model_type": "olmo3", **_window(keys, 4), "rope_parameters": {"sliding_attention": windowed}}


def _olmoe(keys: GgufKeys) -> Config:
    """The size of an expert is that of an MLP: the value of the key is not needed."""
    keys.value("expert_feed_forward_length")
    return {}


def _cohere2(keys: GgufKeys) -> Config:
    return {**_whole_heads(keys), **_window(keys, 4)}


def routed(keys: GgufKeys, function: int) -> Config:
    """Experts by DeepSeek's router; `function`: how logits become weights, by GGUF's number (1 softmax, 2 sigmoid)."""
    if keys.whole("expert_gating_func", function) != function:
        raise keys.error("expert_gating_func", f"{function}: others are not supported for this architecture")
    groups = {"n_group": keys.whole("expert_group_count", 1), "topk_group": keys.whole("expert_group_used_count", 1)}
    return {
        "n_routed_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count"),
        "first_k_dense_replace": keys.count("leading_dense_block_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        **groups,
    }


def layers_of(keys: GgufKeys) -> int:
    """Layers that predict more tokens at once stand behind the others, and are left out."""
    layers = keys.whole("block_count") - keys.count("nextn_predict_layers")
    if layers < 1:
        raise keys.error("nextn_predict_layers", f"fewer than block_count, {keys.whole('block_count')}")
    return layers


def _glm4_moe(keys: GgufKeys) -> Config:
    norms = keys.flag("expert_weights_norm", True)
    return {**routed(keys, 2), "norm_topk_prob": norms, "num_hidden_layers": layers_of(keys)}


def _dots1(keys: GgufKeys) -> Config:
    norms, layers = keys.flag("expert_weights_norm", False), keys.whole("block_count")
    return {**routed(keys, 2), "norm_topk_prob": norms, "layer_types": ["full_attention"] * layers}


def _ernie_moe(keys: GgufKeys) -> Config:
    """The size of a shared expert is that of the others: the value of the key is not needed."""
    keys.value("expert_shared_feed_forward_length")
    found = routed(keys, 1)
    if found["routed_scaling_factor"] != 1:
        raise keys.error("expert_weights_scale", "1: others are not supported for this architecture")
    return {
        "moe_num_experts": found["n_routed_experts"],
        "moe_k": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "moe_num_shared_experts": found["n_shared_experts"],
        "moe_layer_start_index": found["first_k_dense_replace"],
        "moe_layer_interval": keys.whole("interleave_moe_layer_step", 1),
    }


def _minimax_m2(keys: GgufKeys) -> Config:
    if keys.whole("expert_gating_func", 2) != 2:
        raise keys.error("expert_gating_func", "2, a sigmoid")
    if keys.whole("expert_feed_forward_length", 1) != keys.whole("feed_forward_length"):
        raise keys.error("expert_feed_forward_length", "feed_forward_length")
    return {}


def any_window(keys: GgufKeys) -> Config:
    """Of all layers, or none."""
    return {"sliding_window": keys.value("attention.sliding_window") or None}


def _exaone4(keys: GgufKeys) -> Config:
    """The large one has windows even where no key says so."""
    layers = keys.whole("block_count")
    if keys.value("attention.sliding_window") is None and layers != _EXAONE4_32B_LAYERS:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return _window(keys, 4, 4096)


def _phi3(keys: GgufKeys) -> Config:
    config, positions = _plain_heads(keys), keys.whole("context_length")
    turned = keys.whole("rope.dimension_count", config["head_dim"])
    original = keys.whole("rope.scaling.original_context_length", positions)
    scaling, attention = None, keys.number("rope.scaling.attn_factor", 1.0)
    short, long = (factors_of(keys.header, f"rope_factors_{word}.weight") for word in ("short", "long"))
    if keys.value("rope.scaling.type") not in (None, "none", "longrope") or (short is None) != (long is None):
        raise keys.error("rope.scaling.type", "longrope with its two tensors of factors, or none")
    if short is not None and long is not None:
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
    return {
        **config,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": share_of(turned, config["head_dim"]),
        "rope_scaling": scaling,
        "original_max_position_embeddings": original,
        **any_window(keys),
    }


def share_of(turned: int, head_dim: int) -> float:
    """The share of a head's dimensions that rotates; rounding down gives `turned` again."""
    return 1.0 if turned == head_dim else (turned + 0.5) / head_dim


def _gemma2(keys: GgufKeys) -> Config:
    """Old files leave out the caps and the window, which are the same in all."""
    config = _whole_heads(keys)
    return {
        **config,
        "query_pre_attn_scalar": _scalar(keys, config["head_dim"], _GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        **_window(keys, 2, 4096),
    }


def _scalar(keys: GgufKeys, head_dim: int, largest: int) -> int:
    """The one size of a Gemma whose scale is not that of a head is known by its layers: no key says so."""
    by_hidden = keys.whole("block_count") == largest
    return keys.whole("embedding_length") // keys.whole("attention.head_count") if by_hidden else head_dim


def _gemma3(keys: GgufKeys) -> Config:
    config = _whole_heads(keys)
    return {
        **config,
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _scalar(keys, config["head_dim"], _GEMMA3_27B_LAYERS),
        **_window(keys, 6),
    }


def _window(keys: GgufKeys, usual: int, size: int | None = None) -> Config:
    """The window, and which layers have it: all but every n-th, or one flag for each; `usual`: n where nothing says it.

    size    of the window where no key has it; None: the key has to be there
    """
    pattern, layers = keys.value("attention.sliding_window_pattern"), keys.whole("block_count")
    if not isinstance(pattern, np.ndarray):
        period = keys.whole("attention.sliding_window_pattern", usual)
        pattern = (np.arange(layers) + 1) % period != 0
    if pattern.dtype != bool or len(pattern) != layers:
        raise keys.error("attention.sliding_window_pattern", f"a number, or true or false for each of {layers} layers")
    types = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return {"sliding_window": keys.whole("attention.sliding_window", size), "layer_types": types}


def _gptneox(keys: GgufKeys) -> Config:
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    turned = keys.whole("rope.dimension_count", max(1, hidden // heads))
    return {
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "rotary_pct": share_of(turned, max(1, hidden // heads)),
        "rotary_emb_base": keys.number("rope.freq_base", 10000.0),
    }


_QKV = dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attn_qkv")
_USUAL = (_whole_heads, ROOT_MEAN_SQUARE)
ARCHITECTURES = {
    "llama": Architecture("llama", (*_USUAL, _llama), "all"),
    "mistral3": Architecture("ministral3", (_mistral3, ROOT_MEAN_SQUARE), "all"),
    "qwen2": Architecture("qwen2", _USUAL),
    "qwen3": Architecture("qwen3", (*_USUAL, QUERY_BIAS)),
    "olmo2": Architecture("olmo2", (*_USUAL, _olmo2)),
    "olmoe": Architecture("olmoe", (*_USUAL, EXPERTS, _olmoe)),
    "gpt-oss": Architecture(
        "gpt_oss", (_gpt_oss, ROOT_MEAN_SQUARE, EXPERTS, QUERY_BIAS), names={"mlp.norm": "post_attention_norm"}
    ),
    "qwen2moe": Architecture("qwen2_moe", (*_USUAL, EXPERTS, EXPERT_SIZE, SHARED_EXPERT)),
    # all of its models divide the weights of the experts that a token chose by their sum
    "qwen3moe": Architecture("qwen3_moe", (*_USUAL, EXPERTS, EXPERT_SIZE, always(norm_topk_prob=True))),
    "granite": Architecture("granite", (*_USUAL, _granite, GRANITE), "all"),
    "granitemoe": Architecture("granitemoe", (*_USUAL, EXPERTS, GRANITE), "all"),
    # in all of its models every fourth layer has no positions
    "smollm3": Architecture("smollm3", (*_USUAL, always(no_rope_layer_interval=4)), "all"),
    "exaone4": Architecture("exaone4", (*_USUAL, _exaone4)),
    "cohere2": Architecture(
        "cohere2", (_cohere2, LAYER_NORM, LOGIT_SCALE, QUERY_BIAS), "rotated", {"mlp.norm": "attn_norm"}
    ),
    "glm4": Architecture(
        "glm4", (_part_of_heads, ROOT_MEAN_SQUARE, QUERY_BIAS), "rotated", {"mlp.gate": "ffn_up", "mlp.up": "ffn_up"}
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        (_part_of_heads, ROOT_MEAN_SQUARE, _glm4_moe, QUERY_BIAS, query_norm),
        names={"mlp.norm": "post_attention_norm"},
    ),
    "dots1": Architecture("dots1", (*_USUAL, _dots1, QUERY_BIAS)),
    "ernie4_5-moe": Architecture("ernie4_5_moe", (*_USUAL, _ernie_moe), "rotated"),
    "minimax-m2": Architecture("minimax_m2", (_part_of_heads, ROOT_MEAN_SQUARE, EXPERTS, _minimax_m2)),
    "seed_oss": Architecture(
        "seed_oss",
        (*_USUAL, BIASES, biased(attention_out_bias="attn_output")),
        names={"mlp.norm": "post_attention_norm"},
    ),
    "phi3": Architecture("phi3", (_phi3, ROOT_MEAN_SQUARE), names={**_QKV, "mlp.gate": "ffn_up", "mlp.up": "ffn_up"}),
    "gemma2": Architecture("gemma2", (_gemma2, ROOT_MEAN_SQUARE)),
    "gemma3": Architecture("gemma3_text", (_gemma3, ROOT_MEAN_SQUARE)),
    "gptneox": Architecture("gpt_neox", (_gptneox, LAYER_NORM, biased(attention_bias="attn_qkv")), names=_QKV),
}
"""The architectures that are read, by GGUF's word."""
