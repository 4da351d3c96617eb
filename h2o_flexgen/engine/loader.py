"""Brings a model onto its tiers: memory groups filled from the checkpoint, disk groups found in it or packed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from h2o_flexgen.checkpoint.pack import PackedUnit, ensure_packed, packed_bytes
from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.model import ModelSpec
from h2o_flexgen.config.placement import Placement
from h2o_flexgen.config.tensors import WeightGroup
from h2o_flexgen.engine.plan import Plan
from h2o_flexgen.engine.weights import Home, WeightStore
from h2o_flexgen.errors import PlanError
from h2o_flexgen.memory.copies import CopyEngine, TraceCallback
from h2o_flexgen.memory.handle import Location, direct_layout, direct_obstacle, packed_layout, torch_dtype, views
from h2o_flexgen.memory.pinned import PinnedPool
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import Tiers, make_tiers

Progress = Callable[[str, int, int], None]
"""(what, bytes done, bytes in all)"""


@dataclass
class Loaded:
    """A model on its tiers. Owns tiers, copy threads, weights and the run folder; `close` gives all of it back."""

    placement: Placement
    lookahead: int
    tiers: Tiers
    copies: CopyEngine
    weights: WeightStore
    folder: OffloadDir | None
    resources: ExitStack
    seconds: float = 0.0
    """That loading took."""

    def serves(self, plan: Plan) -> bool:
        """Whether `plan` wants the weights where they are; caches and hidden states are placed per block anyway."""
        used = {*plan.placement.cache.values(), *plan.placement.hidden.values()}
        same = plan.placement.weights == self.placement.weights and plan.policy.lookahead == self.lookahead
        return same and ("disk" not in used or self.folder is not None)

    def close(self) -> None:
        self.resources.close()


def load(
    plan: Plan,
    source: WeightSource,
    config: EngineConfig,
    device: torch.device,
    offload_dir: str,
    trace: TraceCallback,
    progress: Progress,
    pins: PinnedPool | None = None,
) -> Loaded:
    """Places every weight group as `plan` says and verifies that this is what happened.

    Peak host memory is the cpu tier's own share and one weight group. `pins`: of the GPU, where there is a real one.
    From then on no more than --gpu-mem is allocated on it. ModelError, PlanError or StorageError where it fails;
    nothing stays behind then.
    """
    caps, spec, dtype = plan.request.caps, plan.request.spec, plan.request.dtype
    placed = {*plan.placement.weights.values(), *plan.placement.cache.values(), *plan.placement.hidden.values()}
    with ExitStack() as stack:
        folder = stack.enter_context(OffloadDir(offload_dir)) if "disk" in placed else None
        if folder is not None and _state_on_disk(plan):
            folder.require_free(_state_on_disk(plan), "the KV cache of a block")
        tiers = stack.enter_context(
            make_tiers(
                caps.gpu,
                _cpu_capacity(plan),
                caps.disk,
                config.emulate_gpu is not None,
                folder,
                device=device,
                pins=pins,
            )
        )
        gpu = tiers.accelerator
        if tiers.pins is not None and gpu is not None:
            on_cpu = [item for item in plan.footprint.items if item.tier == "cpu"]
            tiers.pins.keep(sum(each.nbytes for each in on_cpu if "staging" in each.what or "for the cpu" in each.what))
            gpu.cap(config.gpu_mem)
            stack.callback(gpu.cap, None)
            gpu.warm_up(torch_dtype(dtype))
        bounce = None if tiers.pins is None else tiers.pins.bounce
        copies = stack.enter_context(CopyEngine(trace=trace, device=gpu, bounce=bounce))
        homes = _fill_memory(spec, plan.placement, source, dtype, tiers, progress)
        on_disk = [group for group in spec.weight_groups if plan.placement.weights[group.key] == "disk"]
        for key, unit in _disk_units(on_disk, source, dtype, folder, _state_on_disk(plan), progress).items():
            homes[key] = Home("disk", unit.layout, unit=unit)
        _verify_placement(plan.placement, homes)
        for unit in (home.unit for home in homes.values() if home.unit is not None):
            # From here on a file that changes under the run is an error, not other weights.
            copies.watch((extent.path for extent in unit.extents), ours=unit.checksum is not None)
        weights = WeightStore(homes, tiers, copies, plan.policy.lookahead, config.verify)
        # The copy threads stop before the buffers they write to go.
        stack.callback(weights.close)
        stack.callback(copies.close)
        if tiers.pins is not None:
            tiers.pins.warn()
        return Loaded(plan.placement, plan.policy.lookahead, tiers, copies, weights, folder, stack.pop_all())


def bytes_on_disk(spec: ModelSpec, source: WeightSource, dtype: str, folder: Path) -> int:
    """Of the weights in `dtype`, what a run would find on disk: in the user's files, or packed in `folder` before."""
    direct = sum(group.nbytes(dtype) for group in spec.weight_groups if _direct(group, source, dtype) is not None)
    return direct + packed_bytes(source, dtype, folder)


def _cpu_capacity(plan: Plan) -> int | None:
    """What the cpu tier may hand out: the cap less what the process held before anything was placed."""
    cap = plan.request.caps.cpu
    return None if cap is None else max(0, cap - plan.request.baseline)


def _fill_memory(
    spec: ModelSpec, placement: Placement, source: WeightSource, dtype: str, tiers: Tiers, progress: Progress
) -> dict[str, Home]:
    homes: dict[str, Home] = {}
    groups = [group for group in spec.weight_groups if placement.weights[group.key] != "disk"]
    total, done = sum(group.nbytes(dtype) for group in groups), 0
    for group in groups:
        tier = tiers.memory(placement.weights[group.key])
        layout = packed_layout(group, dtype)
        buffer = tier.allocate(layout.nbytes, "weights")
        for name, view in views(layout, buffer.tensor).items():
            source.read_into(name, view)
        homes[group.key] = Home(tier.name, layout, buffer=buffer)
        done += group.nbytes(dtype)
        progress("loading weights", done, total)
    return homes


def _state_on_disk(plan: Plan) -> int:
    """Bytes of caches and hidden states that a block will want on disk beside the weights."""
    return sum(item.nbytes for item in plan.footprint.items if item.tier == "disk" and item.what != "weights")


def _disk_units(
    groups: list[WeightGroup],
    source: WeightSource,
    dtype: str,
    folder: OffloadDir | None,
    reserve: int,
    progress: Progress,
) -> dict[str, PackedUnit]:
    """Straight out of the user's files where dtype and layout allow, else from our own packed files, made once.

    `reserve`: bytes that packing must leave free.
    """
    if not groups:
        return {}
    if folder is None:
        raise PlanError("weights are placed on disk, and there is no offload folder")
    units: dict[str, PackedUnit] = {}
    packed = []
    for group in groups:
        locations = _direct(group, source, dtype)
        if locations is not None:
            layout, extents = direct_layout(group, dtype, locations)
            units[group.key] = PackedUnit(layout, extents, None)
        else:
            packed.append(group)
    if packed:
        note = partial(progress, "packing weights")
        units.update(ensure_packed(packed, source, dtype, folder, note, reserve))
    return units


def _direct(group: WeightGroup, source: WeightSource, dtype: str) -> dict[str, Location] | None:
    """Where the group's tensors lie in the user's files, None where they cannot be read there as they are."""
    if source.dtype != dtype:
        return None
    found = {tensor.name: source.location(tensor.name) for tensor in group.tensors}
    known = {name: place for name, place in found.items() if place is not None}
    return known if len(known) == len(found) and direct_obstacle(group, dtype, known) is None else None


def _verify_placement(placement: Placement, homes: Mapping[str, Home]) -> None:
    """A share that was asked for and not realised is an error, never a silent no-op."""
    wrong = {key: home.tier for key, home in homes.items() if placement.weights[key] != home.tier}
    missing = placement.weights.keys() - homes.keys()
    if wrong or missing:
        raise PlanError(f"weights are not where the plan put them: {wrong or sorted(missing)}")
