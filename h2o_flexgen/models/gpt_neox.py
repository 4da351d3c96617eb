"""GPT-NeoX and Pythia (transformers' model_type "gpt_neox"): parallel halves, partly turned heads, q, k and v fused.

No torch. Black et al., "GPT-NeoX-20B", arXiv 2204.06745; Biderman et al., "Pythia", arXiv 2304.01373.
"""

from __future__ import annotations

from h2o_flexgen.config.model.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ACTIVATIONS, ConfigReader
from h2o_flexgen.models.rope_fields import context, rope_section, rotary_spec, turned_dimensions
from h2o_flexgen.models.stored import Names, Stored, fused, named

IGNORED: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$", r"\.attention\.bias$", r"\.masked_bias$")
"""Regular expressions, to be searched for, of tensors that may be in a checkpoint and are not weights."""

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


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have GPTNeoXConfig's defaults. Raises ModelError."""
    hidden, heads = read.whole("hidden_size", 6144), read.whole("num_attention_heads", 64)
    head_dim = read.divide("hidden_size", hidden, "num_attention_heads", heads)
    positions = read.whole("max_position_embeddings", 2048)
    rotary, bias = _rotary(read, head_dim, positions), read.flag("attention_bias", True)
    return ModelSpec(
        name=read.name,
        vocab_size=read.whole("vocab_size", 50432),
        hidden_size=hidden,
        ffn_size=read.whole("intermediate_size", 24576),
        num_layers=read.whole("num_hidden_layers", 44),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        embed_dim=hidden,
        max_positions=context(rotary, positions),
        arch=ArchSpec(
            family="gpt_neox",
            norm_eps=read.number("layer_norm_eps", 1e-5),
            activation=read.choice("hidden_act", "gelu", ACTIVATIONS),
            qkv_bias=bias,
            output_bias=bias,
            parallel=read.flag("use_parallel_residual", True),
            positions="rotary",
            rotary=rotary,
            tied_head=read.flag("tie_word_embeddings", False),
        ),
        dtype=read.dtype("float32"),
        **read.special_tokens(bos=0, eos=2, pad=None),
    )


def _rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    """Old files call the base rotary_emb_base and the share of each head that turns rotary_pct."""
    fields = rope_section(read).filled(
        rope_theta=read.number("rotary_emb_base", 10000.0), partial_rotary_factor=read.number("rotary_pct", 0.25)
    )
    dim = turned_dimensions(fields, head_dim)
    return rotary_spec(fields, dim, positions, read.whole_or_null("original_max_position_embeddings", None))


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor where a checkpoint keeps it; q, k and v lie head by head in one fused tensor."""
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
