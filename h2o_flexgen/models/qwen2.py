"""Qwen 1.5, 2 and 2.5 (transformers' model_type "qwen2"): Llama with biases on q, k and v.

No torch. Yang et al., "Qwen2.5 Technical Report", arXiv 2412.15115.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, from_layer_on, read_spec

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=32768,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Qwen2Config's defaults. Raises ModelError."""
    spec = read_spec(read, "qwen2", DEFAULTS)
    return replace(spec, arch=from_layer_on(replace(spec.arch, qkv_bias=True), read, spec.num_layers))
