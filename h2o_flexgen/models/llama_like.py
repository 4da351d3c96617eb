"""What Llama and the families built like it share: the fields of their config.json, and their checkpoint names.

No torch. Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv 2302.13971.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from h2o_flexgen.config.model.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ACTIVATIONS, ConfigReader
from h2o_flexgen.models.rope_fields import context, read_rotary
from h2o_flexgen.models.stored import Names

IGNORED: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
"""Regular expressions, to be searched for, of tensors that may be in a checkpoint and are no weights."""

PARTS = {
    "attn.norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.up_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.down": "mlp.down_proj",
}
"""The parts of a layer, as checkpoints call them."""

_OUTER = {"embed.tokens": "embed_tokens.weight", "head.norm.weight": "norm.weight"}


@dataclass(frozen=True)
class Defaults:
    """What a family's config class in transformers has for the keys that a config.json leaves out."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None


def read_spec(
    read: ConfigReader,
    name: str,
    family: str,
    defaults: Defaults,
    rotary_of: Callable[[ConfigReader, int, int], RotarySpec] = read_rotary,
) -> ModelSpec:
    """The ModelSpec of a decoder of RMS norms, rotary positions and a gated MLP, without any bias. Raises ModelError.

    `rotary_of` (config, head_dim, max_position_embeddings) reads the rotary positions of all layers.
    """
    hidden = read.whole("hidden_size", defaults.hidden_size)
    heads = read.whole("num_attention_heads", defaults.num_attention_heads)
    head_dim = read.whole_or_null("head_dim", defaults.head_dim)
    if head_dim is None:
        head_dim = read.divide("hidden_size", hidden, "num_attention_heads", heads)
    positions = read.whole("max_position_embeddings", defaults.max_position_embeddings)
    rotary = rotary_of(read, head_dim, positions)
    bos = read.token_id("bos_token_id", defaults.bos_token_id)
    eos = read.token_ids("eos_token_id", defaults.eos_token_id)
    return ModelSpec(
        name=name,
        vocab_size=read.whole("vocab_size", defaults.vocab_size),
        hidden_size=hidden,
        ffn_size=read.whole("intermediate_size", defaults.intermediate_size),
        num_layers=read.whole("num_hidden_layers", defaults.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=read.whole_or_null("num_key_value_heads", defaults.num_key_value_heads) or heads,
        head_dim=head_dim,
        embed_dim=hidden,
        max_positions=context(rotary, positions),
        arch=ArchSpec(
            family=family,
            norm="rmsnorm",
            norm_eps=read.number("rms_norm_eps", defaults.rms_norm_eps),
            activation=read.choice(defaults.activation_key, defaults.activation, ACTIVATIONS),
            gated_mlp=True,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            positions="rotary",
            rotary=rotary,
            tied_head=read.flag("tie_word_embeddings", defaults.tie_word_embeddings),
        ),
        bos_token_id=bos if bos is not None else (eos[0] if eos else 0),
        eos_token_id=eos[0] if len(eos) == 1 else eos,
        pad_token_id=read.token_id("pad_token_id", defaults.pad_token_id),
        dtype=read.dtype("float32"),
    )


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor the names it may have in a checkpoint, the usual one first."""
    return {**plain_names(spec, PARTS)}


def plain_names(spec: ModelSpec, parts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The same with the names of `parts` for the parts of a layer."""
    tensors = [tensor.name for group in spec.weight_groups for tensor in group.tensors]
    return {
        name: ("lm_head.weight",)
        if name == "head.vocab"
        else tuple(prefix + _inner_name(name, parts) for prefix in ("model.", ""))
        for name in tensors
    }


def _inner_name(canonical: str, parts: Mapping[str, str]) -> str:
    """`layers.0.mlp.up_proj.weight` for `layers.0.mlp.up.weight`, and so on."""
    if canonical in _OUTER:
        return _OUTER[canonical]
    _, layer, half, part, suffix = canonical.split(".")
    return f"layers.{layer}.{parts[f'{half}.{part}']}.{suffix}"
