"""MiniMax-M2 (transformers' model_type "minimax_m2"): 256 experts by a sigmoid, queries and keys normed as a whole.

No torch. MiniMax, "MiniMax-M2", 2025. Heads turn in part.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import mixtral
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, read_spec
from h2o_flexgen.models.mixture import EXPERTS, either, mixture_names, predicting_layers, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names

DEFAULTS = Defaults(
    vocab_size=200064,
    hidden_size=3072,
    intermediate_size=1536,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=196608,
    bos_token_id=200034,
    eos_token_id=200020,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have MiniMaxM2Config's defaults. Raises ModelError.

    The published files give how much of a head turns as `rotary_dim`.
    """
    read.choice("scoring_func", "sigmoid", {"sigmoid": None})
    read.choice("qk_norm_type", "per_layer", {"per_layer": None})
    read.refuse(["shared_intermediate_size"])
    share = 1.0
    if "rotary_dim" in read:
        share = read.whole("rotary_dim") / read.whole("head_dim", 128)
    spec = read_spec(read, "minimax_m2", DEFAULTS, partial(read_rotary, theta=5e6, share=share))
    experts = read_experts(read, 256, 8, spec.ffn_size, router="each", choice_bias=True)
    return replace(
        spec,
        arch=replace(spec.arch, qk_norm=True, qk_norm_joint=True, experts=experts, predicting=predicting_layers(read)),
    )


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor where a checkpoint may keep it, the usual place first."""
    old = {**EXPERTS, **mixtral.NUMBERED, "mlp.choice": "block_sparse_moe.e_score_correction_bias"}
    new = {**EXPERTS, "mlp.choice": "mlp.e_score_correction_bias"}
    return either(mixture_names(spec, old), mixture_names(spec, new))
