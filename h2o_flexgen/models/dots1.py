"""dots.llm1 (transformers' model_type "dots1"): DeepSeek's router, queries and keys normed head by head.

No torch. rednote-hilab, "dots.llm1 Technical Report", arXiv 2506.05767.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, by_layer, read_spec
from h2o_flexgen.models.mixture import predicting_layers, read_experts, read_groups

DEFAULTS = Defaults(
    vocab_size=152064,
    hidden_size=4608,
    intermediate_size=10944,
    num_hidden_layers=62,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=2048,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Dots1Config's defaults, or, of experts, where that has
    none, the published model's. Raises ModelError."""
    spec, bias = read_spec(read, "dots1", DEFAULTS), read.flag("attention_bias", False)
    size = read.whole("moe_intermediate_size", 1408)
    experts = read_experts(
        read,
        128,
        6,
        size,
        normalised=read.flag("norm_topk_prob", False),
        shared_size=size * read.count("n_shared_experts", 2),
        shared_gate=False,
        dense=tuple(range(min(read.count("first_k_dense_replace", 0), spec.num_layers))),
    )
    arch = replace(spec.arch, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=read_groups(read, experts))
    arch = replace(arch, predicting=predicting_layers(read))
    window, first = read.whole_or_null("sliding_window", 4096), read.count("max_window_layers", 62)
    return replace(spec, arch=by_layer(arch, read, window, [layer >= first for layer in range(spec.num_layers)]))
