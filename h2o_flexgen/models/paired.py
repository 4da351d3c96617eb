"""Families whose rotated pairs lie side by side. No torch.

cohere2  Command R7B and Command A: parallel halves that share a norm; three of four layers have a window and rotary
         positions, the fourth sees everything and has none. Cohere, "Command A", arXiv 2504.00698
glm4     GLM-4-0414, dense: norms before and after each half, half of each head turned, gate and up in one tensor. GLM
         Team, "ChatGLM", arXiv 2406.12793
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import PARTS, LlamaLike, plain_names, switched, unrotated_where_seen
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, one_after_another, pairs_apart

_GLM_PARTS = {
    **PARTS,
    "attn.post_norm": "post_self_attn_layernorm",
    "mlp.post_norm": "post_mlp_layernorm",
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
}


def _cohere(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["use_qk_norm"])
    scale, eps = read.number("logit_scale", 0.0625), read.number("layer_norm_eps", 1e-5)
    spec = switched(spec, logit_scale=scale, norm_eps=eps)
    return unrotated_where_seen(spec, read, read.whole_or_null("sliding_window", 4096))


def _glm_names(spec: ModelSpec) -> Names:
    sizes = {"mlp.gate": spec.ffn_size, "mlp.up": spec.ffn_size}
    return pairs_apart(spec, one_after_another(plain_names(spec, _GLM_PARTS), sizes))


FAMILIES = (
    LlamaLike(
        "cohere2",
        switches={"norm": "layernorm", "norm_bias": False, "parallel": True, "one_norm": True},
        more=_cohere,
        checkpoint_names=lambda spec: pairs_apart(spec, plain_names(spec, {**PARTS, "mlp.norm": PARTS["attn.norm"]})),
    ),
    LlamaLike(
        "glm4",
        filled=lambda read: read.filled(eos_token_id=[151329, 151336, 151338]),
        rotary=partial(read_rotary, share=0.5),
        switches={"post_norms": True, "output_bias": False},
        checkpoint_names=_glm_names,
    ),
)
