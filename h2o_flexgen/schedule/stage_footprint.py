"""The bytes of a plan for several GPUs: what the fullest of them holds, and what all of them need of host and disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from h2o_flexgen.config.model.tensors import PAGE, round_up
from h2o_flexgen.config.placement import Placement
from h2o_flexgen.schedule.footprint import Footprint, Item, items_of
from h2o_flexgen.schedule.tasks import groups_of
from h2o_flexgen.schedule.workspace import BlockShape

LEAVING = 2
"""Buffers of a stage for hidden states on their way to the next: one being written, one being read."""


def stage_footprint(
    block: BlockShape, assignment: Placement, stages: tuple[range, ...], baseline: int = 0
) -> Footprint:
    """As `footprint`, with the units of `stages` on a GPU each, whose caps are judged one by one.

    On gpu     the items of the GPU that holds most, of the weights, caches and lanes of its stage; weights of tied
               embeddings are at both ends. Hidden states: of one group of GPU batches, as only one is in a stage.
    hidden states between GPUs   gpu: LEAVING of the largest in all stages but the last; in all but the first
               `most_arrivals`
    On cpu and disk   the sum over the stages, but for weights, which are there once
    """
    parts = [list(_items(block, assignment, stages, number)) for number in range(len(stages))]
    fullest = max(parts, key=lambda items: sum(item.nbytes for item in items if item.tier == block.compute_tier))
    shared = [item for item in items_of(block, assignment) if _shared(item, block)]
    apart = Counter[tuple[str, str]]()
    for item in (item for items in parts for item in items):
        if item.tier != block.compute_tier and not _shared(item, block):
            apart[item.tier, item.what] += item.nbytes
    items = [
        *(item for item in fullest if item.tier == block.compute_tier),
        *shared,
        *(Item(tier, what, nbytes) for (tier, what), nbytes in apart.items()),
        Item("cpu", "process", baseline),
    ]
    return Footprint(tuple(item for item in items if item.nbytes))


def most_arrivals(groups: tuple[range, ...], units: range) -> int:
    """GPU batches whose hidden states wait at a stage at one time, at most: a group's.

    A stage takes the first of one group before the stage before it sends the first of the next, and so on. Only a stage
    that is nothing but the output head comes after all others in every slot, when two groups have arrived.
    """
    return max(map(len, groups)) * (1 if len(units) > 1 else 2)


def _shared(item: Item, block: BlockShape) -> bool:
    return item.what == "weights" and item.tier != block.compute_tier


def _items(block: BlockShape, assignment: Placement, stages: tuple[range, ...], number: int) -> Iterator[Item]:
    """Of one stage."""
    units = [block.spec.units[index] for index in stages[number]]
    keys, layers = {unit.weights for unit in units}, {unit.layer for unit in units if unit.kind == "attn"}
    groups = groups_of(len(assignment.hidden), len(stages))
    part = Placement(
        weights={key: home for key, home in assignment.weights.items() if key in keys},
        cache={place: home for place, home in assignment.cache.items() if place[0] in layers},
        hidden=dict(enumerate(_hidden(block, assignment, groups))),
    )
    yield from items_of(block, part)
    hidden = round_up(block.spec.hidden_bytes(block.tokens, block.dtype), PAGE)
    buffers = (number < len(stages) - 1) * LEAVING + (number > 0) * most_arrivals(groups, stages[number])
    yield Item(block.compute_tier, "hidden states between GPUs", buffers * hidden)


def _hidden(block: BlockShape, assignment: Placement, groups: tuple[range, ...]) -> Iterator[str]:
    """The tiers of the hidden states that a stage may hold at one time, once for each."""
    homes = [[assignment.hidden[batch] for batch in group] for group in groups]
    yield from [block.compute_tier] * max(tiers.count(block.compute_tier) for tiers in homes)
    places = {(place, home) for tiers in homes for place, home in enumerate(tiers)}
    yield from (home for _, home in sorted(places) if home != block.compute_tier)
