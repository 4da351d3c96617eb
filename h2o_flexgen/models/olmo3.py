"""OLMo 3 (transformers' model_type "olmo3"): OLMo 2 with a window in three of four layers, whose rotary is not scaled.

No torch. Team OLMo, "Olmo 3", 2025.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import olmo2
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.gemma3 import global_rotary, local_rotary
from h2o_flexgen.models.llama_like import DEFAULTS, all_but_every, switched

_THETA = 5e5


def _windows(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = all_but_every(spec, read, read.whole_or_null("sliding_window", 4096), 4)
    if spec.arch.window is None:
        return spec
    positions = read.whole("max_position_embeddings", DEFAULTS["olmo3"]["max_position_embeddings"])
    theta = read.number("rope_theta", _THETA)
    return switched(spec, local_rotary=local_rotary(read, spec.head_dim, positions, theta))


FAMILY = replace(olmo2.FAMILY, family="olmo3", rotary=partial(global_rotary, theta=_THETA), more=_windows)
