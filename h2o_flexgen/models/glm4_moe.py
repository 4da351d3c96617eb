"""GLM-4.5 to 4.7 (transformers' model_type "glm4_moe"): DeepSeek's router, and half of each head turned.

No torch. GLM-4.5 Team, "GLM-4.5", arXiv 2508.06471. Layers that predict more tokens at once are left out.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, switched
from h2o_flexgen.models.mixture import EXPERTS, SHARED, names_beside_dense, predicting_layers, read_groups
from h2o_flexgen.models.rope_fields import read_rotary

_CHOICE = {"mlp.choice": "mlp.gate.e_score_correction_bias"}


def _filled(read: ConfigReader) -> ConfigReader:
    """Without head_dim heads are as wide as hidden_size has it; the default sizes make no whole number, and get 128."""
    if "hidden_size" not in read:
        return read
    return read.filled(head_dim=read.whole("hidden_size") // read.whole("num_attention_heads", 96))


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    experts = read_groups(read, spec, 128, 8, normalised=True, shared=1, dense=1)
    predicting = predicting_layers(read)
    return switched(spec, qk_norm=read.flag("use_qk_norm", False), experts=experts, predicting=predicting)


FAMILY = LlamaLike(
    "glm4_moe",
    experts=True,
    filled=_filled,
    rotary=partial(read_rotary, share=0.5),
    switches={"output_bias": False},
    more=_more,
    checkpoint_names=partial(names_beside_dense, parts={**EXPERTS, **SHARED, **_CHOICE}),
)
