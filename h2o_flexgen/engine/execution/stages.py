"""One device's part of a block, and the transfer of hidden states between devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.config.model.tensors import page_ceil
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.execution.host_attention import HostAttention
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.state.backing import BufferCycle, HiddenStore, typed
from h2o_flexgen.engine.state.kv_store import CacheStore
from h2o_flexgen.engine.state.loader import LoadedStage
from h2o_flexgen.errors import required
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.schedule.footprint import LEAVING


class ActivationTransfer:
    """Moves hidden states between two neighbours of a pipeline, through a buffer of each, so that both go on computing.

    The executor calls `send` and `receive` in schedule order.
    """

    def __init__(
        self, sender: Tiers, receiver: Tiers, copies: CopyEngine, nbytes: int, landings: int, dtype: torch.dtype
    ) -> None:
        """copies: the receiver's. nbytes: of the largest hidden states. landings: how many wait at most."""
        self._sender, self._copies, self._dtype = sender.accelerator, copies, dtype
        size, what = page_ceil(nbytes), "hidden states between GPUs"
        with ExitStack() as stack:
            self._leaving = stack.enter_context(BufferCycle((sender.compute,), size, LEAVING, what))
            landing = (stack.enter_context(receiver.compute.allocate(size, what)) for _ in range(landings))
            self._landing = deque(buffer.tensor for buffer in landing)
            self._resources = stack.pop_all()
        self._arrivals: dict[int, tuple[Tensor, Ticket, torch.Size]] = {}
        """By GPU batch: hidden states of this shape in a buffer, once the ticket is done."""

    def send(self, gpu_batch: GpuBatch) -> None:
        """Starts moving hidden states; the sender's copy is dropped."""
        hidden = gpu_batch.take_hidden()
        (buffer,), before = self._leaving.take()
        if before is not None:
            before.wait_on_device(self._sender)
        typed(buffer, hidden.shape, self._dtype).copy_(hidden)
        landing, nbytes = self._landing.popleft(), hidden.numel() * hidden.itemsize
        ticket = self._copies.copy(landing[:nbytes], buffer[:nbytes], "gpu->gpu", sender=self._sender)
        self._leaving.until(ticket)
        self._arrivals[gpu_batch.index] = landing, ticket, hidden.shape
        gpu_batch.hidden = None

    def receive(self, gpu_batch: GpuBatch) -> None:
        """Makes hidden states valid on the receiver, for later computes."""
        buffer, ticket, shape = self._arrivals.pop(gpu_batch.index)
        ticket.wait_on_device()
        gpu_batch.hidden = typed(buffer, shape, self._dtype).clone()
        # The next copy into this buffer starts behind the clone: it waits for all computes that were issued before it.
        self._landing.append(buffer)

    def close(self) -> None:
        """Gives all memory back. No copy may be under way."""
        self._arrivals.clear()
        self._landing.clear()
        self._resources.close()


@dataclass(frozen=True)
class Stage:
    """One device's part of a block. arrivals, departures: from the stage before and to the next one, if there are any.
    host: attention in host memory beside other computes; None: the computing thread does it."""

    number: int
    loaded: LoadedStage
    caches: CacheStore
    hidden: HiddenStore
    arrivals: ActivationTransfer | None = None
    departures: ActivationTransfer | None = None
    host: HostAttention | None = None

    def enter(self, gpu_batch: GpuBatch) -> None:
        """A GPU batch begins with this stage: moves its hidden states to the stage's device."""
        if self.arrivals is None:
            gpu_batch.device = self.loaded.device
        else:
            gpu_batch.enter(self.loaded.device)
            self.arrivals.receive(gpu_batch)

    def leave(self, gpu_batch: GpuBatch) -> None:
        """After the stage's last unit: sends hidden states to the next stage."""
        self.finish(gpu_batch)
        required(self.departures, "this stage is the last one").send(gpu_batch)

    def finish(self, gpu_batch: GpuBatch) -> None:
        """Adds the pending results of host attention, before hidden states are read."""
        if self.host is not None:
            self.host.finish(gpu_batch)

    def load_hidden(self, gpu_batch: GpuBatch) -> None:
        # Hidden states that wait for host attention were not stored.
        if self.host is None or not self.host.pending(gpu_batch):
            self.hidden.load(gpu_batch)

    def store_hidden(self, gpu_batch: GpuBatch) -> None:
        if self.host is None or not self.host.pending(gpu_batch):
            self.hidden.store(gpu_batch)

    def free_weights(self, key: str) -> None:
        if self.host is not None:
            self.host.keep(key)
        self.loaded.weights.free(key)


def parked(plan: Plan, stage: LoadedStage, groups: tuple[range, ...]) -> Iterator[tuple[int, tuple[str, int]]]:
    """GPU batches whose hidden states may be parked between two units: tier, and place in their group."""
    if len(stage.units) == 1:
        return
    for group in groups:
        # One GPU batch alone is never parked: its hidden states are wanted again by the very next unit.
        for place, gpu_batch in enumerate(group if len(group) > 1 else ()):
            yield gpu_batch, (plan.placement.hidden[gpu_batch], place)
