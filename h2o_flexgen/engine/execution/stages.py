"""The devices of an engine: what each holds from its loading on, and what it has of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from h2o_flexgen.cache.kv_cache import CacheShape
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.execution.host_attention import HostAttention
from h2o_flexgen.engine.execution.host_fill import HostFill
from h2o_flexgen.engine.execution.transfer import ActivationTransfer
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.state.hidden_store import HiddenStore
from h2o_flexgen.engine.state.kv_store import CacheStore, Place
from h2o_flexgen.engine.state.loader import LoadedStage
from h2o_flexgen.schedule.stage_footprint import most_arrivals


class BlockSize(NamedTuple):
    """What the stores of a block are made for: K and V of each (layer, GPU batch), the bytes of the largest hidden
    states, the dtype, and the GPU batches that go through a stage together."""

    shapes: Mapping[Place, CacheShape]
    hidden_bytes: int
    dtype: torch.dtype
    groups: tuple[range, ...]


@dataclass(frozen=True)
class Stage:
    """One device's part of a block."""

    number: int
    loaded: LoadedStage
    caches: CacheStore
    hidden: HiddenStore
    arrivals: ActivationTransfer | None = None
    """From the stage before, which the first has none of."""
    departures: ActivationTransfer | None = None
    """To the stage behind."""
    host: HostAttention | None = None
    """Attends to caches in host memory while other GPU batches are computed; None: the computing thread does it."""
    fill: HostFill | None = None
    """Fills these caches while something else is computed; None likewise."""

    def enter(self, gpu_batch: GpuBatch) -> None:
        """A GPU batch's turn at this stage begins: what it brings is where it is computed on."""
        if self.arrivals is None:
            gpu_batch.device = self.loaded.device
        else:
            gpu_batch.enter(self.loaded.device)
            self.arrivals.receive(gpu_batch)

    def leave(self, gpu_batch: GpuBatch) -> None:
        """The stage's last unit is through: the GPU batch's hidden states go on to the next stage."""
        if self.departures is None:
            raise RuntimeError(f"stage {self.number} is the last one")
        self.finish(gpu_batch)
        self.departures.send(gpu_batch)

    def finish(self, gpu_batch: GpuBatch) -> None:
        """Before anybody looks at the GPU batch's hidden states: what attention on the host is still to add is
        added."""
        if self.host is not None:
            self.host.finish(gpu_batch)

    def load_hidden(self, gpu_batch: GpuBatch) -> None:
        """Starts bringing parked hidden states back."""
        # Those that attention on the host is still to be added to were not stored, and are not loaded.
        if self.host is None or not self.host.pending(gpu_batch):
            self.hidden.load(gpu_batch)

    def store_hidden(self, gpu_batch: GpuBatch) -> None:
        """Parks the GPU batch's hidden states."""
        if self.host is None or not self.host.pending(gpu_batch):
            self.hidden.store(gpu_batch)

    def free_weights(self, key: str) -> None:
        """Gives a streamed group's buffer back."""
        if self.host is not None:
            self.host.keep(key)
        self.loaded.weights.free(key)


def open_stages(
    plan: Plan,
    loaded: tuple[LoadedStage, ...],
    spec: ModelSpec,
    size: BlockSize,
    beside: Callable[[LoadedStage, int, CacheStore], tuple[HostAttention | None, HostFill | None]],
    stack: ExitStack,
) -> list[Stage]:
    """The stores of a block, stage by stage, and what `beside` makes of a stage, its number and its caches; `stack`
    closes them."""
    transfers: list[ActivationTransfer | None] = [None]
    for sender, receiver in pairwise(loaded):
        landings = most_arrivals(size.groups, receiver.units)
        made = ActivationTransfer(
            sender.tiers, receiver.tiers, receiver.copies, size.hidden_bytes, landings, size.dtype
        )
        stack.callback(made.close)
        transfers.append(made)
    transfers.append(None)
    stages = []
    for number, each in enumerate(loaded):
        layers = {spec.units[unit].layer for unit in each.units if spec.units[unit].kind == "attn"}
        shapes = {place: shape for place, shape in size.shapes.items() if place[0] in layers}
        homes = {place: plan.placement.cache[place] for place in shapes}
        stays = plan.policy.cpu_cache_compute
        caches = CacheStore(each.tiers, each.copies, shapes, homes, size.dtype, stays)
        stack.callback(caches.close)
        hidden = HiddenStore(each.tiers, each.copies, dict(_parked(plan, each, size)), size.hidden_bytes, size.dtype)
        stack.callback(hidden.close)
        host, fill = beside(each, number, caches)
        for helper in (host, fill):
            if helper is not None:
                stack.callback(helper.close)
        stages.append(Stage(number, each, caches, hidden, transfers[number], transfers[number + 1], host, fill))
    return stages


def _parked(plan: Plan, stage: LoadedStage, size: BlockSize) -> Iterator[tuple[int, tuple[str, int]]]:
    """The GPU batches whose hidden states may rest between two units: where, and the place in their group."""
    if len(stage.units) == 1:
        return
    for group in size.groups:
        # One GPU batch alone is never parked: its hidden states are wanted again by the very next unit.
        for place, gpu_batch in enumerate(group if len(group) > 1 else ()):
            yield gpu_batch, (plan.placement.hidden[gpu_batch], place)
