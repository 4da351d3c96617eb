"""Granite 3 with experts (transformers' model_type "granitemoe"): four multipliers, and experts fused on the hub too.

No torch. IBM Granite Team, "Granite 3.0 Language Models", 2024.
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import granite
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, switched
from h2o_flexgen.models.mixture import EXPERTS, either, mixture_names, read_experts
from h2o_flexgen.models.stored import Names

_MOE = "block_sparse_moe"
_OLD = {"gate_up": f"{_MOE}.input_linear.weight", "down": f"{_MOE}.output_linear.weight"}
_NEW = {"gate_up": f"{_MOE}.experts.gate_up_proj", "down": f"{_MOE}.experts.down_proj"}


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return granite.multiplied(switched(spec, experts=read_experts(read, 8, 2, spec.ffn_size, router="chosen")), read)


def _names(spec: ModelSpec) -> Names:
    parts = {part: name for part, name in EXPERTS.items() if ".experts." not in part}
    old = mixture_names(spec, {**parts, "mlp.router": f"{_MOE}.router.layer"}, _OLD)
    new = mixture_names(spec, {**parts, "mlp.router": f"{_MOE}.router"}, _NEW)
    return either(old, new)


FAMILY = LlamaLike("granitemoe", experts=True, more=_more, checkpoint_names=_names)
