"""Qwen3, dense (transformers' model_type "qwen3"): Llama whose queries and keys are normed head by head.

No torch. Yang et al., "Qwen3 Technical Report", arXiv 2505.09388.
"""

from h2o_flexgen.models.llama_like import LlamaLike, from_layer_on

FAMILY = LlamaLike("qwen3", switches={"qk_norm": True}, more=from_layer_on)
