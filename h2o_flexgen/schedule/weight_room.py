"""Where streamed weight groups lie on the compute tier: places in one buffer, apart while they are there together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import PAGE, WeightGroup, round_up
from h2o_flexgen.schedule.tasks import EXPERT_SLOTS

_ALL = 0.98
"""Of the experts: what is read in vain then is no more than predictions may be off by."""


class Place(NamedTuple):
    """Bytes [start, start + nbytes) of the room, on pages, for one load of the group `key`."""

    key: str
    start: int
    nbytes: int

    def overlaps(self, other: Place) -> bool:
        """Whether one byte or more is in both."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


@dataclass(frozen=True)
class WeightRoom:
    """The places that loads take one after the other, over and over, and the bytes of the buffer that has them.

    experts: the bytes of each of `count` places behind them, of which a streamed expert takes any; 0: none does.
    """

    cycle: tuple[Place, ...] = ()
    experts: int = 0
    count: int = EXPERT_SLOTS

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._cycle_bytes + self.count * self.experts

    @property
    def _cycle_bytes(self) -> int:
        return max((place.start + place.nbytes for place in self.cycle), default=0)

    @property
    def slots(self) -> tuple[Place, ...]:
        """The places of experts, whichever takes them."""
        first = self._cycle_bytes
        count = self.count if self.experts else 0
        return tuple(Place("", first + number * self.experts, self.experts) for number in range(count))

    def first(self, key: str) -> int:
        """The first place in the cycle for `key`. KeyError where it has none."""
        for index, place in enumerate(self.cycle):
            if place.key == key:
                return index
        raise KeyError(key)


def weight_room(
    sizes: Mapping[str, int], lookahead: int, experts: int = 0, count: int = EXPERT_SLOTS
) -> WeightRoom:
    """The smallest room found for groups of `sizes` bytes, loaded in that order in every pass, and behind it that of
    `count` experts, the largest of which has so many.

    A schedule has at most `lookahead` + 1 of them there at once, neighbours in that order, last and first included.
    Attention and MLP in turn thus need the sum of both, not twice the larger. Largest first, each group goes to the
    lowest bytes that no neighbour has; over two passes too, as an odd number of equal groups does not fit into two
    places otherwise; and over lookahead + 1 passes into as many equal places, which always works.
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
    """Places in a circle, none of which overlaps those up to `reach` before and after it."""
    count, places = len(order), dict[int, Place]()
    for index in sorted(range(count), key=lambda index: -order[index][1]):
        near = {(index + step) % count for step in range(-reach, reach + 1)} - {index}
        key, nbytes = order[index]
        places[index] = Place(key, _gap(sorted(places[i][1:] for i in near if i in places), nbytes), nbytes)
    return [places[index] for index in range(count)]


def _gap(taken: Iterable[tuple[int, ...]], nbytes: int) -> int:
    """The lowest start of `nbytes` beside what is taken: (start, bytes), sorted."""
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
    sequences: int,
    known: Mapping[str, int] | None = None,
) -> WeightRoom:
    """The room of the weight groups that stream, and of the largest expert that does, as often as `expert_slots` says.

    tiers: that of each group, of a whole model or of some neighbouring units. sequences: of a block. known: buffer
    bytes where they are.
    """

    def streamed(keys: Iterable[str]) -> dict[str, int]:
        away = (key for key in keys if tiers.get(key, compute_tier) != compute_tier)
        return {key: group_bytes(spec.groups_by_key[key], dtype, tiers[key], known) for key in away}

    experts = streamed(key for unit in spec.units for key in unit.experts)
    largest, count = max(experts.values(), default=0), expert_slots(spec, tiers, compute_tier, sequences)
    return weight_room(streamed(unit.weights for unit in spec.units), lookahead, largest, count)


def reads_all(spec: ModelSpec, tokens: int) -> bool:
    """Whether so many tokens choose about all experts of a layer, so that these are read before they have chosen."""
    return spec.arch.experts is not None and spec.chosen_share(tokens) >= _ALL


def expert_slots(spec: ModelSpec, tiers: Mapping[str, str], compute_tier: str, sequences: int) -> int:
    """Streamed experts that are on the compute tier at once in a block of `sequences`: half of a layer's where all of
    them are read in every pass, so that reads go on while attention is computed; else EXPERT_SLOTS.

    On two cores and 3 GB/s the attention of 256 rows takes as long as a third of a layer's experts does to arrive.
    """
    if not reads_all(spec, sequences):
        return EXPERT_SLOTS
    away = (sum(tiers.get(key, compute_tier) != compute_tier for key in unit.experts) for unit in spec.units)
    return max(EXPERT_SLOTS, -(-max(away, default=0) // 2))


def experts_swap(spec: ModelSpec, tiers: Mapping[str, str], compute_tier: str) -> bool:
    """Whether experts on disk take the places of others in memory as they are used more often: all are on disk then,
    and have room in memory for how they are read from there."""
    found = {tiers.get(key, compute_tier) for unit in spec.units for key in unit.experts}
    return compute_tier == "cpu" and found == {"cpu", "disk"}


def group_bytes(group: WeightGroup, dtype: str, tier: str, known: Mapping[str, int] | None = None) -> int:
    """Buffer bytes of a group on `tier`: known, or the packed size, on disk with the most that reading in place can
    take, two pages more per tensor; a group with a tensor of fewer bits is never read in place."""
    if known is not None and group.key in known:
        return known[group.key]
    in_place = tier == "disk" and not group.fewer_bits
    return group.buffer_bytes(dtype) + (2 * PAGE * len(group.tensors) if in_place else 0)
