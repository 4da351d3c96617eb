"""OLMo 2 (transformers' model_type "olmo2"): norms after each half alone, queries and keys normed as a whole.

No torch. Team OLMo, "2 OLMo 2 Furious", arXiv 2501.00656.
"""

from functools import partial

from h2o_flexgen.models.llama_like import PARTS, LlamaLike, plain_names

_NORMS = {"attn.post_norm": "post_attention_layernorm", "mlp.post_norm": "post_feedforward_layernorm"}

FAMILY = LlamaLike(
    "olmo2",
    switches={"pre_norm": False, "post_norms": True, "qk_norm": True, "qk_norm_joint": True},
    checkpoint_names=partial(plain_names, parts={**PARTS, **_NORMS}),
)
