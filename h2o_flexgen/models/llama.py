"""Llama, and families that differ from it by a field or two. No torch.

llama      Llama 1 to 3, and all models that are saved as such. Touvron et al., arXiv 2302.13971 and 2307.09288;
           Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783
granite    Granite 3 and 4: four multipliers. IBM Granite Team, "Granite 3.0 Language Models", 2024
granitemoe the same with experts, which are fused on the hub too
seed_oss   Seed-OSS 36B: biases on q, k and v, and wide heads. ByteDance Seed Team, "Seed-OSS Open-Source Models", 2025
smollm3    SmolLM3: every fourth layer has no positions. Bakouch et al., "SmolLM3: smol, multilingual, long-context
           reasoner", 2025; Yang et al., "Rope to Nope and Back Again", arXiv 2501.18795

`pretraining_tp` splits products without changing them, and is not looked at.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, LlamaLike, by_layer, plain_names, switched
from h2o_flexgen.models.mixture import in_one, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, either


def _positions(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    turned = _turned(read, spec.num_layers)
    window = read.whole_or_null("sliding_window", None) if read.flag("use_sliding_window", False) else None
    spec = switched(spec, unrotated=tuple(layer for layer, it_is in enumerate(turned) if not it_is))
    return by_layer(spec, read, window, [window is not None and not it_is for it_is in turned])


def _turned(read: ConfigReader, layers: int) -> list[bool]:
    """Of each layer, whether it has rotary positions."""
    listed = read.whole_list("no_rope_layers")
    if "no_rope_layers" not in read:
        interval = read.whole("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(listed) < layers or set(listed) - {0, 1}:
        raise read.error("no_rope_layers", f"a list of {layers} numbers, 1 for a layer with rotary positions, else 0")
    return [number == 1 for number in listed[:layers]]


_MOE = "block_sparse_moe"


def _multiplied(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Logits of attention, embeddings, what each half adds, and logits are multiplied."""
    return switched(
        spec,
        attention_scale=read.number("attention_multiplier", 1.0),
        embed_scale=read.number("embedding_multiplier", 1.0),
        residual_scale=read.number("residual_multiplier", 1.0),
        logit_scale=1 / read.number("logits_scaling", 1.0),
    )


def _mixture(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return _multiplied(switched(spec, experts=read_experts(read, 8, 2, spec.ffn_size, router="chosen")), read)


def _names(spec: ModelSpec) -> Names:
    old = in_one(spec, f"{_MOE}.input_linear.weight", f"{_MOE}.output_linear.weight")
    new = in_one(spec, f"{_MOE}.experts.gate_up_proj", f"{_MOE}.experts.down_proj")
    routers = f"{_MOE}.router.layer", f"{_MOE}.router"
    return plain_names(spec, {**PARTS, "mlp.router": routers, **either(old, new)})


FAMILIES = (
    LlamaLike("llama"),
    LlamaLike("granite", more=_multiplied),
    LlamaLike("granitemoe", experts=True, more=_mixture, checkpoint_names=_names),
    LlamaLike("seed_oss", more=lambda spec, read: switched(spec, output_bias=read.flag("attention_out_bias", False))),
    LlamaLike("smollm3", rotary=partial(read_rotary, theta=2e6), more=_positions),
)
