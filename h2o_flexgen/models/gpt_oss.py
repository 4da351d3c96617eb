"""gpt-oss 20b and 120b (transformers' model_type "gpt_oss"): attention sinks, alternating windows, clamped gates, YaRN.

No torch. OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925. Experts are kept in MXFP4, or with inputs
and outputs the other way round; gate and up lie in one projection, in turns.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import required
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, LlamaLike, all_but_every, plain_names, switched
from h2o_flexgen.models.mixture import SLOPE, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, Stored

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.number("swiglu_alpha", SLOPE) != SLOPE:
        raise read.error("swiglu_alpha", f"{SLOPE}")
    clamp = read.number("swiglu_limit", 7.0)
    experts = read_experts(read, 128, 4, spec.ffn_size, router="chosen", bias=True, clamp=clamp)
    return all_but_every(switched(spec, experts=experts), read, read.whole_or_null("sliding_window", 128), 2)


def _names(spec: ModelSpec) -> Names:
    experts = required(spec.arch.experts, "the model has no experts")
    count, hidden, ffn = experts.count, spec.hidden_size, experts.ffn_size
    parts: dict[str, str | Stored] = {"mlp.router": "mlp.router", "attn.sinks": "self_attn.sinks"}
    for part, ins, outs in (("gate_up", hidden, 2 * ffn), ("down", ffn, hidden)):
        name = f"mlp.experts.{part}_proj"
        weight = Stored(name, ((0, ins),), count * ins, (count, ins, outs), transposed=True)
        bias = Stored(f"{name}_bias", ((0, outs),), count * outs, (count, outs))
        parts |= {f"mlp.experts.{part}.weight": weight, f"mlp.experts.{part}.bias": bias}
    return plain_names(spec, {**PARTS, **parts})


FAMILIES = (
    LlamaLike(
        "gpt_oss",
        stretched=True,
        experts=True,
        rotary=partial(read_rotary, theta=150000.0, usual=_YARN),
        switches={"sinks": True},
        more=_more,
        checkpoint_names=_names,
    ),
)
