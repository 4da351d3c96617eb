"""The bytes a plan needs on each tier, before anything is allocated: the same items that the engine then allocates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.model import ModelSpec
from h2o_flexgen.config.offload import TIERS, OffloadPolicy
from h2o_flexgen.config.placement import Placement
from h2o_flexgen.config.tensors import PAGE, WeightGroup, dtype_bytes, round_up
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.units import format_bytes

REWRITE_EVERY = 16
"""Decode steps after which a moving cache is written home as a whole; its newer tokens wait on the compute tier."""
STATE_BUFFERS = 3
"""Copies of a cache or hidden state on its way: one arriving, one computed on, one leaving."""
STAGING_BUFFERS = 2
"""Host copies of a cache or hidden state between a GPU and the disk."""
PROMPT_CHUNK = 2048
"""Prompt tokens that go through a unit at once, in whole sequences: activations stay in the CPU's caches, GEMMs run at
their full rate, and nothing but hidden states grows with the GPU batch."""
_LOGITS = 1 << 20  # attention logits of a chunk of queries that the prompt kernel has alive at once
_MIN_CHUNK = 16  # queries per chunk, at least


class Item(NamedTuple):
    """Bytes on one tier, and what for."""

    tier: str
    what: str
    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """What a plan needs, item by item; items of 0 bytes are left out."""

    items: tuple[Item, ...]

    def total(self, tier: str) -> int:
        """Bytes needed on `tier` at the peak."""
        return sum(item.nbytes for item in self.items if item.tier == tier)

    def table(self) -> str:
        """One line per item and a total per tier, fastest tier first; the largest item of a tier comes first."""
        width = max((len(item.what) for item in self.items), default=0)
        lines: list[str] = []
        for tier in TIERS:
            items = sorted((item for item in self.items if item.tier == tier), key=lambda item: -item.nbytes)
            lines.extend(f"{tier:4}  {item.what:{width}}  {format_bytes(item.nbytes):>10}" for item in items)
            if items:
                lines.append(f"{tier:4}  {'in all':{width}}  {format_bytes(self.total(tier)):>10}")
        return "\n".join(lines)


def footprint(
    spec: ModelSpec,
    workload: Workload,
    policy: OffloadPolicy,
    eviction: EvictionConfig,
    *,
    dtype: str,
    compute_tier: str,
    assignment: Placement,
    unit_bytes: Mapping[str, int] | None = None,
    baseline: int = 0,
) -> Footprint:
    """Peak bytes of one block of `policy`'s shape, all of whose sequences have the workload's lengths.

    unit_bytes: buffer size of each weight group where it is known, else the packed size, and for groups on disk the
    most that reading them in place can take (two pages more per tensor). baseline: host bytes that the process holds
    already. In the formulas: b gpu_batch_size, P prompt_len, T = b P tokens, t = min(T, max(P, PROMPT_CHUNK)), H
    hidden, E embedding width, F ffn, Q = heads x head_dim, G = kv_heads x head_dim, V vocabulary, C = cache slots per
    row and head (the budget and a free one; a full cache needs none free), s bytes per number. A thing streams or
    moves if it is not on the compute tier.

    weights           every group's buffer, on its tier
    weight buffers    compute tier: (lookahead + 1) x the largest streamed group; as many on cpu as staging buffers if
                      any group goes from disk to a gpu
    KV cache          on its tier, per (layer, GPU batch): K and V of (b, kv_heads, C, head_dim), 2 b G C s
    cache records     where attention is computed, per cache that evicts: position int32 and score float32 of
                      (b, kv_heads, C), and eight int64 of (b, kv_heads)
    cache buffers     compute tier: STATE_BUFFERS caches, if any moves; STAGING_BUFFERS on cpu between disk and a gpu
    new tokens        compute tier, per moving cache: K and V (b, kv_heads, head_dim) and slots of the tokens that are
                      not yet written home, at most REWRITE_EVERY - 1 of them
    hidden states     on their tier, per GPU batch: the prompt's, (T, H)
    hidden buffers    compute tier: STATE_BUFFERS of them, if any is parked; STAGING_BUFFERS on cpu as above
    prompt K and V    compute tier: one layer of one chunk of prompts at full length, 2 t G s
    workspace         compute tier: what the hungriest unit of one GPU batch has alive beside all that, `_workspace`
    process           cpu: `baseline`
    """
    block = _Block(spec, workload, policy, eviction.resolve(workload.prompt_len, workload.gen_len), dtype, compute_tier)
    items = [
        *_weight_items(block, assignment, unit_bytes or {}),
        *_cache_items(block, assignment),
        *_hidden_items(block, assignment),
        Item(compute_tier, "prompt K and V of one layer", block.chunk * spec.kv_bytes_per_token_and_layer(dtype)),
        Item(compute_tier, "workspace", _workspace(block)),
        Item("cpu", "process", baseline),
    ]
    return Footprint(tuple(item for item in items if item.nbytes))


@dataclass(frozen=True)
class _Block:
    """What all formulas share."""

    spec: ModelSpec
    workload: Workload
    policy: OffloadPolicy
    budget: Budget
    dtype: str
    compute_tier: str

    @property
    def size(self) -> int:
        """s: bytes per number."""
        return dtype_bytes(self.dtype)

    @property
    def rows(self) -> int:
        """b."""
        return self.policy.gpu_batch_size

    @property
    def tokens(self) -> int:
        """T: prompt tokens of one GPU batch."""
        return self.rows * self.workload.prompt_len

    @property
    def chunk(self) -> int:
        """t: prompt tokens that go through a unit at once."""
        return min(self.tokens, max(self.workload.prompt_len, PROMPT_CHUNK))

    @property
    def slots(self) -> int:
        """C: cache slots per row and KV head."""
        return self.budget.total + (not self.budget.full)

    @property
    def heads(self) -> int:
        """b x kv_heads: rows of a cache that decide for themselves what stays."""
        return self.rows * self.spec.num_kv_heads

    def staged(self, homes: set[str]) -> bool:
        """Whether something goes through the host on its way between disk and compute tier."""
        return self.compute_tier == "gpu" and "disk" in homes


def _weight_items(block: _Block, assignment: Placement, unit_bytes: Mapping[str, int]) -> Iterator[Item]:
    totals = dict.fromkeys(TIERS, 0)
    largest, homes = 0, set()
    for key, group in block.spec.groups_by_key.items():
        home = assignment.weights[key]
        nbytes = unit_bytes[key] if key in unit_bytes else _buffer_bytes(group, block.dtype, home)
        totals[home] += nbytes
        if home != block.compute_tier:
            largest = max(largest, nbytes)
            homes.add(home)
    yield from (Item(tier, "weights", nbytes) for tier, nbytes in totals.items())
    buffers = (block.policy.lookahead + 1) * largest
    yield Item(block.compute_tier, "weight buffers", buffers)
    yield Item("cpu", "weight staging buffers", buffers if block.staged(homes) else 0)


def _buffer_bytes(group: WeightGroup, dtype: str, home: str) -> int:
    return group.buffer_bytes(dtype) + (2 * PAGE * len(group.tensors) if home == "disk" else 0)


def _cache_items(block: _Block, assignment: Placement) -> Iterator[Item]:
    """Caches, what is known about their tokens, and what they move through."""
    cache = round_up(block.rows * block.slots * block.spec.kv_bytes_per_token_and_layer(block.dtype), PAGE)
    stays = {block.compute_tier} | ({"cpu"} if block.policy.cpu_cache_compute else set())
    homes = list(assignment.cache.values())
    moving = [home for home in homes if home not in stays]
    yield from (Item(tier, "KV cache", homes.count(tier) * cache) for tier in TIERS)
    yield Item(block.compute_tier, "cache buffers", STATE_BUFFERS * cache if moving else 0)
    yield Item("cpu", "cache staging buffers", STAGING_BUFFERS * cache if block.staged(set(moving)) else 0)
    waiting = min(REWRITE_EVERY - 1, max(0, block.workload.gen_len - 2))
    token = block.rows * block.spec.kv_bytes_per_token_and_layer(block.dtype) + 8 * block.heads
    yield Item(block.compute_tier, "new tokens of moving caches", len(moving) * waiting * token)
    if not block.budget.full:
        record = 8 * block.heads * block.slots + 64 * block.heads
        on_cpu = sum(home == "cpu" for home in homes) if "cpu" in stays else 0
        yield Item("cpu", "cache records", on_cpu * record)
        yield Item(block.compute_tier, "cache records", (len(homes) - on_cpu) * record)
    if block.compute_tier != "cpu" and "cpu" in stays & set(homes):
        yield Item("cpu", "workspace", _decode_attention(block))


def _hidden_items(block: _Block, assignment: Placement) -> Iterator[Item]:
    hidden = round_up(block.spec.hidden_bytes(block.tokens, block.dtype), PAGE)
    homes = list(assignment.hidden.values())
    parked = set(homes) - {block.compute_tier}
    yield from (Item(tier, "hidden states", homes.count(tier) * hidden) for tier in TIERS)
    yield Item(block.compute_tier, "hidden buffers", STATE_BUFFERS * hidden if parked else 0)
    yield Item("cpu", "hidden staging buffers", STAGING_BUFFERS * hidden if block.staged(parked) else 0)


def _workspace(block: _Block) -> int:
    """Bytes of activations that the hungriest unit has alive at once, beside hidden states, which it updates in place.

    embed      ids and positions (T) int64, four (T, max(E, H))
    attention  norm and output (t, H), queries and attention output (t, Q), the kernel's output of a
               group of equal prompts (t, Q), column sums (b, kv_heads, P) float32, and the larger of two:
               for queries in chunks, the softmax of one beside the logits of the next (three float32 and the cast, at
               most _LOGITS of each or _MIN_CHUNK rows of (heads, P)), and queries and output of one row (P, Q);
               to rank the prompt's tokens, four int64 of (b, kv_heads, P)
    decode     the (b, H) and (b, Q) of the above, and `_decode_attention`
    mlp        norm and output (t, H), and the (t, F) before and after the activation, the gate too
    head       logits (b, V) in the dtype and in float32, and a sampler's sorted copies of one row
    """
    spec, size, tokens, rows = block.spec, block.size, block.chunk, block.rows
    query = spec.num_heads * spec.head_dim
    prompt = block.workload.prompt_len
    chunk = min(max(_LOGITS, _MIN_CHUNK * spec.num_heads * prompt), spec.num_heads * prompt * prompt)
    wide = 3 if spec.arch.gated_mlp else 2
    return max(
        block.tokens * (32 + 4 * max(spec.embed_dim, spec.hidden_size) * size),
        tokens * (3 * spec.hidden_size + 3 * query) * size
        + 4 * block.heads * prompt
        + max(chunk * (12 + size) + 2 * prompt * query * size, 32 * block.heads * prompt),
        rows * (3 * spec.hidden_size + 3 * query) * size + _decode_attention(block),
        tokens * (3 * spec.hidden_size + wide * spec.ffn_size) * size,
        rows * (2 * spec.hidden_size + spec.vocab_size) * size + (4 * rows + 32) * spec.vocab_size,
    )


def _decode_attention(block: _Block) -> int:
    """One step of one GPU batch: logits and softmax (b, heads, C) float32, its cast, and the ranks compared, int64."""
    return block.rows * block.slots * (block.spec.num_heads * (8 + block.size) + 16 * block.spec.num_kv_heads)
