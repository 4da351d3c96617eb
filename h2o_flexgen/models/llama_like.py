"""Families built like Llama: what each has that others have not, and how its config.json is read by that.

No torch. Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv 2302.13971. Layers that see a
sliding window of the latest tokens only: Beltagy et al., "Longformer", arXiv 2004.05150.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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


def plain_names(spec: ModelSpec, parts: Mapping[str, str] = PARTS) -> Names:
    """For every canonical tensor the names it may have in a checkpoint, the usual one first; `parts` of a layer."""
    return named(spec, ("model.", ""), _OUTER, parts)


@dataclass(frozen=True)
class LlamaLike:
    """A family of decoders of RMS norms, rotary positions and a gated MLP, called `family` as its model_type.

    First come the defaults of its config class in transformers for the keys that a config.json leaves out.

    num_key_value_heads  None: as many as query heads
    head_dim        None: hidden_size / num_attention_heads
    attention_bias  of q, k, v and the output projection, and `mlp_bias`: the keys' defaults; None: no such key is read
    stretched       whether max_position_embeddings is the context after stretching by RoPE scaling
    experts         whether its layers have mixtures of experts
    filled          the config with values for some of the keys that it leaves out
    rotary          (config, head_dim, max_position_embeddings): the rotary positions of all layers
    switches        of ArchSpec, which all models of the family have
    more            (spec, config): the spec with what else a config.json of the family says
    checkpoint_names  see plain_names
    ignored         as IGNORED
    """

    family: str
    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    stretched: bool = False
    experts: bool = False
    filled: Callable[[ConfigReader], ConfigReader] = lambda read: read
    rotary: Callable[[ConfigReader, int, int], RotarySpec] = read_rotary
    switches: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[ModelSpec, ConfigReader], ModelSpec] = lambda spec, read: spec
    checkpoint_names: Callable[[ModelSpec], Names] = plain_names
    ignored: tuple[str, ...] = IGNORED

    def spec_from_config(self, read: ConfigReader) -> ModelSpec:
        """The ModelSpec of a config.json. Raises ModelError."""
        read = self.filled(read)
        hidden = read.whole("hidden_size", self.hidden_size)
        heads = read.whole("num_attention_heads", self.num_attention_heads)
        head_dim = read.whole_or_null("head_dim", self.head_dim)
        if head_dim is None:
            head_dim = read.divide("hidden_size", hidden, "num_attention_heads", heads)
        positions = read.whole("max_position_embeddings", self.max_position_embeddings)
        rotary = self.rotary(read, head_dim, positions)
        attention, mlp = (
            default is not None and read.flag(key, default)
            for key, default in (("attention_bias", self.attention_bias), ("mlp_bias", self.mlp_bias))
        )
        arch = ArchSpec(
            family=self.family,
            norm="rmsnorm",
            norm_eps=read.number("rms_norm_eps", self.rms_norm_eps),
            activation=read.choice(self.activation_key, self.activation, ACTIVATIONS),
            gated_mlp=True,
            qkv_bias=attention,
            output_bias=attention,
            mlp_bias=mlp,
            positions="rotary",
            rotary=rotary,
            tied_head=read.flag("tie_word_embeddings", self.tie_word_embeddings),
        )
        spec = ModelSpec(
            name=read.name,
            vocab_size=read.whole("vocab_size", self.vocab_size),
            hidden_size=hidden,
            ffn_size=read.whole("intermediate_size", self.intermediate_size),
            num_layers=read.whole("num_hidden_layers", self.num_hidden_layers),
            num_heads=heads,
            num_kv_heads=read.whole_or_null("num_key_value_heads", self.num_key_value_heads) or heads,
            head_dim=head_dim,
            embed_dim=hidden,
            max_positions=positions if self.stretched else context(rotary, positions),
            arch=replace(arch, **self.switches),
            dtype=read.dtype("float32"),
            **read.special_tokens(self.bos_token_id, self.eos_token_id, self.pad_token_id),
        )
        return self.more(spec, read)


def switched(spec: ModelSpec, **switches: Any) -> ModelSpec:
    """`spec` with other switches of its ArchSpec."""
    return replace(spec, arch=replace(spec.arch, **switches))


def by_layer(spec: ModelSpec, read: ConfigReader, window: int | None, usual: Sequence[bool]) -> ModelSpec:
    """`spec` with the windowed layers of `layer_types`, or, without that key, those where `usual` (one per layer) is.

    A windowed layer without a window is a ModelError.
    """
    windowed = read.words("layer_types", len(usual), _WINDOWED) if "layer_types" in read else usual
    layers = tuple(layer for layer, it_is in enumerate(windowed) if it_is)
    if not layers:
        return spec
    if window is None:
        raise read.error("sliding_window", f"a window in use, which layer {layers[0]} asks for")
    return switched(spec, window=window, window_layers=None if len(layers) == len(usual) else layers)


def all_but_every(spec: ModelSpec, read: ConfigReader, window: int | None, period: int) -> ModelSpec:
    """`by_layer` where every `period`th layer has no window; 1: none has one."""
    return by_layer(spec, read, window, [(layer + 1) % period != 0 for layer in range(spec.num_layers)])


def everything_seen(spec: ModelSpec) -> tuple[int, ...]:
    """The layers without a window."""
    return tuple(layer for layer in range(spec.num_layers) if spec.arch.window_of(layer) is None)


def window_in_use(read: ConfigReader) -> int | None:
    """The window of the Qwen families, which their configs give even where it is switched off."""
    return read.whole_or_null("sliding_window", 4096) if read.flag("use_sliding_window", False) else None


def from_layer_on(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """The windows of the Qwen families: used if `use_sliding_window`, from layer `max_window_layers` on."""
    window, first = window_in_use(read), read.count("max_window_layers", 28)
    return by_layer(spec, read, window, [window is not None and layer >= first for layer in range(spec.num_layers)])


def everywhere(spec: ModelSpec, read: ConfigReader, window: int | None) -> ModelSpec:
    """The windows of a family that has none or the same in every layer; `layer_types` that say other are refused."""
    plain = switched(spec, window=window)
    if by_layer(spec, read, window, [window is not None] * spec.num_layers) != plain:
        raise read.error("layer_types", "the same for all layers, and sliding_attention only with a sliding_window")
    return plain
