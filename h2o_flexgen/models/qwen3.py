"""Qwen3, dense (transformers' model_type "qwen3"): Llama whose queries and keys are normed head by head.

No torch. Yang et al., "Qwen3 Technical Report", arXiv 2505.09388.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import qwen2
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import from_layer_on, read_spec

DEFAULTS = replace(qwen2.DEFAULTS, head_dim=128)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Qwen3Config's defaults. Raises ModelError."""
    spec, bias = read_spec(read, "qwen3", DEFAULTS), read.flag("attention_bias", False)
    arch = replace(spec.arch, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return replace(spec, arch=from_layer_on(arch, read, spec.num_layers))
