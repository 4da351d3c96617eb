"""Families whose checkpoints keep the rows of projections in another way: fused, or in another order. No torch.

cohere2   Command R7B and Command A: rotated pairs lie side by side; parallel halves that share a norm; three of four
          layers have a window and rotary positions, the fourth sees everything and has none. Cohere, "Command A",
          arXiv 2504.00698
glm4      GLM-4-0414, dense: pairs side by side, norms before and after each half, half of each head turned, gate and up
          in one tensor. GLM Team, "ChatGLM", arXiv 2406.12793
phi3      Phi-3, 3.5 and 4 mini, and Phi-4: Llama with fused projections, and LongRoPE. Abdin et al., "Phi-3 Technical
          Report", arXiv 2404.14219
gpt_neox  GPT-NeoX and Pythia: parallel halves, partly turned heads, q, k and v fused head by head. Black et al.,
          "GPT-NeoX-20B", arXiv 2204.06745; Biderman et al., "Pythia", arXiv 2304.01373
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import (
    IGNORED,
    PARTS,
    LlamaLike,
    everywhere,
    plain_names,
    switched,
    unrotated_where_seen,
)
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, Stored, named, one_after_another, pairs_apart

_GLM_NORMS = {"attn.post_norm": "post_self_attn_layernorm", "mlp.post_norm": "post_mlp_layernorm"}
_PHI_ROPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""Early files call LongRoPE su or yarn."""
_NEOX_PARTS = {
    "attn.norm": "input_layernorm",
    "attn.o": "attention.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_NEOX_OUTER = {
    "embed.tokens": "embed_in.weight",
    "head.norm.weight": "final_layer_norm.weight",
    "head.norm.bias": "final_layer_norm.bias",
}


def _cohere(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["use_qk_norm"])
    scale, eps = read.number("logit_scale", 0.0625), read.number("layer_norm_eps", 1e-5)
    spec = switched(spec, logit_scale=scale, norm_eps=eps)
    return unrotated_where_seen(spec, read, read.whole_or_null("sliding_window", 4096))


def _gate_up(spec: ModelSpec) -> dict[str, Stored]:
    return one_after_another("mlp.gate_up_proj", dict.fromkeys(("mlp.gate", "mlp.up"), spec.ffn_size))


def _phi_rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    """Its own: the context before stretching is outside of the object with the other fields, and heads turn in part."""
    read = read.filled(original_max_position_embeddings=4096)
    spec = read_rotary(read, head_dim, positions, share=1.0, kinds=_PHI_ROPES)
    return replace(spec, recomputed=spec.scaling == "longrope")


def _phi_names(spec: ModelSpec) -> Names:
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = one_after_another("self_attn.qkv_proj", {"attn.q": query, "attn.k": kv, "attn.v": kv})
    return plain_names(spec, {**PARTS, **qkv, **_gate_up(spec)})


def _neox_rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    """Old files call the base rotary_emb_base and the share of each head that turns rotary_pct."""
    theta, share = read.number("rotary_emb_base", 10000.0), read.number("rotary_pct", 0.25)
    read = read.replaced(rope_theta=theta, partial_rotary_factor=share)
    return read_rotary(read, head_dim, positions, share=share)


def _neox(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    parallel = read.flag("use_parallel_residual", True)
    return switched(spec, norm_eps=read.number("layer_norm_eps", 1e-5), parallel=parallel)


def _neox_names(spec: ModelSpec) -> Names:
    """q, k and v lie in one tensor: the rows of each head are its q, then its k, then its v."""
    dim, rows, parts = spec.head_dim, 3 * spec.num_heads * spec.head_dim, dict[str, str | Stored](_NEOX_PARTS)
    for place, part in enumerate(("attn.q", "attn.k", "attn.v")):
        spans = tuple((start, start + dim) for start in range(place * dim, rows, 3 * dim))
        parts[part] = Stored("attention.query_key_value", spans, rows)
    return named(spec, ("gpt_neox.", ""), _NEOX_OUTER, parts, ("embed_out.weight", "lm_head.weight"))


FAMILIES = (
    LlamaLike(
        "cohere2",
        switches={"norm": "layernorm", "norm_bias": False, "parallel": True},
        more=_cohere,
        checkpoint_names=lambda spec: pairs_apart(spec, plain_names(spec, {**PARTS, "mlp.norm": PARTS["attn.norm"]})),
    ),
    LlamaLike(
        "glm4",
        filled=lambda read: read.filled(eos_token_id=[151329, 151336, 151338]),
        rotary=partial(read_rotary, share=0.5),
        switches={"post_norms": True, "output_bias": False},
        checkpoint_names=lambda spec: pairs_apart(spec, plain_names(spec, {**PARTS, **_GLM_NORMS, **_gate_up(spec)})),
    ),
    LlamaLike(
        "phi3",
        rotary=_phi_rotary,
        more=lambda spec, read: everywhere(spec, read, read.whole_or_null("sliding_window", None)),
        checkpoint_names=_phi_names,
    ),
    LlamaLike(
        "gpt_neox",
        activation="gelu",
        filled=lambda read: read.replaced(num_key_value_heads=None, head_dim=None),
        rotary=_neox_rotary,
        switches={"norm": "layernorm", "gated_mlp": False, "mlp_bias": True},
        more=_neox,
        checkpoint_names=_neox_names,
        ignored=(*IGNORED, r"\.attention\.bias$", r"\.masked_bias$"),
    ),
)
