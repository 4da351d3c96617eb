"""SmolLM3 (transformers' model_type "smollm3"): Llama whose every fourth layer has no positions.

No torch. Bakouch et al., "SmolLM3: smol, multilingual, long-context reasoner", 2025; Yang et al., "Rope to Nope and
Back Again", arXiv 2501.18795.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, by_layer, read_spec
from h2o_flexgen.models.rope_fields import read_rotary

DEFAULTS = Defaults(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    bos_token_id=128000,
    eos_token_id=128001,
    pad_token_id=128004,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have SmolLM3Config's defaults. Raises ModelError."""
    spec = read_spec(read, "smollm3", DEFAULTS, partial(read_rotary, theta=2e6))
    bias, layers = read.flag("attention_bias", False), range(spec.num_layers)
    arch = replace(spec.arch, qkv_bias=bias, output_bias=bias, mlp_bias=read.flag("mlp_bias", False))
    turned = _turned(read, spec.num_layers)
    arch = replace(arch, unrotated=tuple(layer for layer in layers if not turned[layer]))
    window = read.whole_or_null("sliding_window", None) if read.flag("use_sliding_window", False) else None
    return replace(spec, arch=by_layer(arch, read, window, [window is not None and not turned[i] for i in layers]))


def _turned(read: ConfigReader, layers: int) -> list[bool]:
    """Of each layer, whether it has rotary positions."""
    listed = read.whole_list("no_rope_layers")
    if "no_rope_layers" not in read:
        interval = read.whole("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(listed) < layers or set(listed) - {0, 1}:
        raise read.error("no_rope_layers", f"a list of {layers} numbers, 1 for a layer with rotary positions, else 0")
    return [number == 1 for number in listed[:layers]]
