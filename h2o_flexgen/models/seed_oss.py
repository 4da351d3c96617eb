"""Seed-OSS 36B (transformers' model_type "seed_oss"): Llama with biases on q, k and v, and wide heads.

No torch. ByteDance Seed Team, "Seed-OSS Open-Source Models", 2025.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, read_spec

DEFAULTS = Defaults(
    vocab_size=155136,
    hidden_size=4096,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=80,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=524288,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=1,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have SeedOssConfig's defaults. Raises ModelError.

    `pretraining_tp` splits products without changing them, and is not looked at.
    """
    spec = read_spec(read, "seed_oss", DEFAULTS)
    arch = replace(
        spec.arch,
        qkv_bias=read.flag("attention_bias", True),
        output_bias=read.flag("attention_out_bias", False),
        mlp_bias=read.flag("mlp_bias", False),
    )
    return replace(spec, arch=arch)
