"""Mistral 7B and its kin (transformers' model_type "mistral"): Llama with a sliding window in every layer, or none.

No torch. Jiang et al., "Mistral 7B", arXiv 2310.06825.
"""

from h2o_flexgen.models.llama_like import LlamaLike, everywhere

FAMILY = LlamaLike(
    "mistral",
    more=lambda spec, read: everywhere(spec, read, read.whole_or_null("sliding_window", 4096)),
)
