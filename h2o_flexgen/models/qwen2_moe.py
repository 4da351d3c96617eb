"""Qwen1.5-MoE and Qwen2-57B-A14B (transformers' model_type "qwen2_moe"): Qwen2 with experts, one for all tokens.

No torch. Yang et al., "Qwen2 Technical Report", arXiv 2407.10671.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, by_layer, switched, window_in_use
from h2o_flexgen.models.mixture import EXPERTS, dense_layers, names_beside_dense, read_experts

_SHARED = {
    "mlp.up": "mlp.shared_expert.up_proj",
    "mlp.gate": "mlp.shared_expert.gate_proj",
    "mlp.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    experts = read_experts(
        read,
        60,
        4,
        read.whole("moe_intermediate_size", 1408),
        normalised=read.flag("norm_topk_prob", False),
        shared_size=read.whole("shared_expert_intermediate_size", 5632),
        dense=dense_layers(read, spec.num_layers),
    )
    window, first = window_in_use(read), read.count("max_window_layers", 28)
    windowed = [window is not None and layer < first and layer % 2 == 0 for layer in range(spec.num_layers)]
    spec = switched(spec, qkv_bias=read.flag("qkv_bias", True), experts=experts)
    return by_layer(spec, read, window, windowed)


FAMILY = LlamaLike(
    "qwen2_moe",
    experts=True,
    more=_more,
    checkpoint_names=partial(names_beside_dense, parts={**EXPERTS, **_SHARED}),
)
