"""Llama 1 to 3 (transformers' model_type "llama"), and all models that are saved as such.

No torch. Touvron et al., arXiv 2302.13971 and 2307.09288; Grattafiori et al., "The Llama 3 Herd of Models",
arXiv 2407.21783. `pretraining_tp` splits products without changing them, and is not looked at.
"""

from h2o_flexgen.models.llama_like import LlamaLike

FAMILY = LlamaLike("llama")
