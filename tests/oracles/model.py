"""An OPT decoder with an evicting cache, one sequence and one token at a time, on transformers' own layers.

Projections, norms and embeddings are transformers' modules; attention and eviction are the slow oracles'. Nothing of
the engine is used, so that both can only agree by being right.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import OPTForCausalLM

from h2o_flexgen.config.eviction import EvictionConfig
from tests.oracles.eviction import EvictionOracle


@dataclass
class OracleRun:
    """`kept[step][layer][head]`: positions after the prompt (step 0) and after every decoded token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[list[list[set[int]]]] = field(default_factory=list)
    closest: float = float("inf")


@torch.no_grad()
def oracle_generate(
    model: OPTForCausalLM,
    prompt: list[int],
    new_tokens: int,
    oracle: type[EvictionOracle],
    eviction: EvictionConfig,
    row_id: int = 0,
) -> OracleRun:
    """Greedy decoding of one prompt."""
    config = model.config
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    budget = eviction.resolve(len(prompt), new_tokens)
    caches = [
        [
            oracle(budget, scale=size**-0.5, seed=eviction.seed, layer=layer, row_id=row_id, head=head)
            for head in range(heads)
        ]
        for layer in range(config.num_hidden_layers)
    ]
    run = OracleRun()
    ids, first = list(prompt), 0
    while len(run.tokens) < new_tokens:
        logits = _forward(model, ids[first:], first, caches)
        token = int(logits.argmax())
        run.kept.append([[set(cache.kept) for cache in layer] for layer in caches])
        run.tokens.append(token)
        run.logprobs.append(float(logits.log_softmax(-1)[token]))
        first = len(ids)
        ids.append(token)
    run.closest = min(cache.closest for layer in caches for cache in layer)
    return run


def _forward(model: OPTForCausalLM, ids: list[int], first: int, caches: list[list[EvictionOracle]]) -> Tensor:
    """Logits after the last of `ids`, whose first has the position `first`."""
    decoder = model.model.decoder
    hidden = decoder.embed_tokens(torch.tensor(ids))
    if decoder.project_in is not None:
        hidden = decoder.project_in(hidden)
    positions = torch.arange(first, first + len(ids)) + decoder.embed_positions.offset
    hidden = hidden + torch.nn.functional.embedding(positions, decoder.embed_positions.weight)
    for layer, layer_caches in zip(decoder.layers, caches, strict=True):
        hidden = _layer(layer, hidden, layer_caches)
    if decoder.final_layer_norm is not None:
        hidden = decoder.final_layer_norm(hidden)
    if decoder.project_out is not None:
        hidden = decoder.project_out(hidden)
    return model.lm_head(hidden[-1])


def _layer(layer: torch.nn.Module, hidden: Tensor, caches: list[EvictionOracle]) -> Tensor:
    before = layer.do_layer_norm_before
    x = layer.self_attn_layer_norm(hidden) if before else hidden
    attn = layer.self_attn
    q, k, v = (
        projection(x).view(len(x), len(caches), -1).tolist() for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    outputs = [_attend(cache, h, q, k, v) for h, cache in enumerate(caches)]
    hidden = hidden + attn.out_proj(torch.cat(outputs, dim=-1))
    hidden = hidden if before else layer.self_attn_layer_norm(hidden)
    x = layer.final_layer_norm(hidden) if before else hidden
    hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(x)))
    return hidden if before else layer.final_layer_norm(hidden)


def _attend(cache: EvictionOracle, head: int, q: list, k: list, v: list) -> Tensor:
    """One head: the whole prompt first, then one token at a time."""
    if cache.length == 0:
        rows = cache.prompt([[t[head]] for t in q], [t[head] for t in k], [t[head] for t in v])
    else:
        rows = [cache.step([q[0][head]], k[0][head], v[0][head])]
    return torch.tensor(rows).squeeze(1)
