"""dots.llm1 (transformers' model_type "dots1"): DeepSeek's router, queries and keys normed head by head.

No torch. rednote-hilab, "dots.llm1 Technical Report", arXiv 2506.05767. Defaults of experts that Dots1Config does not
have are the published model's.
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import glm4_moe
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, by_layer, switched
from h2o_flexgen.models.mixture import predicting_layers, read_groups


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    experts = read_groups(read, spec, 128, 6, normalised=False, shared=2, dense=0)
    window, first = read.whole_or_null("sliding_window", 4096), read.count("max_window_layers", 62)
    spec = switched(spec, experts=experts, predicting=predicting_layers(read))
    return by_layer(spec, read, window, [layer >= first for layer in range(spec.num_layers)])


FAMILY = LlamaLike(
    "dots1",
    experts=True,
    switches={"qk_norm": True},
    more=_more,
    checkpoint_names=glm4_moe.FAMILY.checkpoint_names,
)
