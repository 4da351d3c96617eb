"""Seed-OSS 36B (transformers' model_type "seed_oss"): Llama with biases on q, k and v, and wide heads.

No torch. ByteDance Seed Team, "Seed-OSS Open-Source Models", 2025. `pretraining_tp` splits products without changing
them, and is not looked at.
"""

from h2o_flexgen.models.llama_like import LlamaLike, switched

FAMILY = LlamaLike(
    "seed_oss",
    more=lambda spec, read: switched(spec, output_bias=read.flag("attention_out_bias", False)),
)
