"""The bytes a plan needs on each tier, before anything is allocated: the same items that the engine then allocates.

In the formulas, here and in `workspace`: b gpu_batch_size, P prompt_len, T = b P tokens, t = min(T, prefill_chunk),
H hidden, E embedding width, F ffn, Q = heads x head_dim, G = kv_heads x head_dim, D rotated dimensions, V vocabulary,
C = cache slots per row and head (the budget within the layer's window and a free one; a full cache needs none free),
s bytes per number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.kernels import Kernels
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import PAGE, round_up
from h2o_flexgen.config.offload import TIERS, OffloadPolicy
from h2o_flexgen.config.placement import Placement
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.schedule import host_attention, workspace
from h2o_flexgen.schedule.recorded import recordable
from h2o_flexgen.schedule.weight_room import group_bytes, streamed_sizes, weight_room
from h2o_flexgen.schedule.workspace import BlockShape
from h2o_flexgen.units import format_bytes

REWRITE_EVERY = 16
"""Decode steps after which a moving cache is written home as a whole; its newer tokens wait on the compute tier."""
STATE_BUFFERS = 3
"""Copies of a cache or hidden state on its way: one arriving, one computed on, one leaving."""
STAGING_BUFFERS = 2
"""Host copies of a cache or hidden state between a GPU and the disk."""


RECORDED = "recorded steps"
"""The item of decode steps that are recorded: nothing else is there only if nothing moves."""


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
    kernels: Kernels = Kernels.CPU,
) -> Footprint:
    """Peak bytes of one block of `policy`'s shape, all of whose sequences have the workload's lengths.

    unit_bytes: buffer size of each weight group where it is known, else the packed size, and for groups on disk the
    most that reading them in place can take (two pages more per tensor). baseline: host bytes that the process holds
    already. kernels: those of the compute tier; Triton's GPU records decode steps where they can be. A thing streams or
    moves if it is not on the compute tier. Letters are those of this module.

    weights           every group's buffer, on its tier
    weight buffers    compute tier: room for lookahead + 1 neighbours among the streamed groups, `weight_room`; as much
                      on cpu for staging if any group goes from disk to a gpu
    KV cache          on its tier, per (layer, GPU batch): K and V of (b, kv_heads, C, head_dim), 2 b G C s
    cache records     where attention is computed, per cache that evicts: position int32 and score float32 of
                      (b, kv_heads, C), where positions roll a rank int32 too, and eight int64 of (b, kv_heads)
    cache buffers     compute tier: STATE_BUFFERS of the largest cache that moves; STAGING_BUFFERS on cpu between disk
                      and a gpu
    new tokens        compute tier, per moving cache: K and V (b, kv_heads, head_dim) and slots of the tokens that are
                      not yet written home, at most REWRITE_EVERY - 1 of them
    hidden states     on their tier, per GPU batch: the prompt's, (T, H), with a parallel layer's sum (T, 2 H)
    hidden buffers    compute tier: STATE_BUFFERS of them, if any is parked; STAGING_BUFFERS on cpu as above
    prompt K and V    compute tier: one layer of one chunk of prompts, 2 t G s, and of what it follows,
                      `workspace.prompt_keys`
    token positions   compute tier: `workspace.positions`
    workspace         compute tier: what the hungriest unit of one GPU batch has alive beside all that,
                      `workspace.workspace`; on cpu, if a gpu computes all else but caches there,
                      `workspace.on_cpu_beside_gpu`
    for the cpu       compute tier and cpu: what caches take that are computed on there beside a gpu, `_host_items`
    recorded steps    compute tier, where the GPU records steps and everything stays on it: `workspace.recorded`
    process           cpu: `baseline`; beside a GPU that is the context's share of the host and the buffers through
                      which pageable memory is copied, too
    """
    block = BlockShape.of(spec, workload, policy, eviction, dtype, compute_tier, kernels)
    records = kernels is Kernels.TRITON and _recordable(block, assignment)
    recorded = workspace.recorded(block) if records else 0
    beside = [Item(compute_tier, RECORDED, recorded), Item("cpu", "process", baseline)]
    items = [*items_of(block, assignment, unit_bytes), *beside]
    return Footprint(tuple(item for item in items if item.nbytes))


def items_of(block: BlockShape, assignment: Placement, unit_bytes: Mapping[str, int] | None = None) -> Iterator[Item]:
    """See `footprint`: all but recorded steps and the process; `assignment` may be a part of a model's."""
    yield from _weight_items(block, assignment, unit_bytes or {})
    yield from _cache_items(block, assignment)
    yield from _hidden_items(block, assignment)
    yield from _host_items(block, assignment)
    yield Item(block.compute_tier, "prompt K and V of one layer", workspace.prompt_keys(block))
    yield Item(block.compute_tier, "token positions", workspace.positions(block))
    yield Item(block.compute_tier, "workspace", workspace.workspace(block))


def _recordable(block: BlockShape, assignment: Placement) -> bool:
    """Whether decode steps can be recorded: everything stays on the compute tier."""
    kinds = (assignment.weights, assignment.cache, assignment.hidden)
    homes = {tier for kind in kinds for tier in kind.values()}
    return recordable(moves=homes != {block.compute_tier}, elsewhere=False, rolling=block.rolling)


def _weight_items(block: BlockShape, assignment: Placement, unit_bytes: Mapping[str, int]) -> Iterator[Item]:
    totals, spec = dict.fromkeys(TIERS, 0), block.spec
    for key, home in assignment.weights.items():
        totals[home] += group_bytes(spec.groups_by_key[key], block.dtype, home, unit_bytes)
    yield from (Item(tier, "weights", nbytes) for tier, nbytes in totals.items())
    sizes = streamed_sizes(spec, assignment.weights, block.dtype, block.compute_tier, unit_bytes)
    buffers = weight_room(sizes, block.policy.lookahead).nbytes
    yield Item(block.compute_tier, "weight buffers", buffers)
    homes = {assignment.weights[key] for key in sizes}
    yield Item("cpu", "weight staging buffers", buffers if block.staged(homes) else 0)


def _cache_items(block: BlockShape, assignment: Placement) -> Iterator[Item]:
    """Caches, what is known about their tokens, and what they move through."""
    kv = block.spec.kv_bytes_per_token_and_layer(block.dtype)
    slots = [block.slots(layer) for layer in range(block.spec.num_layers)]
    sizes = [round_up(block.rows * count * kv, PAGE) for count in slots]
    stays = {block.compute_tier} | ({"cpu"} if block.policy.cpu_cache_compute else set())
    caches, records = dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0)
    moving: list[tuple[int, str]] = []
    for (layer, _), home in assignment.cache.items():
        caches[home] += sizes[layer]
        if home not in stays:
            moving.append((sizes[layer], home))
        if not block.budgets[layer].full:
            record = block.heads * ((12 if block.rolling else 8) * slots[layer] + 64)
            records[home if home in stays else block.compute_tier] += record
    largest, away = max(moving, default=(0, ""))[0], {home for _, home in moving}
    yield from (Item(tier, "KV cache", nbytes) for tier, nbytes in caches.items())
    yield Item(block.compute_tier, "cache buffers", STATE_BUFFERS * largest)
    yield Item("cpu", "cache staging buffers", STAGING_BUFFERS * largest if block.staged(away) else 0)
    waiting = min(REWRITE_EVERY - 1, max(0, block.workload.gen_len - 2))
    token = block.rows * kv + 8 * block.heads
    yield Item(block.compute_tier, "new tokens of moving caches", len(moving) * waiting * token)
    yield from (Item(tier, "cache records", nbytes) for tier, nbytes in records.items())
    if block.compute_tier != "cpu" and "cpu" in stays and caches["cpu"]:
        yield Item("cpu", "workspace", workspace.on_cpu_beside_gpu(block))


def _host_items(block: BlockShape, assignment: Placement) -> Iterator[Item]:
    """What caches on cpu take whose attention is computed there while a gpu goes on with something else.

    prompts           both tiers: FILL_BUFFERS times what is filled in at once, `host_attention.prompt_bytes`
    queries           both tiers, with several GPU batches, for each that has such a cache: queries, keys and values
                      (b, Q + 2 G) and answers (b, Q)
    output projection compute tier: then of the largest attention unit, which is copied if it streams
    hidden that waits compute tier: then the hidden states of a decode step, (b, H) per such GPU batch, which are not
                      parked before the answer is there
    """
    policy, spec, tier = block.policy, block.spec, block.compute_tier
    places = [place for place, home in assignment.cache.items() if home == "cpu"]
    if tier == "cpu" or not (policy.cpu_cache_compute and policy.overlap and places):
        return
    prompts = host_attention.prompt_bytes(spec, block.dtype, block.rows, block.prompt, policy.chunk, sums=block.evicts)
    yield from (Item(each, "prompts for the cpu", host_attention.FILL_BUFFERS * prompts) for each in (tier, "cpu"))
    if policy.num_gpu_batches == 1:
        return
    batches = {batch for _, batch in places}
    nbytes = len(batches) * host_attention.buffer_bytes(spec, block.rows, block.dtype)
    yield from (Item(each, "queries for the cpu", nbytes) for each in (tier, "cpu"))
    groups = [spec.groups_by_key[unit.weights] for unit in spec.units if unit.kind == "attn"]
    kept = max(host_attention.output_bytes(group, block.dtype) for group in groups)
    yield Item(tier, "output projection", kept)
    yield Item(tier, "hidden that waits", len(batches) * spec.hidden_bytes(block.rows, block.dtype))


def _hidden_items(block: BlockShape, assignment: Placement) -> Iterator[Item]:
    hidden = round_up(block.spec.hidden_bytes(block.tokens, block.dtype), PAGE)
    homes = list(assignment.hidden.values())
    parked = set(homes) - {block.compute_tier}
    yield from (Item(tier, "hidden states", homes.count(tier) * hidden) for tier in TIERS)
    yield Item(block.compute_tier, "hidden buffers", STATE_BUFFERS * hidden if parked else 0)
    yield Item("cpu", "hidden staging buffers", STAGING_BUFFERS * hidden if block.staged(parked) else 0)
