"""Gemma 2 (transformers' model_type "gemma2"): norms before and after each half, and soft caps on all logits.

No torch. "Gemma 2: Improving Open Language Models at a Practical Size", arXiv 2408.00118. Every second layer, from the
first on, sees a window. A null in its config.json is no cap or no window.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models import gemma3
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import all_but_every, switched
from h2o_flexgen.models.rope_fields import read_rotary


def _more(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    caps = (("attention_cap", "attn_logit_softcapping", 50.0), ("logit_cap", "final_logit_softcapping", 30.0))
    spec = switched(gemma3.scaled(spec, read), **{name: read.number_or_null(key, usual) for name, key, usual in caps})
    return all_but_every(spec, read, read.whole_or_null("sliding_window", 4096), 2)


FAMILY = replace(
    gemma3.FAMILY,
    family="gemma2",
    stretched=False,
    rotary=read_rotary,
    switches={"norm_offset": 1.0, "post_norms": True},
    more=_more,
)
