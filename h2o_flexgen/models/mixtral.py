"""Mixtral 8x7B and 8x22B (transformers' model_type "mixtral"): Mistral with experts, two of eight for each token.

No torch. Jiang et al., "Mixtral of Experts", arXiv 2401.04088.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, everywhere, switched
from h2o_flexgen.models.mixture import EXPERTS, mixture_names, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names

NUMBERED = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
}


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = everywhere(spec, read, read.whole_or_null("sliding_window", None))
    return switched(spec, experts=read_experts(read, 8, 2, spec.ffn_size))


def _names(spec: ModelSpec) -> Names:
    names, newer = (mixture_names(spec, parts) for parts in ({**EXPERTS, **NUMBERED}, EXPERTS))
    return {
        key: tuple(dict.fromkeys((*places, *newer[key]))) if "router" in key else places
        for key, places in names.items()
    }


FAMILY = LlamaLike("mixtral", experts=True, rotary=partial(read_rotary, theta=1e6), more=_more, checkpoint_names=_names)
