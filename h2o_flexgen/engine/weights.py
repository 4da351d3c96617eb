"""Weights while a model runs: resident groups, and a ring of buffers through which the others stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from h2o_flexgen.checkpoint.pack import PackedUnit, discard
from h2o_flexgen.errors import H2OFlexGenError, StorageError
from h2o_flexgen.memory.copies import CopyEngine, Ticket
from h2o_flexgen.memory.handle import UnitLayout, views
from h2o_flexgen.memory.pinned import Pin
from h2o_flexgen.memory.tiers import Buffer, Tiers
from h2o_flexgen.models.decoder import bind


@dataclass(frozen=True)
class Home:
    """Where a weight group lives: a buffer on gpu or cpu, or extents on disk. Exactly one of the two is set."""

    tier: str
    layout: UnitLayout
    buffer: Buffer | None = None
    unit: PackedUnit | None = None


class WeightStore:
    """Hands bound weights of a group to the executor, streaming the groups that do not live on the compute tier.

    Owns the homes and the stream buffers (`lookahead + 1` of the largest streamed group). `load`, `get` and `free` are
    called by the executor in schedule order; the copies run on the engine's threads.
    """

    def __init__(
        self, homes: Mapping[str, Home], tiers: Tiers, copies: CopyEngine, lookahead: int, verify: str = "first"
    ) -> None:
        self._homes, self._tiers, self._copies = dict(homes), tiers, copies
        compute = tiers.compute.name
        self.streamed = frozenset(key for key, home in homes.items() if home.tier != compute)
        self._resident = {
            key: bind(views(home.layout, home.buffer.tensor))
            for key, home in homes.items()
            if home.tier == compute and home.buffer is not None
        }
        largest = max((homes[key].layout.nbytes for key in self.streamed), default=0)
        count = lookahead + 1 if self.streamed else 0
        self._buffers = [tiers.compute.allocate(largest, "weight buffers") for _ in range(count)]
        staged = compute != "cpu" and any(homes[key].tier == "disk" for key in self.streamed)
        stages = count if staged else 0
        self._staging = [tiers.cpu.allocate(largest, "staging buffers", Pin.FIRST) for _ in range(stages)]
        self._staged: dict[int, Ticket] = {}  # the last copy out of each staging buffer
        self._free = list(range(count))
        self._bound: dict[tuple[str, int], dict[str, Tensor]] = {}
        self._loading: dict[str, tuple[int, Ticket]] = {}
        self._verify = verify
        self._verified: set[str] = set(homes) if verify == "never" else set()

    def load(self, key: str) -> None:
        """Starts bringing a streamed group to the compute tier."""
        slot = self._free.pop()
        home, target = self._homes[key], self._buffers[slot].tensor
        nbytes, up = home.layout.nbytes, f"{home.tier}->{self._tiers.compute.name}"
        if home.unit is None:
            ticket = self._copies.copy(target[:nbytes], _data(home), up)
        elif not self._staging:
            ticket = self._read(key, home.unit, target)
        else:
            staging = self._staging[slot].tensor
            read = self._read(key, home.unit, staging, self._staged.get(slot))
            up = f"cpu->{self._tiers.compute.name}"
            ticket = self._staged[slot] = self._copies.copy(target[:nbytes], staging[:nbytes], up, after=read)
        self._loading[key] = (slot, ticket)

    def _read(self, key: str, unit: PackedUnit, target: Tensor, after: Ticket | None = None) -> Ticket:
        """A disk read; unless told otherwise the first one of each packed group is checked against its checksum."""
        digest = None if key in self._verified else unit.checksum
        if self._verify == "first":
            self._verified.add(key)
        return self._copies.read_extents(unit.extents, target, digest=digest, after=after)

    def get(self, key: str) -> dict[str, Tensor]:
        """The bound tensors of a group, for what is computed from now on; waits for its load if it streams."""
        if key in self._resident:
            return self._resident[key]
        slot, ticket = self._loading[key]
        try:
            ticket.wait_on_device()
        except StorageError as error:
            raise self._distrust(key, error) from error
        bound = self._bound.get((key, slot))
        if bound is None:
            bound = bind(views(self._homes[key].layout, self._buffers[slot].tensor))
            self._bound[key, slot] = bound
        return bound

    def _distrust(self, key: str, error: StorageError) -> StorageError:
        """A packed file of ours that is damaged or cannot be read is removed: the next run packs it anew."""
        unit = self._homes[key].unit
        if unit is None or unit.checksum is None:
            return error
        discard(unit)
        return StorageError(error.found, error.needed, "the damaged file was removed; run again to have it packed anew")

    def free(self, key: str) -> None:
        """Gives a streamed group's buffer back. Waits for a load that was never used, whether it fails or not."""
        slot, ticket = self._loading.pop(key)
        try:
            ticket.wait_on_device()
        except H2OFlexGenError:
            self._staged.pop(slot, None)
        self._free.append(slot)

    def reset(self) -> None:
        """Forgets loads that an interrupted block left behind. No copy may be under way."""
        self._free = list(range(len(self._buffers)))
        self._loading.clear()
        self._staged.clear()

    def close(self) -> None:
        """Releases every buffer. The views handed out must not be used afterwards."""
        self._resident.clear()
        self._bound.clear()
        for buffer in [
            *self._buffers,
            *self._staging,
            *(h.buffer for h in self._homes.values() if h.buffer is not None),
        ]:
            buffer.release()
        self._buffers, self._staging, self._homes = [], [], {}


def _data(home: Home) -> Tensor:
    if home.buffer is None:
        raise RuntimeError(f"{home.layout.key}: no buffer")
    return home.buffer.tensor[: home.layout.nbytes]
