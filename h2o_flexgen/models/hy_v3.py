"""Hunyuan 3 (transformers' model_type "hy_v3"): experts by a sigmoid, queries and keys normed head by head.

No torch. Tencent Hunyuan Team, "Hy3", 2026. Layers that predict more tokens at once are left out.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, switched
from h2o_flexgen.models.mixture import EXPERTS, SHARED, either, names_beside_dense, predicting_layers, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names

_OLD = {
    "mlp.router": "mlp.router.gate",
    "mlp.choice": "mlp.expert_bias",
    **{f"mlp.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("up", "gate", "down")},
}


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["mlp_bias"])
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
    return switched(spec, experts=experts, predicting=predicting_layers(read))


def _names(spec: ModelSpec) -> Names:
    new = {**EXPERTS, **SHARED, "mlp.choice": "mlp.e_score_correction_bias"}
    return either(names_beside_dense(spec, {**new, **_OLD}), names_beside_dense(spec, new))


FAMILY = LlamaLike(
    "hy_v3",
    experts=True,
    rotary=partial(read_rotary, theta=11158840.0),
    switches={"qk_norm": True},
    more=_more,
    checkpoint_names=_names,
)
