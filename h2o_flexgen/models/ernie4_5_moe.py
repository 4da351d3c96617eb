"""ERNIE 4.5 with experts, text only (transformers' model_type "ernie4_5_moe"): a softmax, and a bias for the choice.

No torch. Baidu, "ERNIE 4.5 Technical Report", 2025. Rotated pairs lie side by side. Layers that predict more tokens at
once are left out.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import IGNORED, LlamaLike, switched
from h2o_flexgen.models.mixture import EXPERTS, SHARED, names_beside_dense, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, Stored, pairs_apart

_CHOICES = ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias")

_LEAST = 1e-6


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["use_bias"])
    if read.number("moe_norm_min", 1e-12) > _LEAST:
        raise read.error("moe_norm_min", f"at most {_LEAST:g}, which no sum of weights is below")
    size, layers = read.whole("moe_intermediate_size", 1536), range(spec.num_layers)
    # Both bounds are layers; -1 stands for the last.
    first, step = read.count("moe_layer_start_index", 1), read.whole("moe_layer_interval", 1)
    ends = {**dict.fromkeys(("moe_layer_end_index",), -1), **read.values()}["moe_layer_end_index"]
    last = spec.num_layers - 1 if ends == -1 else read.count("moe_layer_end_index", 0)
    experts = read_experts(
        read,
        64,
        6,
        size,
        choice_bias=True,
        shared_size=size * read.count("moe_num_shared_experts", 2),
        shared_gate=False,
        dense=tuple(layer for layer in layers if (layer + 1) % step or not first <= layer <= last),
    )
    return switched(spec, experts=experts)


def _names(spec: ModelSpec) -> Names:
    names = names_beside_dense(spec, {**EXPERTS, **SHARED, "mlp.choice": _CHOICES[0]})
    count = 0 if spec.arch.experts is None else spec.arch.experts.count
    for name in (name for name in names if name.endswith(".mlp.choice")):
        layer = name.split(".")[1]
        places = (f"{prefix}layers.{layer}.{choice}" for choice in _CHOICES for prefix in ("model.", ""))
        names[name] = tuple(Stored(place, rows=count, shape=(1, count)) for place in places)
    return pairs_apart(spec, names)


FAMILY = LlamaLike(
    "ernie4_5_moe",
    experts=True,
    rotary=partial(read_rotary, theta=5e5),
    more=_more,
    checkpoint_names=_names,
    ignored=(*IGNORED, r"\bmtp_"),
)
