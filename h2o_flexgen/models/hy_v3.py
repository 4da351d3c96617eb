"""Hunyuan 3 (transformers' model_type "hy_v3"): experts by a sigmoid, queries and keys normed head by head.

No torch. Tencent Hunyuan Team, "Hy3", 2026. Layers that predict more tokens at once are left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, read_spec
from h2o_flexgen.models.mixture import EXPERTS, SHARED, either, names_beside_dense, predicting_layers, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names

DEFAULTS = Defaults(
    vocab_size=120832,
    hidden_size=4096,
    intermediate_size=13312,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
)

_ROTARY = partial(read_rotary, theta=11158840.0)
_OLD = {
    "mlp.router": "mlp.router.gate",
    "mlp.choice": "mlp.expert_bias",
    **{f"mlp.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("up", "gate", "down")},
}


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have HYV3Config's defaults. Raises ModelError."""
    read.refuse(["mlp_bias"])
    spec, bias = read_spec(read, "hy_v3", DEFAULTS, _ROTARY), read.flag("attention_bias", False)
    dense = [layer == 0 for layer in range(spec.num_layers)]
    if "mlp_layer_types" in read:
        dense = list(read.words("mlp_layer_types", spec.num_layers, {"dense": True, "sparse": False}))
    size = read.whole("moe_intermediate_size", 1536)
    experts = read_experts(
        read,
        192,
        8,
        size,
        router="each",
        choice_bias=True,
        scale=read.number("router_scaling_factor", 2.826),
        shared_size=size * read.count("num_shared_experts", 1),
        shared_gate=False,
        dense=tuple(layer for layer, it_is in enumerate(dense) if it_is),
    )
    arch = replace(spec.arch, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=experts)
    return replace(spec, arch=replace(arch, predicting=predicting_layers(read)))


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor where a checkpoint may keep it, the usual place first."""
    new = {**EXPERTS, **SHARED, "mlp.choice": "mlp.e_score_correction_bias"}
    return either(names_beside_dense(spec, {**new, **_OLD}), names_beside_dense(spec, new))
