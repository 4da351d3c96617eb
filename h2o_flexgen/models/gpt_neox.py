"""GPT-NeoX and Pythia (transformers' model_type "gpt_neox"): parallel halves, partly turned heads, q, k and v fused.

No torch. Black et al., "GPT-NeoX-20B", arXiv 2204.06745; Biderman et al., "Pythia", arXiv 2304.01373.
"""

from __future__ import annotations

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import IGNORED, LlamaLike, switched
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, Stored, fused, named

_PARTS = {
    "attn.norm": "input_layernorm",
    "attn.q": "attention.query_key_value",
    "attn.k": "attention.query_key_value",
    "attn.v": "attention.query_key_value",
    "attn.o": "attention.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_OUTER = {
    "embed.tokens": "embed_in.weight",
    "head.norm.weight": "final_layer_norm.weight",
    "head.norm.bias": "final_layer_norm.bias",
}


def _rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    """Old files call the base rotary_emb_base and the share of each head that turns rotary_pct."""
    theta, share = read.number("rotary_emb_base", 10000.0), read.number("rotary_pct", 0.25)
    read = read.replaced(rope_theta=theta, partial_rotary_factor=share)
    return read_rotary(read, head_dim, positions, share=share)


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    parallel = read.flag("use_parallel_residual", True)
    return switched(spec, norm_eps=read.number("layer_norm_eps", 1e-5), parallel=parallel)


def _names(spec: ModelSpec) -> Names:
    """q, k and v lie head by head in one fused tensor."""
    names: Names = {}
    for name, places in named(spec, ("gpt_neox.", ""), _OUTER, _PARTS, ("embed_out.weight", "lm_head.weight")).items():
        part = name.split(".")[-2]
        names[name] = _rows(spec, "qkv".index(part), places) if part in ("q", "k", "v") else places
    return names


def _rows(spec: ModelSpec, part: int, names: tuple[str | Stored, ...]) -> tuple[Stored, ...]:
    """Those of q (0), k (1) or v (2): the rows of each head are its q, then its k, then its v."""
    dim = spec.head_dim
    starts = (3 * dim * head + part * dim for head in range(spec.num_heads))
    return fused(names, ((start, start + dim) for start in starts), 3 * dim * spec.num_heads)


FAMILY = LlamaLike(
    "gpt_neox",
    activation="gelu",
    filled=lambda read: read.replaced(num_key_value_heads=None, head_dim=None),
    rotary=_rotary,
    switches={"norm": "layernorm", "gated_mlp": False, "mlp_bias": True},
    more=_more,
    checkpoint_names=_names,
    ignored=(*IGNORED, r"\.attention\.bias$", r"\.masked_bias$"),
)
