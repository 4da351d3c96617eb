"""Modules that do in a way of their own what ours can only do by an interface: their forwards are replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from h2o_flexgen.models.hf.attention import current
from h2o_flexgen.models.hf.experts import Routing

TEXT_ONLY = frozenset({"llama4", "gemma3n"})
"""Types whose model for images and text transformers cannot run, or not without another library: their language model
alone is made."""


def adapt(model: nn.Module) -> None:
    """From now on experts are asked for where ours can answer, and positions are those of packed tokens."""
    for module in model.modules():
        change = _CHANGES.get(type(module).__name__)
        if change is not None:
            change(module)


def _llama4_experts(module: Any) -> None:
    module.has_gate, module.is_transposed, module.is_concatenated, module.has_bias = True, True, True, False
    module._apply_gate = partial(moe._default_apply_gate, module)


def _llama4_mixture(module: Any) -> None:
    module.forward = partial(_llama4_forward, module)


def _llama4_forward(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4 weighs what experts are given, not what they make of it."""
    x = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)
    shares, experts = scores.topk(module.top_k, dim=-1)
    weighed = (x.unsqueeze(1) * shares.unsqueeze(2)).flatten(0, 1)
    chosen = experts.reshape(-1, 1)
    made = current().route(Routing(module.experts, weighed, chosen, torch.ones_like(chosen, dtype=x.dtype)))
    out = module.shared_expert(x)
    return out + made.to(x.dtype).unflatten(0, (-1, module.top_k)).sum(1), logits


def _llama4_attention(module: Any) -> None:
    """Queries of layers that turn nothing grow with their positions, which it would take from the cache."""
    if module.attn_temperature_tuning and not module.use_rope:
        module.attn_temperature_tuning = False
        module.query_scale = partial(_temperature, module.floor_scale, module.attn_scale)


def _temperature(floor: float, scale: float, positions: Tensor) -> Tensor:
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0


_CHANGES: dict[str, Callable[[Any], None]] = {
    "Llama4TextAttention": _llama4_attention,
    "Llama4TextExperts": _llama4_experts,
    "Llama4TextMoe": _llama4_mixture,
}
