"""OLMo 2 (transformers' model_type "olmo2"): norms after each half alone, queries and keys normed as a whole.

No torch. Team OLMo, "2 OLMo 2 Furious", arXiv 2501.00656.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.arch import ArchSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, Defaults, plain_names, read_spec
from h2o_flexgen.models.stored import Names

DEFAULTS = Defaults(
    vocab_size=50304,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    eos_token_id=50279,
    pad_token_id=1,
)

_NORMS = {"attn.post_norm": "post_attention_layernorm", "mlp.post_norm": "post_feedforward_layernorm"}


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Olmo2Config's defaults. Raises ModelError."""
    spec = read_spec(read, "olmo2", DEFAULTS)
    return replace(spec, arch=olmo(spec.arch, read))


def olmo(arch: ArchSpec, read: ConfigReader) -> ArchSpec:
    """`arch` with the switches of OLMo 2 and 3."""
    bias = read.flag("attention_bias", False)
    arch = replace(arch, pre_norm=False, post_norms=True, qk_norm=True, qk_norm_joint=True)
    return replace(arch, qkv_bias=bias, output_bias=bias)


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor the names it may have in a checkpoint, the usual one first."""
    return {**plain_names(spec, {**PARTS, **_NORMS})}
