"""Qwen3-30B-A3B and 235B-A22B (transformers' model_type "qwen3_moe"): Qwen3 with 128 experts, eight for each token.

No torch. Yang et al., "Qwen3 Technical Report", arXiv 2505.09388.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, everywhere, read_spec, window_in_use
from h2o_flexgen.models.mixture import dense_layers, read_experts

DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=32768,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Qwen3MoeConfig's defaults. Raises ModelError."""
    spec, bias = read_spec(read, "qwen3_moe", DEFAULTS), read.flag("attention_bias", False)
    experts = read_experts(
        read,
        128,
        8,
        read.whole("moe_intermediate_size", 768),
        normalised=read.flag("norm_topk_prob", False),
        dense=dense_layers(read, spec.num_layers),
    )
    arch = replace(spec.arch, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=experts)
    return replace(spec, arch=everywhere(arch, read, window_in_use(read), spec.num_layers))
