"""How many numbers a model has: what published figures are held against."""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec


def parameters_of(spec: ModelSpec) -> int:
    """Numbers in all weights, shared ones counted once."""
    copies = spec.num_layers * spec.hidden_size if spec.arch.family == "cohere2" else 0  # of its one norm a layer
    return sum(tensor.numel for group in spec.weight_groups for tensor in group.tensors) - copies
