"""Mistral 7B and its kin (transformers' model_type "mistral"): Llama with a sliding window in every layer, or none.

No torch. Jiang et al., "Mistral 7B", arXiv 2310.06825.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, everywhere, read_spec

DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    bos_token_id=1,
    eos_token_id=2,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have MistralConfig's defaults. Raises ModelError."""
    spec = read_spec(read, "mistral", DEFAULTS)
    window = read.whole_or_null("sliding_window", 4096)
    return replace(spec, arch=everywhere(spec.arch, read, window, spec.num_layers))
