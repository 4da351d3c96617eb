"""Bytes that a plan needs on each tier, computed before anything is allocated.

Symbols, here and in `workspace`: b gpu_batch_size, P prompt_len, T = b P tokens, t = min(T, prefill_chunk), H hidden,
E embedding width, F ffn, Q = heads x head_dim, G = kv_heads x head_dim, D rotated dimensions, V vocabulary, C cache
slots per row and head (the budget within the layer's window, plus a free one unless the cache is full), s bytes per
number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from h2o_flexgen.config.model.packing import channel_numbers, first_tokens, newest_tokens
from h2o_flexgen.config.model.tensors import PAGE, round_up, states_bytes
from h2o_flexgen.config.offload import TIERS, Kernels, OffloadPolicy
from h2o_flexgen.config.placement import Placement
from h2o_flexgen.config.recall import SHELF_BUFFER, index_blocks, shelf_bytes
from h2o_flexgen.schedule import workspace
from h2o_flexgen.schedule.request import BlockShape, PlanRequest
from h2o_flexgen.schedule.tasks import groups_of, recordable
from h2o_flexgen.schedule.weight_room import experts_swap, group_bytes, room_of
from h2o_flexgen.units import format_bytes

REWRITE_EVERY = 16
"""Decode steps between two full writes of a moving cache; newer tokens wait on the compute tier."""
STATE_BUFFERS = 3
"""Transfer buffers for caches or hidden states: one arriving, one computed on, one leaving."""
STAGING_BUFFERS = 2
"""Host copies of a cache or hidden state between a GPU and the disk."""
LEAVING = 2
"""Buffers of a stage for hidden states sent to the next stage: one being written, one being read."""

RECORDED = "recorded steps"
"""Name of the item of recorded decode steps, which exists only if nothing moves."""


class Item(NamedTuple):
    tier: str
    what: str
    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """The memory of a plan, item by item; items of 0 bytes are left out."""

    items: tuple[Item, ...]

    def total(self, tier: str) -> int:
        """Bytes needed on `tier` at the peak."""
        return sum(item.nbytes for item in self.items if item.tier == tier)

    def table(self) -> str:
        """One line per item and a total per tier: fastest tier first, largest item first."""
        width = max((len(item.what) for item in self.items), default=0)
        lines: list[str] = []
        for tier in TIERS:
            items = sorted((item for item in self.items if item.tier == tier), key=lambda item: -item.nbytes)
            lines.extend(f"{tier:4}  {item.what:{width}}  {format_bytes(item.nbytes):>10}" for item in items)
            if items:
                lines.append(f"{tier:4}  {'in all':{width}}  {format_bytes(self.total(tier)):>10}")
        return "\n".join(lines)


def footprint(request: PlanRequest, policy: OffloadPolicy, placement: Placement) -> Footprint:
    """Peak bytes of one block of `policy`'s shape, if all its sequences have the workload's lengths.

    Something streams or moves if it is not on the compute tier. On one GPU the items are, on the compute tier unless
    another is named:

    weights           every group's buffer, on its tier; all experts on disk if some are there and others in memory
    weight buffers    `weight_room.room_of`; the same again on cpu for staging from disk to a gpu
    KV cache          on its tier, per (layer, GPU batch): K and V of (b, kv_heads, C, head_dim), 2 b G C s
    states            on its tier, per (layer, GPU batch): states of the mixers of transformers' modules, for each row
    cache records     per cache that evicts, where attention is computed: `_record_bytes`
    cache buffers     STATE_BUFFERS of the largest moving cache; STAGING_BUFFERS on cpu between disk and a gpu
    new tokens        per moving cache, K, V and slots of the tokens not yet written to its tier
    evicted tokens    with recall: `recall_items`
    hidden states     on their tier, per GPU batch: the prompt's, (T, H), or (T, 2 H) with a parallel layer's sum
    hidden buffers    STATE_BUFFERS of them, if any is parked; STAGING_BUFFERS on cpu between disk and a gpu
    for the cpu       `_host_items`, on both tiers
    prompt K and V, token positions, workspace, recorded steps    see `schedule.workspace`
    process           cpu: the request's baseline
    prefix store      cpu: the cap of `--prefix-mem`
    """
    block = BlockShape(request, policy)
    items = _items(block, placement) if request.num_gpus == 1 else _divided(block, placement)
    found = (*items, Item("cpu", "process", request.baseline), Item("cpu", "prefix store", request.prefixes))
    return Footprint(tuple(item for item in found if item.nbytes))


@dataclass(frozen=True)
class PlacedPolicy:
    """A policy in whole units, as the engine places them, and what that takes; fitting or not."""

    request: PlanRequest
    policy: OffloadPolicy
    placement: Placement

    @cached_property
    def footprint(self) -> Footprint:
        return footprint(self.request, self.policy, self.placement)

    @cached_property
    def over(self) -> dict[str, int]:
        """Bytes above the cap, for each tier that exceeds it."""
        needs = {tier: self.footprint.total(tier) - cap for tier, cap in self.request.capped.items()}
        return {tier: nbytes for tier, nbytes in needs.items() if nbytes > 0}

    @property
    def moves(self) -> bool:
        """Whether anything lives off the compute tier."""
        return self.placement.tiers != {self.request.compute_tier}

    def cut(self) -> Self:
        """The same with prompts cut as suits the device, if there is room for that."""
        cuts = [replace(self, policy=policy) for policy in self.policy.cuts(self.request.kernels)]
        return next((each for each in cuts if not each.over), cuts[-1])


def _items(block: BlockShape, placement: Placement) -> Iterator[Item]:
    """The items of one GPU or a CPU, without process and prefix store."""
    yield from _block_items(block, placement)
    moves = placement.tiers != {block.compute_tier} or block.spec.arch.experts is not None
    if block.request.kernels is Kernels.TRITON and recordable(moves=moves, elsewhere=False, rolling=block.rolling):
        yield Item(block.compute_tier, RECORDED, workspace.recorded(block))


def _block_items(block: BlockShape, placement: Placement) -> Iterator[Item]:
    """As `_items`, without recorded steps; `placement` may be of a part of the model."""
    yield from _weight_items(block, placement)
    yield from _cache_items(block, placement)
    yield from recall_items(block)
    yield from _hidden_items(block, placement)
    yield from _host_items(block, placement)
    yield Item(block.compute_tier, "prompt K and V of one layer", workspace.prompt_keys(block))
    yield Item(block.compute_tier, "token positions", workspace.positions(block))
    yield Item(block.compute_tier, "workspace", workspace.workspace(block))


def _weight_items(block: BlockShape, placement: Placement) -> Iterator[Item]:
    totals, spec = dict.fromkeys(TIERS, 0), block.spec
    swap = experts_swap(spec, placement.weights, block.compute_tier)
    for key, tier in placement.weights.items():
        both = ("cpu", "disk") if swap and ".experts." in key else (tier,)
        nbytes = group_bytes(spec.groups_by_key[key], block.dtype, both[-1])
        for each in {tier, both[-1]}:
            totals[each] += nbytes
    yield from (Item(tier, "weights", nbytes) for tier, nbytes in totals.items())
    tokens = block.request.tokens_of(block.policy)
    lookahead = block.policy.lookahead
    buffers = room_of(spec, placement.weights, block.dtype, block.compute_tier, lookahead, tokens).nbytes
    yield Item(block.compute_tier, "weight buffers", buffers)
    away = {tier for tier in placement.weights.values() if tier != block.compute_tier}
    yield Item("cpu", "weight staging buffers", buffers if block.staged(away) else 0)


def _cache_items(block: BlockShape, placement: Placement) -> Iterator[Item]:
    slots = block.request.slots
    tokens = [block.spec.kv_bytes_per_token_and_layer(block.dtype, layer) for layer in range(len(slots))]
    sizes = [round_up(block.rows * count * token, PAGE) for count, token in zip(slots, tokens, strict=True)]
    states = [states_bytes(block.spec.states_of(layer), block.rows, block.dtype) for layer in range(len(slots))]
    known = [_record_bytes(block, layer) for layer in range(len(slots))]
    stays = {block.compute_tier} | ({"cpu"} if block.policy.cpu_cache_compute else set())
    caches, kept, records = dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0)
    moving: list[tuple[int, str]] = []
    for (layer, _), tier in placement.cache.items():
        caches[tier] += sizes[layer]
        kept[tier] += states[layer]
        if tier not in stays:
            moving.append((sizes[layer] + states[layer], tier))
        records[tier if tier in stays else block.compute_tier] += known[layer]
    largest, away = max(moving, default=(0, ""))[0], {tier for _, tier in moving}
    yield from (Item(tier, "KV cache", nbytes) for tier, nbytes in caches.items())
    yield from (Item(tier, "states", nbytes) for tier, nbytes in kept.items())
    yield Item(block.compute_tier, "cache buffers", STATE_BUFFERS * largest)
    yield Item("cpu", "cache staging buffers", STAGING_BUFFERS * largest if block.staged(away) else 0)
    waiting = min(REWRITE_EVERY - 1, max(0, block.request.workload.gen_len - 2))
    token = block.rows * max(tokens) + 8 * block.heads
    yield Item(block.compute_tier, "new tokens of moving caches", len(moving) * waiting * token)
    yield from (Item(tier, "cache records", nbytes) for tier, nbytes in records.items())
    if block.compute_tier != "cpu" and "cpu" in stays and caches["cpu"]:
        yield Item("cpu", "workspace", workspace.on_cpu_beside_gpu(block))


def shelved_layers(request: PlanRequest) -> dict[int, int]:
    """The layers that choose by score, and the bytes that recall writes of a token of each; none without recall."""
    tier, spec = request.eviction.recall, request.spec
    scored = (layer for layer, budget in enumerate(request.budgets) if budget.scored and request.slots[layer])
    token = spec.computed_kv_bytes
    return {} if tier is None else {layer: shelf_bytes(tier, token(request.dtype, layer)) for layer in scored}


def recall_items(block: BlockShape) -> Iterator[Item]:
    """All keys and values of each row in layers that choose by score, on recall's tier, beside a disk a buffer and
    checksums of 8 bytes, and the index of the keys."""
    request, spec = block.request, block.spec
    tier, layers = request.eviction.recall, shelved_layers(request)
    if tier is None:
        return
    rows, length = block.policy.num_gpu_batches * block.rows, block.prompt + request.workload.gen_len
    tokens = sum(layers.values())
    yield Item(tier, "evicted tokens", rows * length * tokens)
    if tier == "disk":
        yield Item("cpu", "buffer of evicted tokens", max([SHELF_BUFFER, *layers.values()]))
        yield Item("cpu", "checksums of evicted tokens", 8 * rows * length * len(layers))
    heads = (spec.heads_of(layer) for layer in layers)
    index = sum(each.keys * math.prod(index_blocks(length, each.dim)) for each in heads)
    yield Item(block.compute_tier, "index of evicted tokens", rows * index)


def _record_bytes(block: BlockShape, layer: int) -> int:
    """Bytes of one cache's records in `layer`, 0 if nothing is evicted: position int32 and scores float32 of (b,
    kv_heads, C), with rolling positions a rank int32, eight int64 of (b, kv_heads), a policy's last queries. Also the
    scales and means of keys, and the rounding errors of the newest tokens and the first."""
    request, split, heads = block.request, block.request.eviction.split, block.spec.heads_of(layer)
    kept = block.spec.cache_bits, block.spec.cache_rotation
    first, packings = first_tokens(*kept), block.spec.packings_of(layer) or ()
    full = request.budgets[layer].full
    mended = first + newest_tokens(block.spec.cache_newest, request.slots[layer], first, full)
    each = 4 + sum(packing.nbytes for packing in packings)
    beside = block.rows * heads.keys * (channel_numbers(*kept) * heads.dim * block.size + mended * each)
    beside = 0 if heads.joint else beside
    if full or not request.slots[layer]:
        return beside if request.slots[layer] else 0
    numbers = split.numbers + 1 + block.rolling
    queries = split.looks_back * heads.queries * heads.dim * block.size
    return beside + block.rows * (heads.keys * (4 * numbers * request.slots[layer] + 64) + queries)


def _host_items(block: BlockShape, placement: Placement) -> Iterator[Item]:
    """Memory for attention over caches on cpu while a gpu computes something else.

    prompts           both tiers: FILL_BUFFERS times `workspace.prompt_bytes`

    and with several GPU batches:

    queries           both tiers, per GPU batch with such a cache: `workspace.buffer_bytes`
    output projection compute tier: a copy of the largest one
    hidden that waits compute tier, per such GPU batch: hidden states of a decode step, (b, H), waiting for the answer
    """
    policy, spec, tier = block.policy, block.spec, block.compute_tier
    places = [place for place, where in placement.cache.items() if where == "cpu"]
    if tier == "cpu" or not (policy.cpu_cache_compute and policy.overlap and places):
        return
    prompts = workspace.prompt_bytes(spec, block.dtype, block.rows, block.prompt, policy.chunk, sums=block.evicts)
    yield from (Item(each, "prompts for the cpu", workspace.FILL_BUFFERS * prompts) for each in (tier, "cpu"))
    if policy.num_gpu_batches == 1:
        return
    batches = {batch for _, batch in places}
    nbytes = len(batches) * workspace.buffer_bytes(spec, block.rows, block.dtype)
    yield from (Item(each, "queries for the cpu", nbytes) for each in (tier, "cpu"))
    groups = [spec.groups_by_key[unit.weights] for unit in spec.units if unit.kind == "attn"]
    kept = max(workspace.output_bytes(group, block.dtype) for group in groups)
    yield Item(tier, "output projection", kept)
    yield Item(tier, "hidden that waits", len(batches) * spec.hidden_bytes(block.rows, block.dtype))


def _hidden_items(block: BlockShape, placement: Placement) -> Iterator[Item]:
    hidden = round_up(block.spec.hidden_bytes(block.tokens, block.dtype), PAGE)
    tiers = list(placement.hidden.values())
    parked = set(tiers) - {block.compute_tier}
    yield from (Item(tier, "hidden states", tiers.count(tier) * hidden) for tier in TIERS)
    yield Item(block.compute_tier, "hidden buffers", STATE_BUFFERS * hidden if parked else 0)
    yield Item("cpu", "hidden staging buffers", STAGING_BUFFERS * hidden if block.staged(parked) else 0)


def _divided(block: BlockShape, placement: Placement) -> Iterator[Item]:
    """The items of several GPUs, each of which computes a stage: on gpu those of the GPU that needs most, on cpu and
    disk the sums over the stages, but weights once."""
    tier = block.compute_tier
    parts = [list(_stage_items(block, placement, number)) for number in range(block.request.num_gpus)]
    fullest = max(parts, key=lambda items: sum(item.nbytes for item in items if item.tier == tier))
    yield from (item for item in fullest if item.tier == tier)
    yield from (item for item in _weight_items(block, placement) if item.what == "weights" and item.tier != tier)
    apart = Counter[tuple[str, str]]()
    for item in (item for items in parts for item in items):
        if item.tier != tier and item.what != "weights":
            apart[item.tier, item.what] += item.nbytes
    yield from (Item(*place, nbytes) for place, nbytes in apart.items())


def most_arrivals(groups: tuple[range, ...], units: range) -> int:
    """The most GPU batches whose hidden states wait at a stage at one time: a group's, or those of two groups at a
    stage that is only the output head, which is computed last in every slot."""
    return max(map(len, groups)) * (1 if len(units) > 1 else 2)


def _stage_items(block: BlockShape, placement: Placement, number: int) -> Iterator[Item]:
    stages = block.request.stages
    units = [block.spec.units[index] for index in stages[number]]
    keys = {key for unit in units for key in (unit.weights, *unit.experts)}
    layers = {unit.layer for unit in units if unit.kind == "attn"}
    groups = groups_of(len(placement.hidden), len(stages))
    part = Placement(
        weights={key: tier for key, tier in placement.weights.items() if key in keys},
        cache={place: tier for place, tier in placement.cache.items() if place[0] in layers},
        hidden=dict(enumerate(_hidden_of_a_stage(block, placement, groups))),
    )
    yield from _block_items(block, part)
    hidden = round_up(block.spec.hidden_bytes(block.tokens, block.dtype), PAGE)
    buffers = (number < len(stages) - 1) * LEAVING + (number > 0) * most_arrivals(groups, stages[number])
    yield Item(block.compute_tier, "hidden states between GPUs", buffers * hidden)


def _hidden_of_a_stage(block: BlockShape, placement: Placement, groups: tuple[range, ...]) -> Iterator[str]:
    """The tier of each of the hidden states that a stage may hold at one time: one group's."""
    tiers = [[placement.hidden[batch] for batch in group] for group in groups]
    yield from [block.compute_tier] * max(group.count(block.compute_tier) for group in tiers)
    places = {(place, tier) for group in tiers for place, tier in enumerate(group)}
    yield from (tier for _, tier in sorted(places) if tier != block.compute_tier)
