"""Granite 3 and 4, dense (transformers' model_type "granite"): Llama with four multipliers.

No torch. IBM Granite Team, "Granite 3.0 Language Models", 2024.
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, switched


def multiplied(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """`spec` with what Granite multiplies: logits of attention, embeddings, what each half adds, and logits."""
    return switched(
        spec,
        attention_scale=read.number("attention_multiplier", 1.0),
        embed_scale=read.number("embedding_multiplier", 1.0),
        residual_scale=read.number("residual_multiplier", 1.0),
        logit_scale=1 / read.number("logits_scaling", 1.0),
    )


FAMILY = LlamaLike("granite", more=multiplied)
