"""Llama 1 to 3 (transformers' model_type "llama"), and all models that are saved as such.

No torch. Touvron et al., arXiv 2302.13971 and 2307.09288; Grattafiori et al., "The Llama 3 Herd of Models",
arXiv 2407.21783.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, read_spec

DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
    bos_token_id=1,
    eos_token_id=2,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have LlamaConfig's defaults. Raises ModelError.

    `pretraining_tp` splits products without changing them, and is not looked at.
    """
    spec, bias = read_spec(read, "llama", DEFAULTS), read.flag("attention_bias", False)
    arch = replace(spec.arch, qkv_bias=bias, output_bias=bias, mlp_bias=read.flag("mlp_bias", False))
    return replace(spec, arch=arch)
