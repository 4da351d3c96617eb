"""OLMo 3 (transformers' model_type "olmo3"): OLMo 2 with a window in three of four layers, whose rotary is not scaled.

No torch. Team OLMo, "Olmo 3", 2025.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.gemma3 import global_rotary, local_rotary
from h2o_flexgen.models.llama_like import by_layer, read_spec
from h2o_flexgen.models.olmo2 import DEFAULTS, olmo

_THETA = 5e5


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Olmo3Config's defaults. Raises ModelError."""
    spec = read_spec(read, "olmo3", DEFAULTS, partial(global_rotary, theta=_THETA))
    windowed = [(layer + 1) % 4 != 0 for layer in range(spec.num_layers)]
    arch = by_layer(olmo(spec.arch, read), read, read.whole_or_null("sliding_window", 4096), windowed)
    if arch.window is not None:
        positions = read.whole("max_position_embeddings", DEFAULTS.max_position_embeddings)
        theta = read.number("rope_theta", _THETA)
        arch = replace(arch, local_rotary=local_rotary(read, spec.head_dim, positions, theta))
    return replace(spec, arch=arch)
