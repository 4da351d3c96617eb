"""Phi-3, 3.5 and 4 mini, and Phi-4 (transformers' model_type "phi3"): Llama with fused projections, and LongRoPE.

No torch. Abdin et al., "Phi-3 Technical Report", arXiv 2404.14219.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, LlamaLike, everywhere, plain_names
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, one_after_another

_PARTS = {
    **PARTS,
    "attn.q": "self_attn.qkv_proj",
    "attn.k": "self_attn.qkv_proj",
    "attn.v": "self_attn.qkv_proj",
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
}
_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Early files call LongRoPE su or yarn."""


def _rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    """Its own: the context before stretching is outside of the object with the other fields, and heads turn in part."""
    read = read.filled(original_max_position_embeddings=4096)
    spec = read_rotary(read, head_dim, positions, share=1.0, kinds=_KINDS)
    return replace(spec, recomputed=spec.scaling == "longrope")


def _names(spec: ModelSpec) -> Names:
    query, kv, ffn = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.ffn_size
    sizes = {"attn.q": query, "attn.k": kv, "attn.v": kv, "mlp.gate": ffn, "mlp.up": ffn}
    return one_after_another(plain_names(spec, _PARTS), sizes)


FAMILY = LlamaLike(
    "phi3",
    rotary=_rotary,
    more=lambda spec, read: everywhere(spec, read, read.whole_or_null("sliding_window", None)),
    checkpoint_names=_names,
)
