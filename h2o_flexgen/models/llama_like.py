"""Families built like Llama: the features in which they differ, and the reading of each one's config.json.

No torch. Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv 2302.13971. Layers that see a
sliding window of the latest tokens only: Beltagy et al., "Longformer", arXiv 2004.05150.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from h2o_flexgen.config.model.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ACTIVATIONS, ConfigReader
from h2o_flexgen.models.rope_fields import context, read_rotary
from h2o_flexgen.models.stored import Names, Parts, named

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

_KEYS = """
vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id eos_token_id pad_token_id attention_bias mlp_bias
"""
_ROWS = """
family        vocab hidden   ffn layers heads kv head positions       eps tied    bos    eos    pad qkv mlp
llama         32000   4096 11008     32    32  -    -      2048      1e-6   no      1      2      -  no  no
mistral       32000   4096 14336     32    32  8    -    131072      1e-6   no      1      2      -   -   -
ministral3   131072   4096 14336     34    32  8  128    262144      1e-5   no      1      2     11   -   -
qwen2        151936   4096 22016     32    32 32    -     32768      1e-6   no      -      -      -   -   -
qwen3        151936   4096 22016     32    32 32  128     32768      1e-6   no      -      -      -  no   -
granite       32000   4096 11008     32    32  -    -      2048      1e-6   no      1      2      -  no  no
olmo2         50304   4096 11008     32    32  -    -      2048      1e-5   no      -  50279      1  no   -
olmo3         50304   4096 11008     32    32  -    -      2048      1e-5   no      -  50279      1  no   -
exaone4      102400   4096 16384     32    32 32    -      2048      1e-5   no      0      2      -   -   -
cohere2      256000   8192 22528     40    64  -    -      8192      1e-6  yes      5 255001      0  no   -
glm4         151552   4096 13696     40    32  2  128    131072 1.5625e-7   no      -      - 151329 yes   -
smollm3      128256   2048 11008     36    16  4    -     32768      1e-6  yes 128000 128001 128004  no  no
seed_oss     155136   4096 27648     64    80  8  128    524288      1e-6   no      0      2      1 yes  no
phi3          32064   3072  8192     32    32  -    -      4096      1e-5   no      1  32000  32000   -   -
gemma2       256000   2304  9216     26     8  4  256      8192      1e-6  yes      2      1      0  no   -
gemma3_text  262208   2304  9216     26     8  4  256    131072      1e-6  yes      2      1      0  no   -
gpt_neox      50432   6144 24576     44    64  -    -      2048      1e-5   no      0      2      - yes   -
mixtral       32000   4096 14336     32    32  8    -    131072      1e-5   no      1      2      -   -   -
qwen2_moe    151936   2048  5632     24    16 16    -     32768      1e-6   no      -      -      -   -   -
qwen3_moe    151936   2048  6144     24    32  4    -     32768      1e-6   no      -      -      -  no   -
olmoe         50304   2048  2048     16    16  -    -      4096      1e-5   no      -  50279      1  no   -
granitemoe    32000   4096 11008     32    32  -    -      2048      1e-6   no      1      2      -  no   -
gpt_oss      201088   2880  2880     36    64  8   64    131072      1e-5   no      -      -      - yes   -
dots1        152064   4608 10944     62    32 32    -      2048      1e-6   no      -      -      -  no   -
ernie4_5_moe 103424   2560 12288     28    20  4    -    131072      1e-5  yes      1      2      0   -   -
glm4_moe     151552   4096 10944     46    96  8  128    131072      1e-5   no      -      -      -  no   -
hy_v3        120832   4096 13312     80    64  8  128    131072      1e-5   no      -      -      -  no   -
minimax_m2   200064   3072  1536     62    48  8  128    196608      1e-6   no 200034 200020      -   -   -
"""
_CELLS = {"-": "null", "yes": "true", "no": "false"}


DEFAULTS: dict[str, dict[str, Any]] = {
    family: dict(zip(_KEYS.split(), (json.loads(_CELLS.get(cell, cell)) for cell in cells), strict=True))
    for family, *cells in map(str.split, _ROWS.splitlines()[2:])
}
"""The defaults of transformers' config classes for keys that a config.json leaves out, by the family, then by the key.

"-" stands for null; with `attention_bias` and `mlp_bias` for a family that has no such key.
"""


def plain_names(spec: ModelSpec, parts: Parts = PARTS) -> Names:
    """For every canonical tensor the names it may have in a checkpoint, the usual one first; `parts` of a layer."""
    return named(spec, ("model.", ""), _OUTER, parts)


@dataclass(frozen=True)
class LlamaLike:
    """A family of decoders of RMS norms, rotary positions and a gated MLP, called `family` as its model_type.

    The defaults of config.json are in `DEFAULTS`. `attention_bias` is of q, k, v and the output projection; without
    `num_key_value_heads` there are as many as query heads, and `head_dim` is hidden_size / num_attention_heads.

    stretched       whether max_position_embeddings is the context after stretching by RoPE scaling
    experts         whether its layers have mixtures of experts
    filled          the config with values for some of the keys that it leaves out
    rotary          (config, head_dim, max_position_embeddings): the rotary positions of all layers
    switches        of ArchSpec, which all models of the family have
    more            (spec, config): the spec with the other keys of config.json in the family
    checkpoint_names, ignored  as plain_names and IGNORED
    """

    family: str
    activation_key: str = "hidden_act"
    activation: str = "silu"
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
        read, usual = self.filled(read), DEFAULTS[self.family]
        hidden, heads = (read.whole(key, usual[key]) for key in ("hidden_size", "num_attention_heads"))
        head_dim = read.whole_or_null("head_dim", usual["head_dim"])
        if head_dim is None:
            head_dim = read.divide("hidden_size", hidden, "num_attention_heads", heads)
        positions = read.whole("max_position_embeddings", usual["max_position_embeddings"])
        rotary = self.rotary(read, head_dim, positions)
        attention, mlp = (
            usual[key] is not None and read.flag(key, usual[key]) for key in ("attention_bias", "mlp_bias")
        )
        arch = ArchSpec(
            family=self.family,
            norm="rmsnorm",
            norm_eps=read.number("rms_norm_eps", usual["rms_norm_eps"]),
            activation=read.choice(self.activation_key, self.activation, ACTIVATIONS),
            gated_mlp=True,
            qkv_bias=attention,
            output_bias=attention,
            mlp_bias=mlp,
            positions="rotary",
            rotary=rotary,
            tied_head=read.flag("tie_word_embeddings", usual["tie_word_embeddings"]),
        )
        spec = ModelSpec(
            name=read.name,
            vocab_size=read.whole("vocab_size", usual["vocab_size"]),
            hidden_size=hidden,
            ffn_size=read.whole("intermediate_size", usual["intermediate_size"]),
            num_layers=read.whole("num_hidden_layers", usual["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=read.whole_or_null("num_key_value_heads", usual["num_key_value_heads"]) or heads,
            head_dim=head_dim,
            embed_dim=hidden,
            max_positions=positions if self.stretched else context(rotary, positions),
            arch=replace(arch, **self.switches),
            dtype=read.dtype("float32"),
            **read.special_tokens(usual["bos_token_id"], usual["eos_token_id"], usual["pad_token_id"]),
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


def unrotated_where_seen(spec: ModelSpec, read: ConfigReader, window: int | None) -> ModelSpec:
    """`spec` without a window in every fourth layer, or where the config says, and there without a rotation."""
    period = 1 if "layer_types" in read else read.whole("sliding_window_pattern", 4)
    spec = all_but_every(spec, read, window, period)
    seen = (layer for layer in range(spec.num_layers) if spec.arch.window_of(layer) is None)
    return switched(spec, unrotated=tuple(seen))


def everywhere(spec: ModelSpec, read: ConfigReader, window: int | None) -> ModelSpec:
    """The windows of a family that has none or the same in every layer; `layer_types` that say other are refused."""
    plain = switched(spec, window=window)
    if by_layer(spec, read, window, [window is not None] * spec.num_layers) != plain:
        raise read.error("layer_types", "the same for all layers, and sliding_attention only with a sliding_window")
    return plain
