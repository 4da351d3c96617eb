"""GLM-4-0414, dense (transformers' model_type "glm4"): norms before and after each half, half of each head turned.

No torch. GLM Team, "ChatGLM", arXiv 2406.12793. Rotated pairs lie side by side; gate and up are one tensor.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.llama_like import PARTS, LlamaLike, plain_names
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, one_after_another, pairs_apart

_PARTS = {
    **PARTS,
    "attn.post_norm": "post_self_attn_layernorm",
    "mlp.post_norm": "post_mlp_layernorm",
    "mlp.gate": "mlp.gate_up_proj",
    "mlp.up": "mlp.gate_up_proj",
}


def _names(spec: ModelSpec) -> Names:
    sizes = {"mlp.gate": spec.ffn_size, "mlp.up": spec.ffn_size}
    return pairs_apart(spec, one_after_another(plain_names(spec, _PARTS), sizes))


FAMILY = LlamaLike(
    "glm4",
    filled=lambda read: read.filled(eos_token_id=[151329, 151336, 151338]),
    rotary=partial(read_rotary, share=0.5),
    switches={"post_norms": True, "output_bias": False},
    checkpoint_names=_names,
)
