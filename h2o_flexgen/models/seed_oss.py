"""Seed-OSS 36B (transformers' model_type "seed_oss"): Llama with biases on q, k and v, and wide heads.

No torch. ByteDance Seed Team, "Seed-OSS Open-Source Models", 2025. `pretraining_tp` splits products without changing
them, and is not looked at.
"""

from h2o_flexgen.models.llama_like import LlamaLike, switched

FAMILY = LlamaLike(
    "seed_oss",
    vocab_size=155136,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=80,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=524288,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=1,
    attention_bias=True,
    mlp_bias=False,
    more=lambda spec, read: switched(spec, output_bias=read.flag("attention_out_bias", False)),
)
