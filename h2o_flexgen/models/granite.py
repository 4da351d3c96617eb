"""Granite 3 and 4, dense (transformers' model_type "granite"): Llama with four multipliers.

No torch. IBM Granite Team, "Granite 3.0 Language Models", 2024.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import llama
from h2o_flexgen.models.fields import ConfigReader


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have GraniteConfig's defaults. Raises ModelError."""
    spec = llama.spec_from_config(read)
    return multiplied(replace(spec, arch=replace(spec.arch, family="granite")), read)


def multiplied(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """`spec` with what Granite multiplies: logits of attention, embeddings, what each half adds, and logits."""
    arch = replace(
        spec.arch,
        attention_scale=read.number("attention_multiplier", 1.0),
        embed_scale=read.number("embedding_multiplier", 1.0),
        residual_scale=read.number("residual_multiplier", 1.0),
        logit_scale=1 / read.number("logits_scaling", 1.0),
    )
    return replace(spec, arch=arch)
