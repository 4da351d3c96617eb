"""MiniMax-M2 (transformers' model_type "minimax_m2"): 256 experts by a sigmoid, queries and keys normed as a whole.

No torch. MiniMax, "MiniMax-M2", 2025. Heads turn in part, of which the published files say how much as `rotary_dim`.
"""

from __future__ import annotations

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import mixtral
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, switched
from h2o_flexgen.models.mixture import EXPERTS, either, mixture_names, predicting_layers, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names


def _rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    share = read.whole("rotary_dim") / read.whole("head_dim", 128) if "rotary_dim" in read else 1.0
    return read_rotary(read, head_dim, positions, theta=5e6, share=share)


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.choice("scoring_func", "sigmoid", {"sigmoid": None})
    read.choice("qk_norm_type", "per_layer", {"per_layer": None})
    read.refuse(["shared_intermediate_size"])
    experts = read_experts(read, 256, 8, spec.ffn_size, router="each", choice_bias=True)
    return switched(spec, experts=experts, predicting=predicting_layers(read))


def _names(spec: ModelSpec) -> Names:
    old = {**EXPERTS, **mixtral.NUMBERED, "mlp.choice": "block_sparse_moe.e_score_correction_bias"}
    new = {**EXPERTS, "mlp.choice": "mlp.e_score_correction_bias"}
    return either(mixture_names(spec, old), mixture_names(spec, new))


FAMILY = LlamaLike(
    "minimax_m2",
    experts=True,
    rotary=_rotary,
    switches={"qk_norm": True, "qk_norm_joint": True},
    more=_more,
    checkpoint_names=_names,
)
