"""Configs of transformers' decoders with fields changed at random, as fine-tunes and new sizes have them."""

from __future__ import annotations

import random
from typing import Any

from transformers import AutoConfig

from tests.engine.test_modules import SIZES, TYPES

LEFT = (
    *("_name_or_path", "architectures", "transformers_version", "model_type", "dtype", "torch_dtype", "is_decoder"),
    *("initializer_range", "id2label", "label2id", "problem_type", "is_encoder_decoder", "add_cross_attention"),
    *("finetuning_task", "chunk_size_feed_forward", "torchscript", "attention_probs_dropout_prob", "summary_type"),
    *("return_dict", "num_labels", "tie_encoder_decoder", "ep_size", "pretraining_tp", "max_position_embeddings"),
)
"""Fields that are no part of what is computed, or of which sizes depend."""
NAMED: dict[str, list[Any]] = {
    "sliding_window": [None, 6, 8],
    "attn_logit_softcapping": [None, 1.5],
    "final_logit_softcapping": [None, 2.0],
    "clip_qkv": [None, 0.7],
    "head_dim": [12, 16],
    "num_key_value_heads": [1, 2, 4],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["gelu_pytorch_tanh", "silu"],
    "activation_function": ["gelu_new", "gelu", "relu"],
    "n_inner": [None, 40],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "q_lora_rank": [None, 24],
    "query_pre_attn_scalar": [4, 16],
    "max_window_layers": [0, 1, 2, 28],
    "shared_expert_intermediate_size": [24, 40],
    "n_shared_experts": [None, 1, 2],
    "first_k_dense_replace": [0, 1, 2, 3],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[], [1], [0, 2]],
    "moe_layer_freq": [1, 2],
    "num_experts_per_tok": [1, 2, 3],
    "no_rope_layers": [[1, 1, 0], [0, 0, 0]],
    "no_rope_layer_interval": [2, 4],
    "layer_types": [
        ["full_attention"] * 3,
        ["sliding_attention"] * 3,
        ["sliding_attention", "full_attention", "sliding_attention"],
        ["full_attention", "sliding_attention", "full_attention"],
        ["chunked_attention", "full_attention", "full_attention"],
    ],
    "mlp_layer_types": [["dense", "sparse", "sparse"], ["sparse"] * 3, ["sparse", "dense", "sparse"]],
}
"""What fields may be."""
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {
        **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
        **{"mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0},
    },
]


def odd_fields(kind: str, source: random.Random) -> dict[str, Any]:
    """The fields of a tiny config of which one to four are not what they are by default."""
    base = {**SIZES, **TYPES.get(kind, {})}
    given = AutoConfig.for_model(kind, **base).to_dict()
    free = sorted(name for name in given if name not in LEFT and not name.endswith(("_token_id", "_size", "_layers")))
    free = [name for name in free if name in NAMED or name == "rope_parameters" or type(given[name]) in (bool, float)]
    free += [name for name in NAMED if name in given and name not in free]
    changed: dict[str, Any] = {}
    for name in source.sample(free, min(len(free), source.randrange(1, 5))):
        value = given[name]
        if name in NAMED:
            changed[name] = source.choice(NAMED[name])
        elif name == "rope_parameters":
            changed[name] = dict(source.choice(ROPES))
        elif type(value) is bool:
            changed[name] = not value
        else:
            changed[name] = value * source.choice((0.5, 1.5, 2.0)) if value else source.choice((0.1, 0.5))
    return {**base, **changed}
