"""OLMoE-1B-7B (transformers' model_type "olmoe"): 64 small experts, eight for each token; q and k normed as a whole.

No torch. Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", arXiv 2409.02060.
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, switched
from h2o_flexgen.models.mixture import mixture_names, read_experts


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["sliding_window"])
    experts = read_experts(read, 64, 8, spec.ffn_size, normalised=read.flag("norm_topk_prob", False))
    return switched(spec, clip_qkv=read.number("clip_qkv") if "clip_qkv" in read else None, experts=experts)


FAMILY = LlamaLike(
    "olmoe",
    experts=True,
    switches={"qk_norm": True, "qk_norm_joint": True},
    more=_more,
    checkpoint_names=mixture_names,
)
