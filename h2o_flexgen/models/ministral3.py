"""Ministral 3 (transformers' model_type "ministral3"): Mistral with YaRN, whose queries grow along a long sequence.

No torch. Mistral AI, "Ministral 3", arXiv 2601.08584. Inside of `mistral3`, too: see nested.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, everywhere, read_spec
from h2o_flexgen.models.rope_fields import check_whole, rope_section, rotary_spec

DEFAULTS = Defaults(
    vocab_size=131072,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=34,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=262144,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=11,
)
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Ministral3Config's defaults. Raises ModelError."""
    spec = read_spec(read, "ministral3", DEFAULTS, _rotary)
    window = read.whole_or_null("sliding_window", None)
    return replace(spec, arch=everywhere(spec.arch, read, window, spec.num_layers))


def _rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    fields = rope_section(read)
    fields = fields if fields.values() else fields.filled(**_YARN)
    fields = fields.filled(rope_theta=read.number("rope_theta", 10000.0))
    check_whole(fields, head_dim)
    grown = fields.without_zeros("llama_4_scaling_beta")
    growth = grown.number("llama_4_scaling_beta") if "llama_4_scaling_beta" in grown else 0.0
    trained = fields.whole("original_max_position_embeddings") if growth else 0
    return replace(rotary_spec(fields, head_dim, positions), growth=growth, grows_every=trained)
