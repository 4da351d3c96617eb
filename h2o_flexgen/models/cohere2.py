"""Command R7B and Command A (transformers' model_type "cohere2"): parallel halves that share a norm.

No torch. Cohere, "Command A", arXiv 2504.00698. Three of four layers have a window and rotary positions, whose pairs
lie side by side; the fourth sees everything and has none.
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, LlamaLike, all_but_every, everything_seen, plain_names, switched
from h2o_flexgen.models.stored import pairs_apart


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["use_qk_norm"])
    scale, eps = read.number("logit_scale", 0.0625), read.number("layer_norm_eps", 1e-5)
    period = 1 if "layer_types" in read else read.whole("sliding_window_pattern", 4)
    spec = switched(spec, logit_scale=scale, norm_eps=eps)
    spec = all_but_every(spec, read, read.whole_or_null("sliding_window", 4096), period)
    return switched(spec, unrotated=everything_seen(spec))


FAMILY = LlamaLike(
    "cohere2",
    switches={"norm": "layernorm", "norm_bias": False, "parallel": True, "one_norm": True},
    more=_more,
    checkpoint_names=lambda spec: pairs_apart(spec, plain_names(spec, {**PARTS, "mlp.norm": PARTS["attn.norm"]})),
)
