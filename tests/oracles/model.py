"""transformers' own model with an evicting cache, one sequence and one token at a time.

Everything but attention is transformers' code: embeddings, projections, norms, rotary positions. Attention and eviction
are the slow oracles', which transformers calls as if they were one of its attention functions. Nothing of the engine is
used, so that both can only agree by being right.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from h2o_flexgen.config.eviction import EvictionConfig
from tests.oracles.eviction import EvictionOracle, FullOracle, LocalOracle, Vector
from tests.oracles.policies import ExpectedAttentionOracle
from tests.tiny import in_sequence_of, rope_of

NAME = "oracle"
"""What the slow attention is called among transformers' attention functions."""

MakeCache = Callable[[int, int, float, int | None], EvictionOracle]
"""(layer, KV head, scale, window) -> the cache of that head."""


@dataclass
class OracleRun:
    """`kept[step][layer][head]`: positions after the prompt (step 0) and after every step that follows."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[list[list[set[int]]]] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    """The numbers of the layers in `kept`: others keep no keys."""
    closest: float = math.inf
    """The smallest difference of two scores or logits that a decision has hung on: below rounding error, two correct
    implementations may disagree from then on."""


class OracleAttention:
    """An attention function for transformers that keeps the keys and values of one sequence, as oracles do."""

    def __init__(self, make_cache: MakeCache) -> None:
        self._make_cache = make_cache
        self.layers: dict[int, list[EvictionOracle]] = {}
        self._keys: dict[int, Tensor] = {}  # by layer, those of the last call
        self._chosen: list[set[int] | None] = []  # of the new tokens, by the last layer with an indexer

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **settings: Any
    ) -> tuple[Tensor, None]:
        """query (1, heads, n, d), key (1, kv_heads, n, d) and value (1, kv_heads, n, e) of the new tokens to
        (1, n, heads, e)."""
        assert mask is None or mask.numel() == 1, "nobody may see other keys than these caches keep"
        if hasattr(module, "expand_kv"):  # all heads share the latents that their keys and values are made of
            return _one_head(partial(self._answer, module, settings), query, key, value), None
        return self._answer(module, settings, query, key, value), None

    def _answer(
        self, module: torch.nn.Module, settings: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        layer, kv_heads = int(module.layer_idx), key.shape[1]
        source = next((other for other, given in self._keys.items() if given is key), layer)
        if source != layer:  # another layer has attended to these keys, and let some of them go
            return _read(self.layers[source], query, key, value, settings["scaling"])
        self._keys[layer] = key
        if layer not in self.layers:
            window = settings.get("sliding_window")
            self.layers[layer] = [
                self._make_cache(layer, head, settings["scaling"], window) for head in range(kv_heads)
            ]
            sinks = settings.get("s_aux")
            for head, cache in enumerate(self.layers[layer]):
                cache.siblings = [each for each in self.layers[layer] if each.budget == cache.budget]
                cache.sinks = () if sinks is None else sinks.view(kv_heads, -1)[head].tolist()
                cache.soft_cap = settings.get("softcap")
        if settings.get("indices") is not None:
            self._choose(module, settings["indices"][0].tolist(), self.layers[layer])
        groups = query[0].unflatten(0, (kv_heads, -1)).transpose(1, 2).tolist()  # (kv_heads, n, group, d)
        heads = zip(self.layers[layer], groups, key[0].tolist(), value[0].tolist(), strict=True)
        outputs = torch.tensor([_attend(*head) for head in heads])
        return outputs.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None].to(value.dtype)

    def _choose(self, module: Any, indices: list[list[int]], caches: list[EvictionOracle]) -> None:
        """Tells caches which tokens new ones attend to, by an indexer of their layer or of one before: all where there
        was nothing to choose."""
        first, held = caches[0].length, len(caches[0].kept)
        if getattr(module, "indexer", None) is not None:
            self._chosen = [set(row) if held + i >= len(row) else None for i, row in enumerate(indices)]
        for cache in caches:
            cache.chosen = {first + i: row for i, row in enumerate(self._chosen) if row is not None}

    def hide(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before an indexer is called: the mask by which it does not see what its layer no longer keeps."""
        caches, new = self.layers.get(module.layer_idx), args[0].shape[1]
        first, kept = (caches[0].length, caches[0].kept) if caches else (0, set[int]())
        mask = torch.full((1, new, first + new), -math.inf)
        mask[:, :, list(kept)] = 0.0
        mask[0, :, first:] = torch.full((new, new), -math.inf).triu(1)
        return (*args[:3], mask, *args[4:]), kwargs


def _no_mask(*args: Any, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """Masks are made where attention is, and before an indexer."""
    return None if allow_is_causal_skip else torch.zeros(1, 1, 1, 1)


def _read(caches: list[EvictionOracle], query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Queries of a layer that keeps no keys, over those of another: a prompt's see all of it, within the window, that
    of a step what the other layer's has seen."""
    length, heads = query.shape[2], query.shape[1]
    outputs = torch.empty(1, length, heads, value.shape[-1])
    for head in range(heads):
        cache, own = caches[head * len(caches) // heads], head * len(caches) // heads
        for i in range(length):
            if length > 1:
                first = 0 if cache.window is None else max(0, i + 1 - cache.window)
                keys, values = key[0, own, first : i + 1], value[0, own, first : i + 1]
            else:
                keys, values = (torch.tensor(part) for part in zip(*cache.saw.values(), strict=True))
            outputs[0, i, head] = (keys @ query[0, head, i] * scale).softmax(0) @ values
    return outputs.to(value.dtype)


def _one_head(answer: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of heads that have keys and values of their own, by one that has all of them side by side: each query
    meets its own head's, and nothing elsewhere."""
    heads, e = query.shape[1], value.shape[-1]
    own = torch.eye(heads)[None, :, None, :, None]
    wide = (query.unsqueeze(3) * own).flatten(3)
    joined = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (key, value))
    mixed = answer(wide, *joined).unflatten(-1, (heads, e))  # (1, n, heads, heads, e)
    return torch.stack([mixed[:, :, head, head] for head in range(heads)], 2)


def _attend(cache: EvictionOracle, q: list, k: list, v: list) -> list:
    """One KV head, (n, group, d): the whole prompt first, then one token at a time."""
    if cache.length == 0:
        return cache.prompt(q, k, v)
    return [cache.step(*token) for token in zip(q, k, v, strict=True)]


@torch.no_grad()
def oracle_generate(
    model: PreTrainedModel,
    prompt: list[int],
    new_tokens: int,
    oracle: type[EvictionOracle],
    eviction: EvictionConfig,
    row_id: int = 0,
    spans: tuple[tuple[int, int], ...] = (),
) -> OracleRun:
    """Greedy decoding of one prompt. With rolling positions, what of it is beyond the context goes in by steps."""
    budget = eviction.resolve(len(prompt), new_tokens)
    rotations = Rotations(model) if eviction.rolling_positions else None
    turned = None
    if issubclass(oracle, ExpectedAttentionOracle) and rotations is None and model.config.model_type != "opt":
        turned = Rotations(model)
        turned.prepare(len(prompt) + 512)

    budgets = eviction.by_layer(windows_of(model), len(prompt), new_tokens, spans)

    def make_cache(layer: int, head: int, scale: float, window: int | None) -> EvictionOracle:
        held = budgets[layer].part(int(head in eviction.far_heads(layer)))
        assert held == held.within(window)
        kind = oracle if held.full or oracle is not FullOracle else LocalOracle  # what left the window is let go
        places = {"layer": layer, "row_id": row_id, "head": head}
        if rotations is not None:
            places["rotate"] = partial(rotations.turn, layer)
        elif turned is not None:
            places["rotated_by"] = partial(turned.turn, layer)
        return kind(held, scale=scale, seed=eviction.seed, window=window, **places)

    attention = OracleAttention(make_cache)
    before = model.config._attn_implementation
    hooks = [module.register_forward_pre_hook(attention.hide, with_kwargs=True) for module in _indexers(model)]
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)
    try:
        with rotations or in_sequence_of(model, len(prompt) + new_tokens - 1):
            attention.layers.clear()
            replays = getattr(oracle, "replays", False) and not budget.full
            run = _greedy(model, prompt, new_tokens, attention, rotations, replays)
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    run.closest = min(run.closest, *(cache.closest for layer in attention.layers.values() for cache in layer))
    return run


def _has_states(model: PreTrainedModel) -> bool:
    """Whether some layers keep states, which say all that they know of earlier tokens."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return any("linear" in kind or kind in ("conv", "mamba") for kind in kinds)


def _indexers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that choose which tokens are attended to."""
    return [module for module in model.modules() if type(module).__name__.endswith("Indexer")]


def _name_of_cache(model: PreTrainedModel) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _States(DynamicCache):
    """transformers' own states, and all keys of indexers; of keys and values, which are the oracles', it gives back
    what it gets."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.index: dict[int, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        held = [self.index[layer_idx]] if layer_idx in self.index else []
        self.index[layer_idx] = torch.cat([*held, indexer_key_states], 1)
        return self.index[layer_idx]


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """Of each layer: how many tokens its queries see; None: all."""
    config, layers = model.config, range(model.config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return [None for _ in layers]
    kinds = getattr(config, "layer_types", None)
    return [window if kinds is None or kinds[layer] == "sliding_attention" else None for layer in layers]


def _greedy(
    model: PreTrainedModel,
    prompt: list[int],
    new_tokens: int,
    attention: OracleAttention,
    rotations: Rotations | None,
    replays: bool,
) -> OracleRun:
    """`replays`: the prompt goes in twice, one after the other, and its own last token is what goes on."""
    run, states = OracleRun(), _States(model.config) if _has_states(model) or _indexers(model) else None
    ids, first, stop = list(prompt), 0, len(prompt)
    if rotations is not None:
        stop = min(stop, rotations.context)
        rotations.prepare(stop)
    while True:
        fed = ids[first:stop] * (2 if replays and first == 0 else 1)
        positions = torch.arange(first, first + len(fed))[None]
        if rotations is not None and first:  # a place in the cache: queries do not grow there
            positions.zero_()
        given = {} if states is None else {_name_of_cache(model): states}
        whole = model(torch.tensor([fed]), position_ids=positions, use_cache=bool(given), **given)
        logits = whole.logits[0, stop - first - 1].float()
        run.kept.append([[set(cache.kept) for cache in layer] for _, layer in sorted(attention.layers.items())])
        run.layers = sorted(attention.layers)
        if stop == len(ids):
            best, second = logits.topk(2).values
            run.closest = min(run.closest, float(best - second))
            run.tokens.append(int(logits.argmax()))
            run.logprobs.append(float(logits.log_softmax(-1).max()))
            if len(run.tokens) == new_tokens:
                return run
            ids.append(run.tokens[-1])
        if rotations is not None and first == 0:
            rotations.prepare(rotations.trained)
        first, stop = stop, stop + 1


def _layers_without_positions(model: PreTrainedModel) -> set[int]:
    """Those whose queries and keys are not rotated, where others are."""
    config = model.config
    if config.model_type == "smollm3":
        return {layer for layer, turns in enumerate(config.no_rope_layers) if not turns}
    if config.model_type in ("cohere2", "exaone4") and config.sliding_window is not None:
        return {layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"}
    return set()


class Rotations:
    """Inside it, the model leaves queries and keys as they are; `turn` does what it would have done.

    context: the longest sequence; trained: tokens up to which angles do not depend on the length, where they do beyond.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._module = next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))
        types = getattr(model.config, "layer_types", None)
        self._types = types if isinstance(self._module.rope_type, dict) else [None] * model.config.num_hidden_layers
        self._unturned = _layers_without_positions(model)
        # Pairs that turn together are neighbours in a head; cohere2 has the angle of each twice in a row.
        self._side_by_side = model.config.model_type in ("cohere2", "glm4", "ernie4_5_moe")
        self._doubled = model.config.model_type == "cohere2"
        self._repeats = 2 if model.config.model_type == "gpt_oss" else 1
        self._tables: dict[str | None, list[list[list[float]]]] = {}
        rope = rope_of(model)
        kind, factor = rope.get("rope_type"), rope.get("factor", 1.0)
        self.context = self.trained = model.config.max_position_embeddings
        if kind == "longrope":
            self.trained = rope["original_max_position_embeddings"]
        elif kind in ("linear", "dynamic"):  # their configs give the context before it is stretched
            self.context = int(self.context * factor)

    def prepare(self, length: int) -> None:
        """From now on, angles are those of a sequence of `length` tokens."""
        for kind in set(self._types):
            for positions in (torch.zeros(1, 1), torch.arange(length)[None]):  # dynamic angles start with a short one
                angles = self._module.forward(torch.zeros(1), positions, *([kind] if kind else []))
            # gpt-oss has the angles of one half alone.
            self._tables[kind] = [torch.cat([part[0]] * self._repeats, -1).tolist() for part in angles]
            if self._side_by_side and self._doubled:
                self._tables[kind] = [[row[::2] * 2 for row in table] for table in self._tables[kind]]

    def turn(self, layer: int, vector: Vector, position: int, way: int = 1) -> list[float]:
        """`vector` (d), its leading dimensions turned, in pairs of halves or of neighbours; `way` -1: back."""
        if layer in self._unturned:
            return list(vector)
        cos, sin = (part[position] for part in self._tables[self._types[layer]])
        half = len(cos) // 2
        first, second = vector[:half], vector[half : 2 * half]
        if self._side_by_side:
            first, second = vector[: 2 * half : 2], vector[1 : 2 * half : 2]
        left = [a * c - way * b * s for a, b, c, s in zip(first, second, cos[:half], sin[:half], strict=True)]
        right = [b * c + way * a * s for a, b, c, s in zip(first, second, cos[half:], sin[half:], strict=True)]
        if self._side_by_side:
            left, right = [x for pair in zip(left, right, strict=True) for x in pair], []
        return [*left, *right, *vector[2 * half :]]

    def __enter__(self) -> None:
        self._hook = self._module.register_forward_hook(
            lambda module, given, angles: (torch.ones_like(angles[0]), torch.zeros_like(angles[1]))
        )

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
