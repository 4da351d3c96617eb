"""Places of streamed weight groups in one buffer on the compute tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import PAGE, WeightGroup, round_up
from h2o_flexgen.schedule.tasks import EXPERT_SLOTS

_ALL = 0.98
"""The share of experts from which on all are read: few are read in vain."""


class Place(NamedTuple):
    """Bytes [start, start + nbytes) of the room, page-aligned, for a load of the group `key`."""

    key: str
    start: int
    nbytes: int

    def overlaps(self, other: Place) -> bool:
        """Whether they have a byte in common."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


@dataclass(frozen=True)
class WeightRoom:
    """The places that loads take in turn, and behind them `count` places of `experts` bytes each, any of which a
    streamed expert takes; 0: no experts stream."""

    cycle: tuple[Place, ...] = ()
    experts: int = 0
    count: int = EXPERT_SLOTS

    @property
    def nbytes(self) -> int:
        return self._cycle_bytes + self.count * self.experts

    @property
    def _cycle_bytes(self) -> int:
        return max((place.start + place.nbytes for place in self.cycle), default=0)

    @property
    def slots(self) -> tuple[Place, ...]:
        first = self._cycle_bytes
        count = self.count if self.experts else 0
        return tuple(Place("", first + number * self.experts, self.experts) for number in range(count))

    @property
    def first(self) -> dict[str, int]:
        """The index of the first place in the cycle for each key."""
        return {place.key: index for index, place in reversed([*enumerate(self.cycle)])}


def weight_room(sizes: Mapping[str, int], lookahead: int, experts: int = 0, count: int = EXPERT_SLOTS) -> WeightRoom:
    """The smallest room found for groups of `sizes` bytes, loaded in that order in every pass, and for `count` experts
    of `experts` bytes at most.

    At most `lookahead` + 1 neighbours in that order, last and first included, are there at once. Tried are: largest
    first, each group at the lowest bytes that no neighbour has, over one pass and over two (an odd number of equal
    groups needs two places then); and lookahead + 1 equal places.
    """
    room = _room(tuple((key, round_up(nbytes, PAGE)) for key, nbytes in sizes.items()), lookahead)
    return replace(room, experts=round_up(experts, PAGE), count=count) if experts else room


@lru_cache(maxsize=64)  # a search asks for few different ones again and again
def _room(order: tuple[tuple[str, int], ...], lookahead: int) -> WeightRoom:
    if not order:
        return WeightRoom()
    largest, slots = max(nbytes for _, nbytes in order), lookahead + 1
    equal = [
        Place(key, index % slots * largest, nbytes) for index, (key, nbytes) in enumerate(order * slots)
    ]  # lookahead + 1 divides the number of places, so that last and first are apart, too
    found = [_lowest(order, lookahead), _lowest(order * 2, lookahead), equal]
    return min((WeightRoom(tuple(places)) for places in found), key=lambda room: room.nbytes)


def _lowest(order: Sequence[tuple[str, int]], reach: int) -> list[Place]:
    """A circle of places that do not overlap with those up to `reach` before and after them."""
    count, places = len(order), dict[int, Place]()
    for index in sorted(range(count), key=lambda index: -order[index][1]):
        near = {(index + step) % count for step in range(-reach, reach + 1)} - {index}
        key, nbytes = order[index]
        places[index] = Place(key, _gap(sorted(places[i][1:] for i in near if i in places), nbytes), nbytes)
    return [places[index] for index in range(count)]


def _gap(taken: Iterable[tuple[int, ...]], nbytes: int) -> int:
    """The lowest free start for `nbytes`; taken: (start, bytes), sorted."""
    start = 0
    for other, size in taken:
        if start + nbytes <= other:
            break
        start = max(start, other + size)
    return start


def room_of(
    spec: ModelSpec,
    tiers: Mapping[str, str],
    dtype: str,
    compute_tier: str,
    lookahead: int,
    block: tuple[int, int],
) -> WeightRoom:
    """The room of the weight groups that stream, and of `expert_slots` experts. tiers: of each group of a model or of a
    stage. block: its sequences, and the tokens of their prompts."""

    def streamed(keys: Iterable[str]) -> dict[str, int]:
        away = (key for key in keys if tiers.get(key, compute_tier) != compute_tier)
        return {key: group_bytes(spec.groups_by_key[key], dtype, tiers[key]) for key in away}

    experts = streamed(key for unit in spec.units for key in unit.experts)
    largest, count = max(experts.values(), default=0), expert_slots(spec, tiers, compute_tier, block)
    return weight_room(streamed(unit.weights for unit in spec.units), lookahead, largest, count)


def reads_all(spec: ModelSpec, tokens: int) -> bool:
    """Whether `tokens` are expected to choose nearly all experts of a layer."""
    return spec.arch.experts is not None and spec.chosen_share(tokens) >= _ALL


def expert_slots(spec: ModelSpec, tiers: Mapping[str, str], compute_tier: str, block: tuple[int, int]) -> int:
    """Places for streamed experts in a block of these sequences, with prompts of so many tokens.

    Half of a layer's streamed ones if all are read in every pass, or for prompts of as many tokens as a layer has
    experts, so that reads go on while attention is computed; else EXPERT_SLOTS.
    """
    sequences, tokens = block
    if not reads_all(spec, sequences) and (spec.arch.experts is None or tokens < spec.arch.experts.count):
        return EXPERT_SLOTS
    away = (sum(tiers.get(key, compute_tier) != compute_tier for key in unit.experts) for unit in spec.units)
    return max(EXPERT_SLOTS, -(-max(away, default=0) // 2))


def experts_swap(spec: ModelSpec, tiers: Mapping[str, str], compute_tier: str) -> bool:
    """Whether experts on disk replace less used ones in memory: all are then on disk too, and their places in memory
    have room for the disk's layout."""
    found = {tiers.get(key, compute_tier) for unit in spec.units for key in unit.experts}
    return compute_tier == "cpu" and found == {"cpu", "disk"}


def group_bytes(group: WeightGroup, dtype: str, tier: str) -> int:
    """Buffer bytes of a group: the packed size; on disk two pages more per tensor for reading in place, unless the
    group has a tensor of fewer bits."""
    in_place = tier == "disk" and not group.fewer_bits
    return group.buffer_bytes(dtype) + (2 * PAGE * len(group.tensors) if in_place else 0)
