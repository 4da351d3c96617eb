"""Qwen 1.5, 2 and 2.5 (transformers' model_type "qwen2"): Llama with biases on q, k and v.

No torch. Yang et al., "Qwen2.5 Technical Report", arXiv 2412.15115.
"""

from h2o_flexgen.models.llama_like import LlamaLike, from_layer_on

FAMILY = LlamaLike("qwen2", switches={"qkv_bias": True}, more=from_layer_on)
