"""Granite 3 and 4: Llama with four multipliers. No torch. IBM Granite Team, "Granite 3.0 Language Models", 2024.

granite     dense
granitemoe  with experts, which are fused on the hub too
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, switched
from h2o_flexgen.models.mixture import EXPERTS, either, mixture_names, read_experts
from h2o_flexgen.models.stored import Names

_MOE = "block_sparse_moe"
_OLD = {"gate_up": f"{_MOE}.input_linear.weight", "down": f"{_MOE}.output_linear.weight"}
_NEW = {"gate_up": f"{_MOE}.experts.gate_up_proj", "down": f"{_MOE}.experts.down_proj"}


def _multiplied(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Logits of attention, embeddings, what each half adds, and logits are multiplied."""
    return switched(
        spec,
        attention_scale=read.number("attention_multiplier", 1.0),
        embed_scale=read.number("embedding_multiplier", 1.0),
        residual_scale=read.number("residual_multiplier", 1.0),
        logit_scale=1 / read.number("logits_scaling", 1.0),
    )


def _mixture(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return _multiplied(switched(spec, experts=read_experts(read, 8, 2, spec.ffn_size, router="chosen")), read)


def _names(spec: ModelSpec) -> Names:
    parts = {part: name for part, name in EXPERTS.items() if ".experts." not in part}
    old = mixture_names(spec, {**parts, "mlp.router": f"{_MOE}.router.layer"}, _OLD)
    new = mixture_names(spec, {**parts, "mlp.router": f"{_MOE}.router"}, _NEW)
    return either(old, new)


FAMILIES = (
    LlamaLike("granite", more=_multiplied),
    LlamaLike("granitemoe", experts=True, more=_mixture, checkpoint_names=_names),
)
