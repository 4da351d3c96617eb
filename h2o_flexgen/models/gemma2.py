"""Gemma 2 (transformers' model_type "gemma2"): norms before and after each half, and soft caps on all logits.

No torch. "Gemma 2: Improving Open Language Models at a Practical Size", arXiv 2408.00118. Every second layer, from the
first on, sees a window.
"""

from __future__ import annotations

import math
from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, by_layer, read_spec

DEFAULTS = Defaults(
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
    pad_token_id=0,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Gemma2Config's defaults, and a null is no cap or no
    window. Raises ModelError."""
    read.refuse(["use_bidirectional_attention"])
    spec, bias = read_spec(read, "gemma2", DEFAULTS), read.flag("attention_bias", False)
    arch = replace(
        spec.arch,
        norm_offset=1.0,
        post_norms=True,
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=read.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_cap=read.number_or_null("attn_logit_softcapping", 50.0),
        embed_scale=math.sqrt(spec.hidden_size),
        logit_cap=read.number_or_null("final_logit_softcapping", 30.0),
    )
    windowed = [layer % 2 == 0 for layer in range(spec.num_layers)]
    return replace(spec, arch=by_layer(arch, read, read.whole_or_null("sliding_window", 4096), windowed))
