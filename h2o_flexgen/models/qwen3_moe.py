"""Qwen3-30B-A3B and 235B-A22B (transformers' model_type "qwen3_moe"): Qwen3 with 128 experts, eight for each token.

No torch. Yang et al., "Qwen3 Technical Report", arXiv 2505.09388.
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, everywhere, switched, window_in_use
from h2o_flexgen.models.mixture import dense_layers, mixture_names, read_experts


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    experts = read_experts(
        read,
        128,
        8,
        read.whole("moe_intermediate_size", 768),
        normalised=read.flag("norm_topk_prob", False),
        dense=dense_layers(read, spec.num_layers),
    )
    return everywhere(switched(spec, experts=experts), read, window_in_use(read))


FAMILY = LlamaLike("qwen3_moe", experts=True, switches={"qk_norm": True}, more=_more, checkpoint_names=mixture_names)
