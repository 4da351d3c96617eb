"""Command R7B and Command A (transformers' model_type "cohere2"): parallel halves that share a norm.

No torch. Cohere, "Command A", arXiv 2504.00698. Three of four layers have a window and rotary positions, whose pairs
lie side by side; the fourth sees everything and has none.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, Defaults, by_layer, everything_seen, plain_names, read_spec
from h2o_flexgen.models.stored import Names, pairs_apart

DEFAULTS = Defaults(
    vocab_size=256000,
    hidden_size=8192,
    intermediate_size=22528,
    num_hidden_layers=40,
    num_attention_heads=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    bos_token_id=5,
    eos_token_id=255001,
    pad_token_id=0,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Cohere2Config's defaults. Raises ModelError."""
    read.refuse(["use_qk_norm"])
    spec, bias = read_spec(read, "cohere2", DEFAULTS), read.flag("attention_bias", False)
    arch = replace(
        spec.arch,
        norm="layernorm",
        norm_bias=False,
        norm_eps=read.number("layer_norm_eps", 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        parallel=True,
        one_norm=True,
        logit_scale=read.number("logit_scale", 0.0625),
    )
    period = 1 if "layer_types" in read else read.whole("sliding_window_pattern", 4)
    windowed = [(layer + 1) % period != 0 for layer in range(spec.num_layers)]
    arch = by_layer(arch, read, read.whole_or_null("sliding_window", 4096), windowed)
    return replace(spec, arch=replace(arch, unrotated=everything_seen(arch, spec.num_layers)))


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor the names it may have in a checkpoint, the usual one first."""
    return pairs_apart(spec, {**plain_names(spec, {**PARTS, "mlp.norm": PARTS["attn.norm"]})})
