"""Gemma's families. No torch.

gemma2       Gemma 2: norms before and after each half, whose weights are differences from 1, and soft caps on all
             logits; every second layer, from the first on, sees a window. "Gemma 2: Improving Open Language Models at a
             Practical Size", arXiv 2408.00118
gemma3_text  Gemma 3 without the vision tower: the same norms, normed queries and keys; most layers see a window, and
             have rotary positions of their own. "Gemma 3 Technical Report", arXiv 2503.19786

A null in a config.json is no cap or no window.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, LlamaLike, all_but_every, plain_names, switched
from h2o_flexgen.models.rope_fields import check_whole, rotary_spec

_NORMS = {
    "attn.post_norm": "post_attention_layernorm",
    "mlp.norm": "pre_feedforward_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}


def _scaled(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """`spec` with what both scale: logits of attention, and embeddings."""
    read.refuse(["use_bidirectional_attention"])
    scale = read.number("query_pre_attn_scalar", 256) ** -0.5
    return switched(spec, attention_scale=scale, embed_scale=math.sqrt(spec.hidden_size))


def _second(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    caps = (("attention_cap", "attn_logit_softcapping", 50.0), ("logit_cap", "final_logit_softcapping", 30.0))
    spec = switched(_scaled(spec, read), **{name: read.number_or_null(key, usual) for name, key, usual in caps})
    return all_but_every(spec, read, read.whole_or_null("sliding_window", 4096), 2)


def _third(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    # transformers documents this key for Gemma 3, but does not use it.
    read.refuse(["attn_logit_softcapping"])
    spec = switched(_scaled(spec, read), logit_cap=read.number_or_null("final_logit_softcapping", None))
    window, period = read.whole_or_null("sliding_window", 4096), read.whole("sliding_window_pattern", 6)
    spec = all_but_every(spec, read, window, period)
    if spec.arch.window is None:
        return spec
    theta = read.number("rope_local_base_freq", 10000.0)
    return switched(spec, local_rotary=local_rotary(read, spec.head_dim, spec.max_positions, theta))


def global_rotary(read: ConfigReader, head_dim: int, positions: int, theta: float = 1e6) -> RotarySpec:
    """Of the layers that see everything; `rope_scaling` of old files is theirs alone. `theta`: where none is given."""
    new = _of_layers(read, "full_attention")
    fields = read.section("rope_scaling").filled(**new.values())
    return _whole_heads(fields.filled(rope_theta=read.number("rope_theta", theta)), head_dim, positions)


def local_rotary(read: ConfigReader, head_dim: int, positions: int, theta: float) -> RotarySpec:
    """Of the layers with a window; `theta`: where `rope_parameters` has none."""
    fields = _of_layers(read, "sliding_attention")
    return _whole_heads(fields.filled(rope_theta=theta), head_dim, positions)


def _of_layers(read: ConfigReader, kind: str) -> ConfigReader:
    """The rotary fields of one kind of layers, which transformers 5 keeps apart in `rope_parameters`."""
    section = read.section("rope_parameters")
    if set(section.values()) - {"full_attention", "sliding_attention"}:
        raise read.error("rope_parameters", "an object each for full_attention and sliding_attention")
    return section.section(kind)


def _whole_heads(fields: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    check_whole(fields, head_dim)
    rotary = rotary_spec(fields, head_dim, positions)
    if not rotary.truncate:
        raise fields.error("truncate", "true: transformers reads it only where all layers turn alike")
    return rotary


_SECOND = LlamaLike(
    "gemma2",
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    switches={"norm_offset": 1.0, "post_norms": True},
    more=_second,
    checkpoint_names=partial(plain_names, parts={**PARTS, **_NORMS}),
)
_THIRD = replace(
    _SECOND,
    family="gemma3_text",
    stretched=True,
    rotary=global_rotary,
    switches={**_SECOND.switches, "qk_norm": True},
    more=_third,
)
FAMILIES = (_SECOND, _THIRD)
