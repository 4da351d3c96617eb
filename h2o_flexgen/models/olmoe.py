"""OLMoE-1B-7B (transformers' model_type "olmoe"): 64 small experts, eight for each token; q and k normed as a whole.

No torch. Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", arXiv 2409.02060.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, read_spec
from h2o_flexgen.models.mixture import read_experts

DEFAULTS = Defaults(
    vocab_size=50304,
    hidden_size=2048,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    eos_token_id=50279,
    pad_token_id=1,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have OlmoeConfig's defaults. Raises ModelError."""
    read.refuse(["sliding_window"])
    spec, bias = read_spec(read, "olmoe", DEFAULTS), read.flag("attention_bias", False)
    experts = read_experts(read, 64, 8, spec.ffn_size, normalised=read.flag("norm_topk_prob", False))
    clip = read.number("clip_qkv") if "clip_qkv" in read else None
    arch = replace(spec.arch, qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_joint=True, clip_qkv=clip)
    return replace(spec, arch=replace(arch, experts=experts))
