"""EXAONE 4.0 (transformers' model_type "exaone4"): norms after each half alone, and no rotary where all is seen.

No torch. LG AI Research, "EXAONE 4.0", arXiv 2507.11407.
"""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import Defaults, by_layer, everything_seen, read_spec

DEFAULTS = Defaults(
    vocab_size=102400,
    hidden_size=4096,
    intermediate_size=16384,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    bos_token_id=0,
    eos_token_id=2,
)


def spec_from_config(read: ConfigReader) -> ModelSpec:
    """The ModelSpec of a config.json; keys that are absent have Exaone4Config's defaults. Raises ModelError."""
    spec = read_spec(read, "exaone4", DEFAULTS)
    arch = replace(spec.arch, pre_norm=False, post_norms=True, qk_norm=True)
    window, layers = read.whole_or_null("sliding_window", 4096), range(spec.num_layers)
    period = read.whole("sliding_window_pattern", 4) if window is not None and "layer_types" not in read else 1
    arch = by_layer(arch, read, window, [(layer + 1) % period != 0 for layer in layers])
    if window is not None:
        arch = replace(arch, unrotated=everything_seen(arch, spec.num_layers))
    return replace(spec, arch=arch)
