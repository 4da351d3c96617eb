"""What transformers' modules call in place of their own experts: those of a pass are computed one by one, elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.activations import ACT2CLS
from transformers.integrations import moe

from h2o_flexgen.config.model.arch import Activation
from h2o_flexgen.models.fields import ACTIVATIONS
from h2o_flexgen.models.hf.attention import NAME, NotUnderstood, current


class Routing(NamedTuple):
    """Tokens on their way to the experts of `module`: x (T, H), who is chosen (T, k) int64, and shares (T, k)."""

    module: nn.Module
    x: Tensor
    experts: Tensor
    shares: Tensor


def _experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """x (T, H), experts (T, k) and their weights (T, k) -> (T, H)."""
    if hidden.dim() != 2 or top_k_index.shape != top_k_weights.shape:
        raise NotUnderstood(f"{type(module).__name__} is given tokens of {tuple(hidden.shape)}")
    return current().route(Routing(module, hidden, top_k_index, top_k_weights)).to(hidden.dtype)


def activation_of(module: Any) -> Activation:
    """The activation of gated experts without biases, which is all that they may be. NotUnderstood for others."""
    kind, gate = type(module), getattr(moe, "_default_apply_gate", None)
    plain = module.has_gate and not module.has_bias and not module.is_transposed
    plain = plain and getattr(module, "is_concatenated", True) and not getattr(module, "has_post_expert_norm", False)
    if not plain or gate is None or kind._apply_gate is not gate:
        raise NotUnderstood(f"{kind.__name__} has experts of a kind of their own")
    for name, ours in ACTIVATIONS.items():
        theirs = ACT2CLS.get(name)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        if isinstance(theirs, type) and type(module.act_fn) is theirs:
            return ours
    raise NotUnderstood(f"{kind.__name__} has experts with {type(module.act_fn).__name__}")


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
