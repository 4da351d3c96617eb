"""GLM-4.5 to 4.7 (transformers' model_type "glm4_moe"): DeepSeek's router, and half of each head turned.

No torch. GLM-4.5 Team, "GLM-4.5", arXiv 2508.06471. Layers that predict more tokens at once are left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, read_spec
from h2o_flexgen.models.mixture import EXPERTS, SHARED, names_beside_dense, predicting_layers, read_experts, read_groups
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names

DEFAULTS = Defaults(
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=10944,
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
)

CHOICE = {"mlp.choice": "mlp.gate.e_score_correction_bias"}


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Glm4MoeConfig's defaults. Raises ModelError.

    Without head_dim heads are as wide as hidden_size has it; the default sizes make no whole number, and get 128.
    """
    if "hidden_size" in read:
        heads = read.whole("num_attention_heads", DEFAULTS.num_attention_heads)
        read = read.filled(head_dim=read.whole("hidden_size") // heads)
    spec = read_spec(read, "glm4_moe", DEFAULTS, partial(read_rotary, share=0.5))
    size = read.whole("moe_intermediate_size", 1408)
    experts = read_experts(
        read,
        128,
        8,
        size,
        normalised=read.flag("norm_topk_prob", True),
        shared_size=size * read.count("n_shared_experts", 1),
        shared_gate=False,
        dense=tuple(range(min(read.count("first_k_dense_replace", 1), spec.num_layers))),
    )
    arch = replace(spec.arch, qk_norm=read.flag("use_qk_norm", False), qkv_bias=read.flag("attention_bias", False))
    return replace(spec, arch=replace(arch, experts=read_groups(read, experts), predicting=predicting_layers(read)))


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor where a checkpoint may keep it, the usual place first."""
    return names_beside_dense(spec, {**EXPERTS, **SHARED, **CHOICE})
