"""What transformers' modules call in place of their own experts: those of a pass are computed one by one, elsewhere.

Modules that do in a way of their own what ours can only do by the interface have their forwards replaced, see `adapt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS
from transformers.integrations import moe

from h2o_flexgen.config.model.arch import Activation
from h2o_flexgen.kernels import linear
from h2o_flexgen.models.fields import ACTIVATIONS
from h2o_flexgen.models.hf.attention import NAME, NotUnderstood, current

TEXT_ONLY = frozenset({"llama4", "gemma3n"})
"""Types whose model for images and text transformers cannot run, or not without another library: their language model
alone is made."""
_SLOPE = 1.702
"""Of the sigmoid in gpt-oss's gates, which kernels know no other of."""


class Routing(NamedTuple):
    """Tokens on their way to the experts of `module`: x (T, H), who is chosen (T, k) int64, and shares (T, k)."""

    module: nn.Module
    x: Tensor
    experts: Tensor
    shares: Tensor


class ExpertPart(NamedTuple):
    """A tensor of each expert of a module: `shape` of its part of the `parameter` that is all experts', whose rows for
    it are `rows`, from `start` on. `transposed`: these are its columns."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    start: int
    rows: int
    transposed: bool = False


@dataclass(frozen=True)
class ExpertForm:
    """How the experts of a module are made, and what is between their two projections.

    clamp   gpt-oss's gate and its limit; None: `activation` of the gate, times up
    own     only the module knows what is between them, or behind
    """

    count: int
    ffn: int
    activation: Activation
    clamp: float | None
    bias: bool
    own: bool
    parts: tuple[ExpertPart, ...]


def _experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """x (T, H), experts (T, k) and their weights (T, k) -> (T, H)."""
    if hidden.dim() != 2 or top_k_index.shape != top_k_weights.shape:
        raise NotUnderstood(f"{type(module).__name__} is given tokens of {tuple(hidden.shape)}")
    return current().route(Routing(module, hidden, top_k_index, top_k_weights)).to(hidden.dtype)


def form_of(module: Any) -> ExpertForm:
    """Of a module with experts. NotUnderstood where it keeps them in another way than the interface says."""
    turned, first = bool(module.is_transposed), "gate_up_proj" if module.has_gate else "up_proj"
    wide, down = module._parameters.get(first), module._parameters.get("down_proj")
    if wide is None or down is None or wide.dim() != 3 or down.dim() != 3 or wide.shape[0] != down.shape[0]:
        raise NotUnderstood(f"{type(module).__name__} has experts of a kind of their own")
    (outs, hidden), (back, ffn) = (
        tuple(reversed(each.shape[1:]) if turned else each.shape[1:]) for each in (wide, down)
    )
    activation, clamp, own = _between(module)
    wide_parts = [(first, "joint" if clamp is None else "gate_up", 0, outs)]
    if module.has_gate and module.is_concatenated and not turned:
        wide_parts = [(first, "up", outs // 2, outs // 2), (first, "gate", 0, outs // 2)]
    parts = list[ExpertPart]()
    for parameter, name, start, size in (*wide_parts, ("down_proj", "down", 0, back)):
        ins, rows = (ffn, back) if name == "down" else (hidden, outs)
        parts.append(ExpertPart(f"{name}.weight", parameter, (size, ins), start, ins if turned else rows, turned))
        if module.has_bias:
            parts.append(ExpertPart(f"{name}.bias", f"{parameter}_bias", (size,), start, rows))
    own = own or (len(wide_parts) == 1 and clamp is None)
    return ExpertForm(wide.shape[0], ffn, activation, clamp, bool(module.has_bias), own, tuple(parts))


def _between(module: Any) -> tuple[Activation, float | None, bool]:
    """The activation, gpt-oss's limit, and whether neither says all."""
    if getattr(module, "has_post_expert_norm", False) or not module.has_gate:
        return "silu", None, True
    plain = getattr(moe, "_default_apply_gate", None)
    if getattr(type(module), "_apply_gate", plain) is not plain:
        gpt_oss = not module.is_concatenated and module.has_bias and getattr(module, "alpha", None) == _SLOPE
        return "silu", float(module.limit) if gpt_oss else None, not gpt_oss
    if module.act_fn is nn.functional.silu:
        return "silu", None, False
    for name, ours in ACTIVATIONS.items():
        theirs = ACT2CLS.get(name)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        if isinstance(theirs, type) and type(module.act_fn) is theirs:
            return ours, None, False
    return "silu", None, True


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The numbers that a module computes its experts with, but for that of its layer."""
    own = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    return {"class": type(module), **own} | {"layer_idx": None}


def feed_forward(module: Any, w: Mapping[str, Any], x: Tensor) -> Tensor:
    """x (T, H) -> (T, H): one expert, whose weights `w` are, by what `module` has between and behind projections."""
    names = ("joint",) if "joint.weight" in w else ("gate", "up")
    wide = torch.cat([linear(x, w[f"{name}.weight"], w.get(f"{name}.bias")) for name in names], -1)
    inner = module._apply_gate(wide) if module.has_gate else module.act_fn(wide)
    out = linear(inner.to(x.dtype), w["down.weight"], w.get("down.bias"))
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


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


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
