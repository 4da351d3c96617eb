"""Phi-3, 3.5 and 4 mini, and Phi-4 (transformers' model_type "phi3"): Llama with fused projections, and LongRoPE.

No torch. Abdin et al., "Phi-3 Technical Report", arXiv 2404.14219.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, Defaults, everywhere, plain_names, read_spec
from h2o_flexgen.models.rope_fields import rope_kind, rope_section, rotary_spec, turned_dimensions
from h2o_flexgen.models.stored import Names, fused

DEFAULTS = Defaults(
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=32000,
    pad_token_id=32000,
)

_FUSED = {
    "attn.q": "self_attn.qkv_proj",
    "attn.k": "self_attn.qkv_proj",
    "attn.v": "self_attn.qkv_proj",
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
}
_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Early files call LongRoPE su or yarn."""


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Phi3Config's defaults. Raises ModelError."""
    spec = read_spec(read, "phi3", DEFAULTS, _rotary)
    return replace(spec, arch=everywhere(spec.arch, read, read.whole_or_null("sliding_window", None), spec.num_layers))


def _rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    """Its own: the context before stretching is outside of the object with the other fields, and heads turn in part."""
    fields = rope_section(read).filled(
        rope_theta=read.number("rope_theta", 10000.0), partial_rotary_factor=read.number("partial_rotary_factor", 1.0)
    )
    dim = turned_dimensions(fields, head_dim)
    original = read.whole("original_max_position_embeddings", 4096)
    spec = rotary_spec(fields, dim, positions, original, rope_kind(fields, _KINDS))
    return replace(spec, recomputed=spec.scaling == "longrope")


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor where a checkpoint keeps it: q, k and v one after another, and the gate before up."""
    query, kv, ffn = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.ffn_size
    spans = {
        "attn.q": (0, query),
        "attn.k": (query, query + kv),
        "attn.v": (query + kv, query + 2 * kv),
        "mlp.gate": (0, ffn),
        "mlp.up": (ffn, 2 * ffn),
    }
    names: Names = {}
    for name, places in plain_names(spec, {**PARTS, **_FUSED}).items():
        part = ".".join(name.split(".")[2:4])
        rows = 2 * ffn if part.startswith("mlp") else query + 2 * kv
        names[name] = fused(places, [spans[part]], rows) if part in spans else places
    return names
