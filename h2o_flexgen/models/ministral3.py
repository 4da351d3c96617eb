"""Ministral 3 (transformers' model_type "ministral3"): Mistral with YaRN, whose queries grow along a long sequence.

No torch. Mistral AI, "Ministral 3", arXiv 2601.08584. Inside of `mistral3`, too: see nested.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, everywhere
from h2o_flexgen.models.rope_fields import read_rotary, rope_section

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    spec, fields = read_rotary(read, head_dim, positions, usual=_YARN), rope_section(read)
    fields = (fields if fields.values() else fields.filled(**_YARN)).without_zeros("llama_4_scaling_beta")
    if "llama_4_scaling_beta" not in fields:
        return spec
    trained = spec.original_positions or fields.whole("original_max_position_embeddings")
    return replace(spec, growth=fields.number("llama_4_scaling_beta"), grows_every=trained)


FAMILY = LlamaLike(
    "ministral3",
    rotary=_rotary,
    more=lambda spec, read: everywhere(spec, read, read.whole_or_null("sliding_window", None)),
)
