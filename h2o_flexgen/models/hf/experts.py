"""Experts that transformers' modules call in place of their own: all of a pass are computed one by one, elsewhere;
and indexers, which choose among tokens that are kept elsewhere.

Modules that do not call experts by the interface, which ours need, have their forwards replaced: `changes`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS
from transformers.integrations import moe

from h2o_flexgen.config.model.arch import Activation
from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.kernels.types import Choice, Seen
from h2o_flexgen.models.fields import ACTIVATIONS
from h2o_flexgen.models.hf.attention import NAME, NotUnderstood, current
from h2o_flexgen.models.hf.states import each_tensor, named
from h2o_flexgen.models.mixture import SLOPE

TEXT_ONLY = frozenset({"llama4", "gemma3n"})
"""Types of which the language model alone is made: transformers, by itself, cannot run that for images and text."""


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
    told: ExpertForm | None = getattr(module, "expert_form", None)
    if told is not None:
        return told
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
        gpt_oss = not module.is_concatenated and module.has_bias and getattr(module, "alpha", None) == SLOPE
        return "silu", float(module.limit) if gpt_oss else None, not gpt_oss
    if module.act_fn is nn.functional.silu:
        return "silu", None, False
    for name, ours in ACTIVATIONS.items():
        theirs = ACT2CLS.get(name)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        if isinstance(theirs, type) and type(module.act_fn) is theirs:
            return ours, None, False
    return "silu", None, True


def tell_form(
    module: Any, activation: nn.Module, count: int, sizes: tuple[int, int], parts: Sequence[ExpertPart]
) -> None:
    """Tells `form_of` what the experts of a module are: gated, by tensors that it keeps in a way of its own. `sizes`:
    of what is between their projections, and of hidden states."""
    module.has_gate, module.act_fn, module.num_experts = True, activation, count
    ours, _, own = _between(module)
    if own:
        raise NotUnderstood(f"{type(module).__name__} has experts with {type(activation).__name__} between projections")
    module.expert_form = ExpertForm(count, sizes[0], ours, None, False, False, tuple(parts))


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


_INDEXES = "update_indexer"
"""The method of its cache that an indexer calls: DeepSeek's sparse attention (arXiv 2512.02556, 2.1).

An indexer, a module beside attention, scores all tokens by small keys of its own, and each query attends to as many as
`index_topk` of the best. Its keys are kept behind those of attention, in the same slots: they are evicted, packed and
moved with these. Its own forward chooses, given the keys of the slots that there are: among kept tokens."""


class _Known(Exception):
    """An indexer has told the keys of its tokens; its choice among them is not wanted."""


def take_indexers(model: nn.Module) -> None:
    """From now on indexers choose when it is known among which tokens."""
    for module in model.modules():
        kind: Any = type(module)
        if _INDEXES in named(kind):
            module.forward = partial(_index, module, module.forward)


def _index(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """A tensor that stands for what is still to be chosen, and has `choice`."""
    made = IndexerChoice(module, forward, args, kwargs)
    stands: Tensor = torch.empty(0, dtype=torch.int32, device=made.keys.device)
    stands.choice = made  # type: ignore[attr-defined]
    return stands


class IndexerChoice(Choice):
    """The choice of an indexer for the T tokens of a part. `keys` (T, D): of these. The chosen positions are kept for
    layers behind that have no indexer of their own."""

    def __init__(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        kind = type(module).__name__
        self._kind, self._forward = kind, forward
        try:
            self._given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        except TypeError:
            raise NotUnderstood(f"{kind} is called in a way of its own") from None
        self._given.pop("self")
        most = getattr(module, "index_topk", None)
        if not isinstance(most, int) or "attention_mask" not in self._given or "hidden_states" not in self._given:
            raise NotUnderstood(f"{kind} chooses tokens in a way of its own")
        self.most, self._tokens = most, self._given["hidden_states"].shape[1]
        self.layer, self.keys = self._own_keys()
        self._chosen: Tensor | None = None
        kinds = getattr(getattr(module, "config", None), "indexer_types", None) or ()
        self.by_position = "shared" in kinds

    def _own_keys(self) -> tuple[int, Tensor]:
        found = list[tuple[int, Tensor]]()

        def note(keys: Tensor, layer: int) -> Tensor:
            found.append((layer, keys))
            if not keys.is_meta:  # where nothing is computed all that an indexer uses is to be seen
                raise _Known
            return keys

        visible = self._given["hidden_states"].new_zeros(1, 1, 1)
        with suppress(_Known):
            self._ask({**self._given, "attention_mask": visible}, note)
        if len(found) != 1 or found[0][1].dim() != 3 or found[0][1].shape[:2] != (1, self._tokens):
            raise NotUnderstood(f"{self._kind} keeps an index of another kind")
        return found[0][0], found[0][1][0]

    def _ask(self, given: dict[str, Any], keys: Callable[[Tensor, int], Tensor]) -> Tensor:
        cache = current().cache
        cache.index = keys
        try:
            made: Tensor = self._forward(**given)
        finally:
            cache.index = None
        return made

    def seen(self, tokens: Tensor, keys: Tensor, seen: Tensor, positions: Tensor | None, own: bool) -> Tensor:
        positions = None if positions is None else positions.to(self.keys.device)
        there = seen.to(self.keys.device)
        found = self._choose(tokens, keys, there, positions) if own else self._again(tokens, there, positions)
        return found.to(seen.device)

    def _choose(self, tokens: Tensor, keys: Tensor, seen: Tensor, positions: Tensor | None) -> Tensor:
        def part(x: Tensor) -> Tensor:  # the part of these tokens: (n, q, ...)
            return x[0][tokens.to(x.device)] if x.dim() > 1 and x.shape[:2] == (1, self._tokens) else x

        among = keys[..., -self.keys.shape[-1] :].to(self.keys)
        given = each_tensor(part, self._given)
        chosen = self._ask({**given, "attention_mask": seen}, lambda *_: among)
        if chosen.dtype is not torch.int32 or chosen.shape[:2] != tokens.shape:
            raise NotUnderstood(f"{self._kind} chooses tokens in a way of its own")
        places = chosen.long()
        mask = torch.zeros_like(seen).scatter_(-1, places, True).logical_and_(seen)
        if self.by_position:
            if self._chosen is None:
                self._chosen = torch.full((self._tokens, self.most), -1, dtype=torch.int32, device=seen.device)
                self._decided = torch.zeros(self._tokens, dtype=torch.bool, device=seen.device)
            at = places if positions is None else positions.unsqueeze(1).expand_as(seen).gather(-1, places)
            at = at.to(torch.int32).masked_fill(~seen.gather(-1, places), -1)
            self._chosen[tokens, : at.shape[-1]] = at
            self._decided[tokens] = seen.sum(-1) > self.most
        return mask

    def _again(self, tokens: Tensor, seen: Tensor, positions: Tensor | None) -> Tensor:
        """For a layer without an index: of its tokens those that the one before has chosen; all where that did not
        have to choose, or none of its choice is left."""
        if self._chosen is None:
            return seen
        chosen, width = self._chosen[tokens].long(), seen.shape[-1]
        most = width if positions is None else int(max(positions.max(), chosen.max())) + 1
        table = torch.zeros(*tokens.shape, most + 1, dtype=torch.bool, device=seen.device)
        table.scatter_(-1, chosen.masked_fill(chosen < 0, most), True)
        table[..., most] = False
        if positions is None:
            mask = table[..., :width]
        else:
            places = positions.long().masked_fill(positions < 0, most)
            mask = table.gather(-1, places.unsqueeze(1).expand_as(seen))
        mask = mask & seen
        return torch.where(mask.any(-1, keepdim=True) & self._decided[tokens].unsqueeze(-1), mask, seen)

    def of_prompts(self, first: int, own: Tensor, past: Tensor | None, indexed: bool) -> Seen:
        length = own.shape[1]
        before = 0 if past is None else len(past)

        def seen(rows: slice, start: int, stop: int) -> Tensor:
            queries = torch.arange(start, stop, device=own.device)
            tokens = first + torch.arange(rows.start, rows.stop, device=own.device).unsqueeze(1) * length + queries
            causal = torch.arange(before + stop, device=own.device) <= (before + queries).unsqueeze(1)
            causal = causal.expand(len(tokens), -1, -1)
            if before + stop <= self.most:
                return causal
            keys = own[rows, :stop]
            keys = keys if past is None else torch.cat([past.expand(len(keys), -1, -1), keys], 1)
            return self.seen(tokens, keys, causal, None, indexed)

        return seen


moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
