"""Weights while a model runs: resident groups, and a buffer for streamed groups."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from h2o_flexgen.checkpoint.pack import PackedUnit, discard
from h2o_flexgen.errors import H2OFlexGenError, StorageError, required
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import TensorSlot, UnitLayout, views
from h2o_flexgen.memory.pinned import Pin
from h2o_flexgen.memory.tiers import Buffer, Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.models.decoder import bind, local_name
from h2o_flexgen.schedule.weight_room import WeightRoom


@dataclass(frozen=True)
class WeightLocation:
    """The location of a weight group: a buffer on gpu or cpu, or extents on disk. Both are set for an expert in memory
    that one from disk may replace."""

    tier: str
    layout: UnitLayout
    buffer: Buffer | None = None
    unit: PackedUnit | None = None


class WeightStore:
    """Hands bound weights of a group to the executor, streaming the groups off the compute tier.

    Streamed groups take the places of `room` in one buffer in turn; from disk to a GPU they pass through a second
    buffer in host memory with the same places. The executor calls `load`, `get` and `free` in schedule order; copies
    run on the engine's threads.
    """

    def __init__(
        self,
        locations: Mapping[str, WeightLocation],
        tiers: Tiers,
        copies: CopyEngine,
        room: WeightRoom,
        verify: str = "first",
    ) -> None:
        """room: of all groups off the compute tier, in the order of their use, and of experts, which take any free
        place."""
        self._locations, self._tiers, self._copies = dict(locations), tiers, copies
        compute = tiers.compute.name
        self.streamed = frozenset(key for key, location in locations.items() if location.tier != compute)
        self._resident = {
            key: bind(views(location.layout, location.buffer.tensor))
            for key, location in locations.items()
            if location.tier == compute and location.buffer is not None
        }
        planned = {key: room.experts for key in self.streamed} | {place.key: place.nbytes for place in room.cycle}
        for key, nbytes in planned.items():
            if locations[key].layout.nbytes > nbytes:
                raise RuntimeError(f"{key} takes more than the {nbytes} bytes that were planned")
        self.expert_slots = room.count
        self._cycle = room.cycle
        self._first = room.first
        self._places = (*room.cycle, *room.slots)
        self._free = deque(range(len(room.cycle), len(self._places)))  # places that no expert is in
        self._buffer = tiers.compute.allocate(room.nbytes, "weight buffers") if self.streamed else None
        staged = compute != "cpu" and any(locations[key].tier == "disk" for key in self.streamed)
        self._staging = tiers.cpu.allocate(room.nbytes, "staging buffers", Pin.FIRST) if staged else None
        self._expert_memory = {index: self._place(self._buffer, index) for index in self._free}
        self._held = defaultdict[str, dict[str, Tensor]](dict)
        """Buffers of resident experts that a streamed expert may replace, by layer."""
        for key, location in locations.items():
            if key in self._resident and location.unit is not None and location.buffer is not None:
                self._held[_layer_of(key)][key] = location.buffer.tensor
        self._uses = Counter[str]()
        self._chosen = frozenset[str]()
        self._staged: dict[int, Ticket] = {}  # the last copy out of each place of the staging buffer, the latest last
        self._next = 0  # the place in the cycle of the load after this one
        self._bound: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._kinds: dict[tuple[TensorSlot, ...], int] = {}
        self._alike: dict[str, int] = {}  # groups of the same slots have the same number; -1: bound anew each time
        self._loading: dict[str, tuple[int, Ticket]] = {}
        self._verify = verify
        self._verified: set[str] = set(locations) if verify == "never" else set()
        self.damaged = False
        """Whether a damaged packed file was removed, whose open handles must not be read again."""

    def streams(self, key: str) -> bool:
        """Whether the group has to be loaded before its use, at present."""
        return key not in self._resident

    def choose(self, keys: Collection[str]) -> None:
        """Counts the experts of a unit that are used next."""
        self._chosen = frozenset(keys)
        self._uses.update(keys)

    def load(self, key: str) -> None:
        """Starts loading a streamed group to the compute tier."""
        index, location = self._take(key), self._locations[key]
        target, up = self._at(self._buffer, key, index), f"{location.tier}->{self._tiers.compute.name}"
        if location.unit is None:
            buffer = required(location.buffer, f"{location.layout.key}: no buffer")
            ticket = self._copies.copy(target, buffer.tensor[: location.layout.nbytes], up)
        elif self._staging is None:
            ticket = self._read(key, location.unit, target)
        else:
            staging = self._at(self._staging, key, index)
            read = self._read(key, location.unit, staging, self._left(index))
            ticket = self._copies.copy(target, staging, f"cpu->{self._tiers.compute.name}", after=read)
            self._staged.pop(index, None)  # so that it comes last
            self._staged[index] = ticket
        self._loading[key] = (index, ticket)

    def _take(self, key: str) -> int:
        """The index of the place for `key`: a free one for an expert, else the next of the cycle, which may begin at
        any group if none of it is loading."""
        if key not in self._first:
            return self._free.popleft()
        index = self._next if any(index < len(self._cycle) for index, _ in self._loading.values()) else self._first[key]
        if self._cycle[index].key != key:
            raise RuntimeError(f"{key} is loaded where {self._cycle[index].key} was to be")
        self._next = (index + 1) % len(self._cycle)
        return index

    def _at(self, buffer: Buffer | None, key: str, index: int) -> Tensor:
        swaps = index in self._expert_memory and buffer is self._buffer
        return (self._expert_memory[index] if swaps else self._place(buffer, index))[: self._layout(key).nbytes]

    def _layout(self, key: str) -> UnitLayout:
        location = self._locations[key]
        return location.layout if location.unit is None else location.unit.layout

    def _place(self, buffer: Buffer | None, index: int) -> Tensor:
        _, start, nbytes = self._places[index]
        return required(buffer, "no weight group streams").tensor[start : start + nbytes]

    def _left(self, index: int) -> Ticket | None:
        """The last copy out of any of a place's bytes of the staging buffer."""
        place = self._places[index]
        tickets = reversed(self._staged.items())
        return next((ticket for other, ticket in tickets if self._places[other].overlaps(place)), None)

    def _read(self, key: str, unit: PackedUnit, target: Tensor, after: Ticket | None = None) -> Ticket:
        """A disk read; a packed group is checked until it was found good, unless `verify` says otherwise."""
        digest = None if key in self._verified else unit.checksum
        return self._copies.read_extents(unit.extents, target, digest=digest, after=after)

    def get(self, key: str) -> dict[str, Tensor]:
        """The bound tensors of a group, for later computes; waits for its load."""
        if key in self._resident:
            return self._resident[key]
        index, ticket = self._loading[key]
        try:
            ticket.wait_on_device()
        except StorageError as error:
            raise self._distrust(key, error) from error
        if self._verify == "first":
            # After the wait, which ends when the bytes have been read and checked, even if a GPU still copies them.
            self._verified.add(key)
        return self._bind(key, self._at(self._buffer, key, index))

    def _bind(self, key: str, memory: Tensor) -> dict[str, Tensor]:
        """The bound tensors of a group over `memory`: the same ones again for experts that lie there alike. Not
        where inputs are permuted: their order is read from memory once."""
        if key not in self._alike:
            slots = [replace(slot, name=local_name(slot.name)) for slot in self._layout(key).slots]
            ordered = any(slot.packing is not None and slot.packing.ordered for slot in slots)
            self._alike[key] = -1 if ordered else self._kinds.setdefault(tuple(slots), len(self._kinds))
        place = memory.data_ptr(), self._alike[key]
        bound = self._bound.get(place) or bind(views(self._layout(key), memory))
        if self._alike[key] >= 0:
            self._bound[place] = bound
        return bound

    def _distrust(self, key: str, error: StorageError) -> StorageError:
        """Removes a damaged or unreadable packed file of ours: the next run packs it anew."""
        unit = self._locations[key].unit
        if unit is None or unit.checksum is None:
            return error
        self.damaged = True
        discard(unit)
        return StorageError(error.found, error.needed, "the damaged file was removed; run again to have it packed anew")

    def free(self, key: str) -> None:
        """Frees a streamed group's place. Waits for a load that was never used, whether it fails or not."""
        index, ticket = self._loading.pop(key)
        if key not in self._first:
            self._free.append(index)
        try:
            ticket.wait_on_device()
        except H2OFlexGenError:
            self._staged.pop(index, None)
            return
        if key not in self._first:
            self._keep(key, index)

    def _keep(self, key: str, index: int) -> None:
        """Swaps a streamed expert with the least used resident one of the layer, if that is not needed now."""
        held = self._held[_layer_of(key)]
        others = (each for each in held if each not in self._chosen)
        least = min(others, key=lambda each: self._uses[each], default=None)
        if least is None or self._uses[least] >= self._uses[key]:
            return
        memory = self._expert_memory[index]
        self._expert_memory[index] = held.pop(least)
        del self._resident[least]
        held[key] = memory
        self._resident[key] = self._bind(key, memory)

    def reset(self) -> None:
        """Drops loads that an interrupted block has left. No copy may be under way."""
        self._free.extend(index for key, (index, _) in self._loading.items() if key not in self._first)
        self._loading.clear()
        self._staged.clear()

    def close(self) -> None:
        """Releases every buffer. The views handed out must not be used afterwards."""
        self._resident.clear()
        self._bound.clear()
        self._held.clear()
        self._expert_memory.clear()
        for buffer in (self._buffer, self._staging, *(location.buffer for location in self._locations.values())):
            if buffer is not None:
                buffer.close()
        self._buffer, self._staging, self._locations = None, None, {}


def _layer_of(key: str) -> str:
    """The layer of an expert, by the key of its group."""
    return key.rpartition(".")[0]
