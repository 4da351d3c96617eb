"""transformers' own model with an evicting cache, one sequence and one token at a time.

Everything but attention is transformers' code: embeddings, projections, norms, rotary positions. Attention and eviction
are the slow oracles', which transformers calls as if they were one of its attention functions. Nothing of the engine is
used, so that both can only agree by being right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from h2o_flexgen.config.eviction import EvictionConfig
from tests.oracles.eviction import EvictionOracle, FullOracle, LocalOracle
from tests.tiny import in_sequence_of

NAME = "oracle"
"""What the slow attention is called among transformers' attention functions."""

MakeCache = Callable[[int, int, float, int | None], EvictionOracle]
"""(layer, KV head, scale, window) -> the cache of that head."""


@dataclass
class OracleRun:
    """`kept[step][layer][head]`: positions after the prompt (step 0) and after every decoded token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[list[list[set[int]]]] = field(default_factory=list)
    closest: float = math.inf
    """The smallest difference of two scores or logits that a decision has hung on: below rounding error, two correct
    implementations may disagree from then on."""


class OracleAttention:
    """An attention function for transformers that keeps the keys and values of one sequence, as oracles do."""

    def __init__(self, make_cache: MakeCache) -> None:
        self._make_cache = make_cache
        self.layers: dict[int, list[EvictionOracle]] = {}

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **settings: Any
    ) -> tuple[Tensor, None]:
        """query (1, heads, n, d), key and value (1, kv_heads, n, d) of the new tokens to (1, n, heads, d)."""
        assert mask is None, "transformers makes masks only for attention functions that it knows"
        layer, kv_heads = module.layer_idx, key.shape[1]
        if layer not in self.layers:
            window = settings.get("sliding_window")
            self.layers[layer] = [
                self._make_cache(layer, head, settings["scaling"], window) for head in range(kv_heads)
            ]
        groups = query[0].unflatten(0, (kv_heads, -1)).transpose(1, 2).tolist()  # (kv_heads, n, group, d)
        heads = zip(self.layers[layer], groups, key[0].tolist(), value[0].tolist(), strict=True)
        outputs = torch.tensor([_attend(*head) for head in heads])
        return outputs.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None].to(value.dtype), None


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
) -> OracleRun:
    """Greedy decoding of one prompt."""
    budget = eviction.resolve(len(prompt), new_tokens)

    def make_cache(layer: int, head: int, scale: float, window: int | None) -> EvictionOracle:
        held = budget.within(window)
        kind = oracle if held.full or oracle is not FullOracle else LocalOracle  # what left the window is let go
        places = {"layer": layer, "row_id": row_id, "head": head}
        return kind(held, scale=scale, seed=eviction.seed, window=window, **places)

    attention = OracleAttention(make_cache)
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    try:
        with in_sequence_of(model, len(prompt) + new_tokens):
            attention.layers.clear()
            run = _greedy(model, prompt, new_tokens, attention)
    finally:
        model.set_attn_implementation(before)
    run.closest = min(run.closest, *(cache.closest for layer in attention.layers.values() for cache in layer))
    return run


def _greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int, attention: OracleAttention) -> OracleRun:
    run = OracleRun()
    ids, first = list(prompt), 0
    while len(run.tokens) < new_tokens:
        positions = torch.arange(first, len(ids))[None]
        logits = model(torch.tensor([ids[first:]]), position_ids=positions, use_cache=False).logits[0, -1].float()
        best, second = logits.topk(2).values
        run.closest = min(run.closest, float(best - second))
        token = int(logits.argmax())
        run.kept.append([[set(cache.kept) for cache in layer] for _, layer in sorted(attention.layers.items())])
        run.tokens.append(token)
        run.logprobs.append(float(logits.log_softmax(-1)[token]))
        first = len(ids)
        ids.append(token)
    return run
