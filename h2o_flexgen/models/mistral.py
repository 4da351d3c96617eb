"""Mistral's families: Llama with a sliding window in every layer, or none. No torch.

mistral     Mistral 7B and its kin. Jiang et al., "Mistral 7B", arXiv 2310.06825
ministral3  Ministral 3: YaRN, and queries that grow along a long sequence. Mistral AI, "Ministral 3", arXiv 2601.08584.
            Inside of `mistral3`, too: see nested.py
mixtral     Mixtral 8x7B and 8x22B: experts, two of eight for each token. Jiang et al., "Mixtral of Experts", arXiv
            2401.04088
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, everywhere, switched
from h2o_flexgen.models.mixture import EXPERTS, mixture_names, read_experts
from h2o_flexgen.models.rope_fields import read_rotary, rope_section

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
NUMBERED = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate.weight": "block_sparse_moe.experts.{}.w1.weight",
    "mlp.experts.down.weight": "block_sparse_moe.experts.{}.w2.weight",
    "mlp.experts.up.weight": "block_sparse_moe.experts.{}.w3.weight",
}
"""The parts of a layer with experts in Mixtral's own files."""


def _windowed(spec: ModelSpec, read: ConfigReader, usual: int | None = None) -> ModelSpec:
    """`usual`: the window where the file says nothing."""
    return everywhere(spec, read, read.whole_or_null("sliding_window", usual))


def _growing(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    spec, fields = read_rotary(read, head_dim, positions, usual=_YARN), rope_section(read)
    fields = (fields if fields.values() else fields.filled(**_YARN)).without_zeros("llama_4_scaling_beta")
    if "llama_4_scaling_beta" not in fields:
        return spec
    trained = spec.original_positions or fields.whole("original_max_position_embeddings")
    return replace(spec, growth=fields.number("llama_4_scaling_beta"), grows_every=trained)


FAMILIES = (
    LlamaLike("mistral", more=partial(_windowed, usual=4096)),
    LlamaLike("ministral3", rotary=_growing, more=_windowed),
    LlamaLike(
        "mixtral",
        experts=True,
        rotary=partial(read_rotary, theta=1e6),
        more=lambda spec, read: switched(_windowed(spec, read), experts=read_experts(read, 8, 2, spec.ffn_size)),
        checkpoint_names=partial(mixture_names, tables=({**EXPERTS, **NUMBERED}, EXPERTS)),
    ),
)
