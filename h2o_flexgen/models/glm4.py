"""GLM-4-0414, dense (transformers' model_type "glm4"): norms before and after each half, half of each head turned.

No torch. GLM Team, "ChatGLM", arXiv 2406.12793. Rotated pairs lie side by side; gate and up are one tensor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, Defaults, plain_names, read_spec
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, fused, pairs_apart

DEFAULTS = Defaults(
    vocab_size=151552,
    hidden_size=4096,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
    pad_token_id=151329,
)

_PARTS = {
    **PARTS,
    "attn.post_norm": "post_self_attn_layernorm",
    "mlp.post_norm": "post_mlp_layernorm",
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
}


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Glm4Config's defaults. Raises ModelError."""
    read = read.filled(eos_token_id=[151329, 151336, 151338])
    spec = read_spec(read, "glm4", DEFAULTS, partial(read_rotary, share=0.5))
    return replace(spec, arch=replace(spec.arch, post_norms=True, qkv_bias=read.flag("attention_bias", True)))


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor where a checkpoint keeps it: the gate before up."""
    names, ffn = Names(plain_names(spec, _PARTS)), spec.ffn_size
    for name, places in plain_names(spec, _PARTS).items():
        if ".gate." in name or ".up." in name:
            start = 0 if ".gate." in name else ffn
            names[name] = fused(places, [(start, start + ffn)], 2 * ffn)
    return pairs_apart(spec, names)
