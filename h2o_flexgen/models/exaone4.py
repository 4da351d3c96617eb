"""EXAONE 4.0 (transformers' model_type "exaone4"): norms after each half alone, and no rotary where all is seen.

No torch. LG AI Research, "EXAONE 4.0", arXiv 2507.11407.
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import olmo2
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, all_but_every, everything_seen, switched


def _windows(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    window = read.whole_or_null("sliding_window", 4096)
    if window is None:
        return all_but_every(spec, read, window, 1)
    period = 1 if "layer_types" in read else read.whole("sliding_window_pattern", 4)
    spec = all_but_every(spec, read, window, period)
    return switched(spec, unrotated=everything_seen(spec))


FAMILY = LlamaLike(
    "exaone4",
    switches={"pre_norm": False, "post_norms": True, "qk_norm": True},
    more=_windows,
    checkpoint_names=olmo2.FAMILY.checkpoint_names,
)
