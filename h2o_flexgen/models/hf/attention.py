"""Attention, masks and caches that transformers' modules call in place of their own, and the guards of these calls.

A forward runs in a greenlet of its own (`ModelRun`), so that it can stop at every unit; these functions find it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from h2o_flexgen.errors import ModelError
from h2o_flexgen.kernels.torch_attention import product
from h2o_flexgen.kernels.types import Choice

NAME = "h2o_flexgen"
"""Of our attention, as transformers knows it."""

_HARMLESS = (
    "position_ids use_cache is_causal output_attentions output_hidden_states return_dict past_key_values "
    "cache_position position_embeddings attention_mask dropout output_router_logits logits_to_keep "
    "deterministic cache"
)
HARMLESS = frozenset(_HARMLESS.split())
"""Arguments of the attention function that say nothing new to it."""


class NotUnderstood(ModelError):
    """A module does what is not understood: its results would not be the model's."""


class Call(NamedTuple):
    """One call of attention: q (T, heads, d), k and v (T, kv_heads, d), rotated as the model has it.

    `sinks`: of each head a logit that is no token's; `soft_cap`: of all logits. `chunked`: windows are chunks. `joint`:
    values are the keys. `reads`: k and v are those of `layer`, which has attended before. `choice`: of tokens.
    `by_distance`: numbers of q and k are biases by distance.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None = None
    soft_cap: float | None = None
    chunked: bool = False
    joint: bool = False
    reads: bool = False
    choice: Choice | None = None
    by_distance: bool = False


class ModelRun(greenlet):
    """A forward of a model. `attend` answers its calls of attention, `route` those of experts, `mix` those of modules
    that keep states; `cache` stands for the caches. `positions` (T,): of its tokens. `unit`: that which it is in.
    `masks`: the windows of those that it has made, None: all tokens."""

    def __init__(
        self,
        run: Callable[[], Any],
        attend: Callable[[Call], Tensor],
        route: Callable[[Any], Tensor],
        mix: Callable[[Any], Any],
        positions: Tensor,
    ) -> None:
        super().__init__(run)
        self.attend, self.route, self.mix, self.positions = attend, route, mix, positions
        self.cache, self.unit, self.masks = PassedOn(), 0, set[int | None]()


def current() -> ModelRun:
    run = getcurrent()
    if not isinstance(run, ModelRun):
        raise RuntimeError("transformers' modules are run outside of a pass")
    return run


class _Mixing(list[Any]):
    """The layers of a cache without any: each is `states`, a RowStates, while its rows go through a mixer."""

    states: Any = None

    def __getitem__(self, layer: Any) -> Any:
        if self.states is None:
            raise NotUnderstood(f"states of layer {layer} are asked for where no module is known to keep any")
        if self.states.layer not in (None, layer):
            raise NotUnderstood(f"a module keeps states of layers {self.states.layer} and {layer}")
        self.states.layer = layer
        return self.states


class PassedOn(Cache):
    """The cache that modules are given: keys and values go through it, and tell the layer of the attention that
    follows. The states are of the rows that go through a mixer. Other requests to a cache are refused."""

    layers: Any

    def __init__(self) -> None:
        super().__init__(layers=_Mixing())
        self.given: tuple[int, Tensor, Tensor] | None = None
        self._passed = dict[int, ReferenceType[Tensor]]()
        self.index: Callable[[Tensor, int], Tensor] | None = None
        """While an indexer is asked: the keys that it is to choose among, by its tokens' own and its layer."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.end()
        self.given = layer_idx, key_states, value_states
        self._passed[layer_idx] = ref(key_states)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Of an indexer, see `experts.take_indexers`."""
        if self.index is None:
            raise NotUnderstood(f"layer {layer_idx} keeps an index of a kind that is not known")
        return self.index(indexer_key_states, layer_idx)

    def end(self) -> None:
        """NotUnderstood where what was last given was not attended to by us."""
        if self.given is not None:
            raise NotUnderstood(f"layer {self.given[0]} fills its cache, and attention is not ours")

    def giver_of(self, key: Tensor) -> int | None:
        return next((layer for layer, given in self._passed.items() if given() is key), None)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Within a mixer of its rows; elsewhere masks of padding depend on it, of which there is none."""
        if self.layers.states is None:
            return False
        had = self.layers.states.has_previous_state
        return any(had.values()) if state_idx is None else bool(had[state_idx])

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """No step is ever taken back."""
        return False


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """q (1, heads, T, d), k (1, kv_heads, T, d), v (1, kv_heads, T, e) -> (1, T, heads, e)."""
    run, kind, reads = current(), type(module).__name__, False
    given, run.cache.given = run.cache.given, None
    if given is None:
        giver = run.cache.giver_of(key)
        if giver is None:
            raise NotUnderstood(f"{kind} attends to keys that no layer has given to its cache")
        given = giver, key, value
        reads = True
    layer, own_k, own_v = given
    latent = hasattr(module, "expand_kv") and own_k.shape[1] == own_v.shape[1] == 1
    if not latent and (key is not own_k or value is not own_v):
        raise NotUnderstood(f"{kind} attends to other keys or values than its cache was given")
    if attention_mask is not None and attention_mask.numel() > 1:
        raise NotUnderstood(f"{kind} has a mask of its own")
    choice = getattr(others.pop("indices", None), "choice", None)
    unknown = sorted(name for name, what in others.items() if name not in HARMLESS and what is not None)
    if unknown:
        raise NotUnderstood(f"attention of {kind} takes {', '.join(unknown)}")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise NotUnderstood(f"attention of {kind} is not causal")
    if query.shape[0] != 1 or key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
        sizes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        raise NotUnderstood(f"attention of {kind} is of queries, keys and values {sizes}")
    window, chunked = _window(module, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    by_position = getattr(module, "query_scale", None)
    if by_position is not None:
        query = (query * by_position(run.positions).unsqueeze(-1)).to(query.dtype)
    sinks = None if s_aux is None else s_aux.flatten().float()
    if latent:
        absorbed = Absorbed.of(module, query, key, value)
        k, v = own_k[0].transpose(0, 1), own_v[0].transpose(0, 1)
        own = [choice.keys.unsqueeze(1)] if choice is not None and choice.layer == layer else []
        kept = torch.cat([k, v, *own], -1)
        # The numbers that follow the latents in a value are left out of the result.
        asked = wide(absorbed.query(query), kept.shape[-1])
        call = Call(layer, asked, kept, kept, scale, window, sinks, softcap, chunked, joint=True, choice=choice)
        mixed = run.attend(call)
        return absorbed.value(mixed).unsqueeze(0), None
    if choice is not None:
        raise NotUnderstood(f"{kind} chooses what it attends to, and keeps no latents")
    # Caches have keys and values of one size: the smaller ones end with zeros, which add nothing.
    dim = max(key.shape[-1], value.shape[-1])
    q, k, v = (wide(each[0].transpose(0, 1), dim) for each in (query, key, value))
    mixed = run.attend(Call(layer, q, k, v, scale, window, sinks, softcap, chunked, reads=reads))
    return mixed[..., : value.shape[-1]].unsqueeze(0), None


def wide(x: Tensor, dim: int) -> Tensor:
    """x (..., d), with zeros behind its numbers so that they are `dim`."""
    return x if x.shape[-1] == dim else nn.functional.pad(x, (0, dim - x.shape[-1]))


class Absorbed(NamedTuple):
    """The matrices by which multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, 2.1) makes keys and values
    of latents (rank): `keys` (heads, nope, rank), `values` (heads, e, rank). Queries take them in, and what was mixed:
    attention is then that of many heads to one, whose keys are a latent and the part that is rotated."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, module: Any, query: Tensor, key: Tensor, value: Tensor) -> Absorbed:
        """Of a module that has attended with these. NotUnderstood where it keeps them in another way."""
        heads, nope, own = query.shape[1], getattr(module, "qk_nope_head_dim", 0), value.shape[-1]
        up = getattr(module, "kv_b_proj", None)
        if up is None or key.shape[1] != heads or up._parameters.get("bias") is not None:
            raise NotUnderstood(f"{type(module).__name__} makes keys of latents in a way of its own")
        weight = up._parameters["weight"]
        weight = weight.packed.expanded() if hasattr(weight, "packed") else weight
        joint = weight.view(heads, nope + own, -1)
        return cls(joint[:, :nope], joint[:, nope:])

    def query(self, q: Tensor) -> Tensor:
        """(1, heads, T, nope + rotated) to (T, heads, rank + rotated)."""
        nope = self.keys.shape[1]
        inner = product(q[0, :, :, :nope], self.keys)
        return torch.cat([inner, q[0, :, :, nope:]], -1).transpose(0, 1)

    def value(self, mixed: Tensor) -> Tensor:
        """(T, heads, rank + rotated) to (T, heads, e)."""
        latents = mixed[..., : self.keys.shape[2]].transpose(0, 1)
        return product(latents, self.values.transpose(1, 2)).transpose(0, 1)


_KINDS = frozenset({None, "full_attention", "sliding_attention", "chunked_attention", "indexed_attention"})
_KINDS |= {"hybrid", "hybrid_sliding"}  # with states beside, see `states.MixerCall`


def _window(module: nn.Module, given: int | None) -> tuple[int | None, bool]:
    """The tokens that a query of the module sees, itself included, as transformers' masks have it, None: all; and
    whether they are those of its chunk."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and layer is not None and layer < len(kinds) else None
    if kind not in _KINDS:
        raise NotUnderstood(f"a layer's attention is of the kind {kind!r}")
    if kind == "chunked_attention":
        return getattr(config, "attention_chunk_size", None), True
    masks = current().masks
    if masks == {None} or (kind is None and len(masks) == 1):  # of all layers, whatever their arguments say
        return next(iter(masks)), False
    if given is None and kind in ("sliding_attention", "hybrid_sliding"):
        return getattr(config, "sliding_window", None), False
    return given, False


def _no_mask(
    *args: Any, allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any
) -> Tensor | None:
    """Masks are made where attention is."""
    current().masks.add(local_size)
    return None if allow_is_causal_skip else torch.zeros(1, 1, 1, 1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
