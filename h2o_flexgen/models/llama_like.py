"""Parts that Llama shares with the families built like it: the fields of their config.json, and their checkpoint names.

No torch. Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv 2302.13971. Layers that see a
sliding window of the latest tokens only: Beltagy et al., "Longformer", arXiv 2004.05150.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from h2o_flexgen.config.model.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ACTIVATIONS, ConfigReader
from h2o_flexgen.models.rope_fields import context, read_rotary
from h2o_flexgen.models.stored import Names, named

IGNORED: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
"""Regular expressions, to be searched for, of tensors that may be in a checkpoint and are not weights."""

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
_WINDOWED = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True)
class Defaults:
    """The defaults of a family's config class in transformers for the keys that a config.json leaves out."""

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
    return ModelSpec(
        name=read.name,
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
        dtype=read.dtype("float32"),
        **read.special_tokens(defaults.bos_token_id, defaults.eos_token_id, defaults.pad_token_id),
    )


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor the names it may have in a checkpoint, the usual one first."""
    return {**plain_names(spec, PARTS)}


def plain_names(spec: ModelSpec, parts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The same with the names of `parts` for the parts of a layer."""
    return named(spec, ("model.", ""), _OUTER, parts)


def by_layer(arch: ArchSpec, read: ConfigReader, window: int | None, usual: Sequence[bool]) -> ArchSpec:
    """`arch` with the windowed layers of `layer_types`, or, without that key, those where `usual` (one per layer) is.

    A windowed layer without a window is a ModelError.
    """
    windowed = read.words("layer_types", len(usual), _WINDOWED) if "layer_types" in read else usual
    layers = tuple(layer for layer, it_is in enumerate(windowed) if it_is)
    if not layers:
        return arch
    if window is None:
        raise read.error("sliding_window", f"a window in use, which layer {layers[0]} asks for")
    return replace(arch, window=window, window_layers=None if len(layers) == len(usual) else layers)


def everything_seen(arch: ArchSpec, layers: int) -> tuple[int, ...]:
    """The layers without a window."""
    return tuple(layer for layer in range(layers) if arch.window_of(layer) is None)


def window_in_use(read: ConfigReader) -> int | None:
    """The window of the Qwen families, which their configs give even where it is switched off."""
    return read.whole_or_null("sliding_window", 4096) if read.flag("use_sliding_window", False) else None


def from_layer_on(arch: ArchSpec, read: ConfigReader, layers: int) -> ArchSpec:
    """The windows of the Qwen families: used if `use_sliding_window`, from layer `max_window_layers` on."""
    window, first = window_in_use(read), read.count("max_window_layers", 28)
    return by_layer(arch, read, window, [window is not None and layer >= first for layer in range(layers)])


def everywhere(arch: ArchSpec, read: ConfigReader, window: int | None, layers: int) -> ArchSpec:
    """The windows of a family that has none or the same in every layer; `layer_types` that say other are refused."""
    plain = replace(arch, window=window)
    if by_layer(arch, read, window, [window is not None] * layers) != plain:
        raise read.error("layer_types", "the same for all layers, and sliding_attention only with a sliding_window")
    return plain
