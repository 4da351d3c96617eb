"""The devices of an engine: what each holds from its loading on, and what it has of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from h2o_flexgen.cache.kv_cache import CacheShape
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.engine.caches import CacheStore, Place
from h2o_flexgen.engine.handover import Handover
from h2o_flexgen.engine.hidden import HiddenStore
from h2o_flexgen.engine.host import HostAttention
from h2o_flexgen.engine.host_fill import HostFill
from h2o_flexgen.engine.lane import Lane
from h2o_flexgen.engine.plan import Plan
from h2o_flexgen.engine.weights import WeightStore
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.schedule.stage_footprint import most_arrivals


@dataclass(frozen=True)
class LoadedStage:
    """The units that one device computes, and what they run on. All of it outlives blocks."""

    units: range
    tiers: Tiers
    copies: CopyEngine
    weights: WeightStore

    @property
    def device(self) -> torch.device:
        """Where they are computed."""
        return self.tiers.device

    def computing(self) -> AbstractContextManager[None]:
        """What is launched within goes to this stage's device."""
        gpu = self.tiers.accelerator
        return nullcontext() if gpu is None else gpu.chosen()


class BlockSize(NamedTuple):
    """What the stores of a block are made for: K and V of each (layer, lane), the bytes of the largest hidden states,
    the dtype, and the lanes that go through a stage together."""

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
    arrivals: Handover | None = None
    """From the stage before, which the first has none of."""
    departures: Handover | None = None
    """To the stage behind."""
    host: HostAttention | None = None
    """Attends to caches in host memory while other lanes are computed; None: the computing thread does it."""
    fill: HostFill | None = None
    """Fills these caches while something else is computed; None likewise."""

    def enter(self, lane: Lane) -> None:
        """A lane's turn at this stage begins: what it brings is where it is computed on."""
        if self.arrivals is None:
            lane.device = self.loaded.device
        else:
            lane.enter(self.loaded.device)
            self.arrivals.receive(lane)

    def leave(self, lane: Lane) -> None:
        """The stage's last unit is through: the lane's hidden states go on to the next stage."""
        if self.departures is None:
            raise RuntimeError(f"stage {self.number} is the last one")
        self.finish(lane)
        self.departures.send(lane)

    def finish(self, lane: Lane) -> None:
        """Before anybody looks at the lane's hidden states: what attention on the host is still to add is added."""
        if self.host is not None:
            self.host.finish(lane)

    def load_hidden(self, lane: Lane) -> None:
        """Starts bringing parked hidden states back."""
        # Those that attention on the host is still to be added to were not stored, and are not loaded.
        if self.host is None or not self.host.pending(lane):
            self.hidden.load(lane)

    def store_hidden(self, lane: Lane) -> None:
        """Parks the lane's hidden states."""
        if self.host is None or not self.host.pending(lane):
            self.hidden.store(lane)

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
    handovers: list[Handover | None] = [None]
    for sender, receiver in pairwise(loaded):
        landings = most_arrivals(size.groups, receiver.units)
        made = Handover(sender.tiers, receiver.tiers, receiver.copies, size.hidden_bytes, landings, size.dtype)
        stack.callback(made.close)
        handovers.append(made)
    handovers.append(None)
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
        stages.append(Stage(number, each, caches, hidden, handovers[number], handovers[number + 1], host, fill))
    return stages


def _parked(plan: Plan, stage: LoadedStage, size: BlockSize) -> Iterator[tuple[int, tuple[str, int]]]:
    """The lanes whose hidden states may rest between two units: where, and the place in their group."""
    if len(stage.units) == 1:
        return
    for group in size.groups:
        # One lane alone is never parked: its hidden states are wanted again by the very next unit.
        for place, lane in enumerate(group if len(group) > 1 else ()):
            yield lane, (plan.placement.hidden[lane], place)
