"""Loads a model onto its tiers: memory groups from the checkpoint, disk groups found in it or packed once."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from h2o_flexgen.checkpoint.pack import PackedUnit, discard, ensure_packed, packed_bytes
from h2o_flexgen.checkpoint.quantising import QuantisingSource
from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.engine.limits.devices import note_tiers, return_free_pages
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.state.weights import WeightLocation, WeightStore
from h2o_flexgen.errors import PlanError, StorageError, required
from h2o_flexgen.huge import LARGE
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.device_copies import BOUNCE_BYTES
from h2o_flexgen.memory.handle import Location, direct_layout, direct_obstacle, packed_layout, torch_dtype, views
from h2o_flexgen.memory.pinned import PinnedPool
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import Ledger, Tier, Tiers, another_gpu, make_tiers
from h2o_flexgen.memory.transfers import TraceCallback
from h2o_flexgen.schedule.timeline import on_stage
from h2o_flexgen.schedule.weight_room import experts_swap, group_bytes, room_of

log = logging.getLogger(__name__)

_KEPT_PAGES = 16 << 20  # bytes of a packed matrix's pages that may wait for the next one: an expert's, not a head's
Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)"""


@dataclass(frozen=True)
class LoadedStage:
    """The units that one device computes, with tiers, copies and weights, which outlive blocks."""

    units: range
    tiers: Tiers
    copies: CopyEngine
    weights: WeightStore

    @property
    def device(self) -> torch.device:
        return self.tiers.device

    def computing(self) -> AbstractContextManager[None]:
        """Within, launches go to this stage's device."""
        gpu = self.tiers.accelerator
        return nullcontext() if gpu is None else gpu.chosen()


@dataclass(eq=False)
class Loaded:
    """A model on its tiers, as `plan` placed it; `close` releases tiers, copy threads, weights and the run folder.
    seconds: of loading."""

    plan: Plan
    stages: tuple[LoadedStage, ...]
    folder: OffloadDir | None
    resources: ExitStack
    seconds: float = 0.0

    def serves(self, plan: Plan) -> bool:
        """Whether `plan` wants the weights where they are, and none is damaged."""
        used = {*plan.placement.cache.values(), *plan.placement.hidden.values()}
        weights = [(p.placement.weights, p.policy.lookahead, p.expert_slots) for p in (plan, self.plan)]
        whole = not any(stage.weights.damaged for stage in self.stages)
        return weights[0] == weights[1] and whole and ("disk" not in used or self.folder is not None)

    def recap(self, plan: Plan) -> None:
        """Sets the tiers' capacities to the caps of `plan`, which this model serves."""
        caps = plan.request.caps
        for tiers in (stage.tiers for stage in self.stages):
            tiers.cpu.capacity, tiers.disk.capacity = _cpu_capacity(plan), caps.disk
            if tiers.gpu is not None:
                tiers.gpu.capacity = caps.gpu

    @property
    def bytes_moved(self) -> Counter[str]:
        return sum((stage.copies.bytes_moved for stage in self.stages), Counter())

    @property
    def busy_seconds(self) -> dict[str, float]:
        links = [stage.copies.busy_seconds for stage in self.stages]
        return {link: sum(each.get(link, 0.0) for each in links) for link in dict.fromkeys(chain(*links))}

    def peaks(self) -> dict[str, int]:
        """Peak bytes per tier, of the gpu that held most."""
        peaks = [stage.tiers.peaks() for stage in self.stages]
        return {tier: max(each[tier] for each in peaks) for tier in peaks[0]}

    @property
    def ledgers(self) -> dict[str, Ledger]:
        """The tiers by name; the gpu tiers of later stages have a number."""
        first, *others = (stage.tiers for stage in self.stages)
        gpus = {on_stage("gpu", number): tiers.gpu for number, tiers in enumerate((first, *others))}
        named: dict[str, Ledger | None] = {**gpus, "cpu": first.cpu, "disk": first.disk}
        return {name: tier for name, tier in named.items() if tier is not None}

    @contextmanager
    def keeping_memory(self) -> Iterator[None]:
        """Within, blocks reuse the memory of the block before, if they ask for as much."""
        with ExitStack() as stack:
            for tier in {stage.tiers.cpu for stage in self.stages} | {stage.tiers.compute for stage in self.stages}:
                stack.enter_context(tier.keeping())
            yield

    def close(self) -> None:
        self.resources.close()


def load(
    plan: Plan,
    source: WeightSource,
    config: EngineConfig,
    devices: SequenceOf[torch.device],
    offload_dir: str,
    trace: TraceCallback,
    progress: Progress,
    pins: PinnedPool | None = None,
) -> Loaded:
    """Places every weight group as `plan` says, and verifies it. devices: one per stage; pins: of real GPUs.

    Peak host memory is the cpu tier's share and one weight group. ModelError, PlanError or StorageError if it fails,
    and nothing stays behind.
    """
    placement = plan.placement
    with ExitStack() as stack:
        placed = (placement.weights, placement.cache, placement.hidden)
        on_disk = "disk" in {plan.request.eviction.recall, *(tier for each in placed for tier in each.values())}
        keeps = config.offload_dir is not None and isinstance(source, QuantisingSource)
        folder = stack.enter_context(OffloadDir(offload_dir)) if on_disk or keeps else None
        if folder is not None and _state_on_disk(plan):
            folder.require_free(_state_on_disk(plan), "the KV cache of a block")
        loading = _Loading(plan, source, folder, progress)
        tiers = loading.open_tiers(config, devices, pins, stack)
        engines = [stack.enter_context(_copies(each, trace, number)) for number, each in enumerate(tiers)]
        locations = loading.fill_memory(tiers, engines[0])
        loading.find_on_disk(locations)
        loading.verify(locations)
        return_free_pages()  # packing a wide output head takes a gigabyte
        stages = []
        for units, each, own, copies in zip(loading.stages, tiers, locations, engines, strict=True):
            for unit in (location.unit for location in own.values() if location.unit is not None):
                # A file that changes during the run is an error, not other weights.
                copies.watch((extent.path for extent in unit.extents), ours=unit.checksum is not None)
            groups = {key: location.tier for key, location in own.items()}
            request, policy = plan.request, plan.policy
            name, tokens = each.compute.name, request.tokens_of(policy)
            room = room_of(request.spec, groups, request.dtype, name, policy.lookahead, tokens)
            weights = WeightStore(own, each, copies, room, config.verify)
            stack.callback(weights.close)
            stages.append(LoadedStage(units, each, copies, weights))
        # The copy threads stop before the buffers they write to go.
        for copies in engines:
            stack.callback(copies.close)
        if pins is not None:
            pins.warn()
        loaded = Loaded(plan, tuple(stages), folder, stack.pop_all())
        note_tiers(loaded, (tier for each in tiers for tier in (each.cpu, each.compute)))
        return loaded


class _Loading:
    """The steps of `load`."""

    def __init__(self, plan: Plan, source: WeightSource, folder: OffloadDir | None, progress: Progress) -> None:
        self._plan, self._source, self._folder, self._progress = plan, source, folder, progress
        self._dtype, self._where = plan.request.dtype, plan.placement.weights
        self._swap = experts_swap(plan.request.spec, self._where, plan.request.compute_tier)
        self._groups, units = plan.request.spec.weight_groups, plan.request.spec.units
        self.stages = plan.request.stages
        # The weight groups that each stage uses; tied embeddings are at both ends.
        self._keys = [
            {key for unit in stage for key in (units[unit].weights, *units[unit].experts)} for stage in self.stages
        ]

    def open_tiers(
        self, config: EngineConfig, devices: SequenceOf[torch.device], pins: PinnedPool | None, stack: ExitStack
    ) -> list[Tiers]:
        """The tiers of each stage: its own gpu, and the same host memory and disk. `stack` closes them."""
        plan, caps, emulated = self._plan, self._plan.request.caps, config.emulate_gpu is not None
        first = stack.enter_context(
            make_tiers(caps.gpu, _cpu_capacity(plan), caps.disk, emulated, self._folder, device=devices[0], pins=pins)
        )
        tiers = [first]
        for number in range(1, len(devices)):
            gpu = None if first.pins is None else first.pins.devices[number]
            tiers.append(stack.enter_context(another_gpu(first, caps.gpu, gpu)))
        if first.pins is not None:
            on_cpu = [item for item in plan.footprint.items if item.tier == "cpu"]
            first.pins.keep(sum(each.nbytes for each in on_cpu if "staging" in each.what or "for the cpu" in each.what))
        for gpu in (each.accelerator for each in tiers):
            if gpu is not None:
                gpu.cap(config.gpu_mem)
                stack.callback(gpu.cap, None)
                with gpu.chosen():
                    gpu.warm_up(torch_dtype(self._dtype))
        return tiers

    def fill_memory(self, stages: SequenceOf[Tiers], copies: CopyEngine) -> list[dict[str, WeightLocation]]:
        """The groups in memory, stage by stage; groups on the host are shared. copies: reads packed files."""
        locations: list[dict[str, WeightLocation]] = [{} for _ in stages]
        groups = [group for group in self._groups if self._where[group.key] != "disk"]
        total, done = sum(group.nbytes(self._dtype) for group in groups), 0
        kept = self._kept(groups)
        for group in self._widest_first(groups):
            layout, name = packed_layout(group, self._dtype), self._where[group.key]
            made: dict[Tier, WeightLocation] = {}
            for keys, tiers, own in zip(self._keys, stages, locations, strict=True):
                if group.key not in keys:
                    continue
                tier = tiers.memory(name)
                if tier not in made:
                    room = group_bytes(group, self._dtype, "disk") if self._swaps(group) else layout.nbytes
                    buffer = tier.allocate(room, "weights")
                    if not (group.key in kept and _read_kept(kept[group.key], buffer.tensor, copies)):
                        for tensor, view in views(layout, buffer.tensor).items():
                            self._source.read_into(tensor, view)
                    made[tier] = WeightLocation(name, layout, buffer=buffer)
                own[group.key] = made[tier]
            if LARGE.free_bytes > _KEPT_PAGES:
                LARGE.trim()
            done += group.nbytes(self._dtype)
            self._progress("loading weights", done, total)
        return [{group.key: own[group.key] for group in groups if group.key in own} for own in locations]

    def _widest_first(self, groups: SequenceOf[WeightGroup]) -> SequenceOf[WeightGroup]:
        """`groups` in the order of loading. A matrix that is packed while it is loaded is whole in memory meanwhile:
        the largest, embedding and output head, are while there is room, not beside all that was loaded."""
        if not isinstance(self._source, QuantisingSource):
            return groups
        return sorted(groups, key=lambda group: -max(math.prod(tensor.shape) for tensor in group.tensors))

    def _swaps(self, group: WeightGroup) -> bool:
        return self._swap and ".experts." in group.key

    def _kept(self, groups: SequenceOf[WeightGroup]) -> dict[str, PackedUnit]:
        """The files that keep weights packed while loading for later runs, by group."""
        if self._folder is None or not isinstance(self._source, QuantisingSource) or self._source.dummy:
            return {}
        made = [group for group in groups if group.fewer_bits and ".experts." not in group.key]
        note = partial(self._progress, "packing weights")
        try:
            return ensure_packed(made, self._source, self._dtype, self._folder, note, _state_on_disk(self._plan))
        except StorageError as error:
            log.warning("packed weights are not kept for later runs: %s", error)
            return {}

    def find_on_disk(self, locations: SequenceOf[dict[str, WeightLocation]]) -> None:
        """Adds the groups on disk: in the user's files if dtype and layout allow, else in packed files, made once."""
        units: dict[str, PackedUnit] = {}
        packed = []
        for group in self._groups:
            if self._where[group.key] != "disk" and not self._swaps(group):
                continue
            found = _direct(group, self._source, self._dtype)
            if found is not None:
                layout, extents = direct_layout(group, self._dtype, found)
                units[group.key] = PackedUnit(layout, extents, None)
            else:
                packed.append(group)
        if packed:
            folder = required(self._folder, "weights are placed on disk, and there is no offload folder")
            note, reserve = partial(self._progress, "packing weights"), _state_on_disk(self._plan)
            units.update(ensure_packed(packed, self._source, self._dtype, folder, note, reserve))
        for keys, own in zip(self._keys, locations, strict=True):
            for key, unit in ((key, unit) for key, unit in units.items() if key in keys):
                own[key] = (
                    replace(own[key], unit=unit) if key in own else WeightLocation("disk", unit.layout, unit=unit)
                )

    def verify(self, locations: SequenceOf[Mapping[str, WeightLocation]]) -> None:
        """PlanError if a group is not on its planned tier."""
        found = [(key, location.tier) for own in locations for key, location in own.items()]
        wrong = {key: tier for key, tier in found if self._where[key] != tier}
        missing = self._where.keys() - {key for key, _ in found}
        if wrong or missing:
            raise PlanError(f"weights are not where the plan put them: {wrong or sorted(missing)}")


def _read_kept(unit: PackedUnit, out: torch.Tensor, copies: CopyEngine) -> bool:
    """Reads a group from its file; if that is damaged, removes it and returns False."""
    nbytes, host = unit.layout.nbytes, out if out.device.type == "cpu" else torch.empty(len(out), dtype=torch.uint8)
    try:
        copies.read_extents(unit.extents, host[:nbytes], digest=unit.checksum).wait()
    except StorageError as error:
        log.warning("%s is packed again: %s", unit.layout.key, error)
        discard(unit)
        return False
    if host is not out:
        out[:nbytes].copy_(host[:nbytes])
    return True


def _copies(tiers: Tiers, trace: TraceCallback, number: int) -> CopyEngine:
    """The copies of a stage, with its own locked buffers for pageable memory."""
    bounce = None if tiers.pins is None else tiers.pins.bounce
    own = None if bounce is None else bounce[number * BOUNCE_BYTES : (number + 1) * BOUNCE_BYTES]

    def traced(task: str, start: float, end: float, resource: str) -> None:
        trace(task, start, end, on_stage(resource, number))

    return CopyEngine(trace=traced, device=tiers.accelerator, bounce=own)


def bytes_on_disk(spec: ModelSpec, source: WeightSource, dtype: str, folder: Path) -> int:
    """Bytes of weights in `dtype` that a run would find on disk, in the user's files or packed in `folder`."""
    direct = sum(group.nbytes(dtype) for group in spec.weight_groups if _direct(group, source, dtype) is not None)
    return direct + packed_bytes(source, dtype, folder)


def _cpu_capacity(plan: Plan) -> int | None:
    """Bytes of the cpu tier: the cap less the process's baseline."""
    cap = plan.request.caps.cpu
    return None if cap is None else max(0, cap - plan.request.baseline)


def _state_on_disk(plan: Plan) -> int:
    """Bytes of a block's caches and hidden states on disk."""
    return sum(item.nbytes for item in plan.footprint.items if item.tier == "disk" and item.what != "weights")


def _direct(group: WeightGroup, source: WeightSource, dtype: str) -> dict[str, Location] | None:
    """The places of the group's tensors in the user's files; None if they cannot be read there as they are."""
    if source.dtype != dtype:
        return None
    found = {tensor.name: source.location(tensor.name) for tensor in group.tensors}
    known = {name: place for name, place in found.items() if place is not None}
    return known if len(known) == len(found) and direct_obstacle(group, dtype, known) is None else None
