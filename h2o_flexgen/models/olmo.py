"""OLMo's families, and EXAONE 4.0, whose norms are where OLMo 2 has them: after each half alone. No torch.

olmo2    OLMo 2: queries and keys normed as a whole. Team OLMo, "2 OLMo 2 Furious", arXiv 2501.00656
olmo3    OLMo 3: the same with a window in three of four layers, whose rotary is not scaled. Team OLMo, "Olmo 3", 2025
olmoe    OLMoE-1B-7B: Llama with 64 small experts, eight for each token; q and k normed as a whole. Muennighoff et al.,
         "OLMoE: Open Mixture-of-Experts Language Models", arXiv 2409.02060
exaone4  EXAONE 4.0: no rotary where all is seen. LG AI Research, "EXAONE 4.0", arXiv 2507.11407
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.gemma import global_rotary, local_rotary
from h2o_flexgen.models.llama_like import (
    DEFAULTS,
    PARTS,
    LlamaLike,
    all_but_every,
    plain_names,
    switched,
    unrotated_where_seen,
)
from h2o_flexgen.models.mixture import mixture_names, read_experts

_NORMS = {"attn.post_norm": "post_attention_layernorm", "mlp.post_norm": "post_feedforward_layernorm"}
_JOINT = {"qk_norm": True, "qk_norm_joint": True}
_THETA = 5e5  # of OLMo 3


def _scaled_where_seen(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = all_but_every(spec, read, read.whole_or_null("sliding_window", 4096), 4)
    if spec.arch.window is None:
        return spec
    positions = read.whole("max_position_embeddings", DEFAULTS["olmo3"]["max_position_embeddings"])
    rotary = local_rotary(read, spec.head_dim, positions, _THETA)
    own = read.section("rope_parameters").section("sliding_attention")
    if "rope_theta" not in own and read.number("rope_theta", _THETA) != _THETA:
        # transformers 4 gave it to all layers, 5 to those that see everything
        raise read.error("rope_theta", f"one for each kind of layers in rope_parameters, or {_THETA:g} for both")
    return switched(spec, local_rotary=rotary)


def _mixture(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["sliding_window"])
    experts = read_experts(read, 64, 8, spec.ffn_size, normalised=read.flag("norm_topk_prob", False))
    return switched(spec, clip_qkv=read.number("clip_qkv") if "clip_qkv" in read else None, experts=experts)


def _exaone(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    window = read.whole_or_null("sliding_window", 4096)
    return all_but_every(spec, read, window, 1) if window is None else unrotated_where_seen(spec, read, window)


_SECOND = LlamaLike(
    "olmo2",
    switches={"pre_norm": False, "post_norms": True, **_JOINT},
    checkpoint_names=partial(plain_names, parts={**PARTS, **_NORMS}),
)
FAMILIES = (
    _SECOND,
    replace(_SECOND, family="olmo3", rotary=partial(global_rotary, theta=_THETA), more=_scaled_where_seen),
    LlamaLike("olmoe", experts=True, switches=_JOINT, more=_mixture, checkpoint_names=mixture_names),
    replace(_SECOND, family="exaone4", switches={**_SECOND.switches, "qk_norm_joint": False}, more=_exaone),
)
