"""Hidden states on their way from one stage to the next: from GPU to GPU, beside what both compute."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import page_ceil
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.schedule.stage_footprint import LEAVING


class _Arrival(NamedTuple):
    """Hidden states of `shape` in a buffer, once `ticket` is done."""

    buffer: Tensor
    ticket: Ticket
    shape: torch.Size


class ActivationTransfer:
    """Between two neighbours of a pipeline. `send` and `receive` are called by the executor in schedule order.

    Hidden states are copied into a buffer of the sender, from there into one of the receiver, and out of that when the
    GPU batch's turn comes: both devices go on computing, and neither knows what the other's allocator does.
    """

    def __init__(
        self, sender: Tiers, receiver: Tiers, copies: CopyEngine, nbytes: int, landings: int, dtype: torch.dtype
    ) -> None:
        """`copies`: the receiver's; `nbytes`: of the largest hidden states; `landings`: how many wait at most."""
        self._sender, self._copies, self._dtype = sender.accelerator, copies, dtype
        size = page_ceil(nbytes)
        with ExitStack() as stack:
            parts = [(sender, LEAVING), (receiver, landings)]
            leaving, landing = (
                [stack.enter_context(tiers.compute.allocate(size, "hidden states between GPUs")) for _ in range(count)]
                for tiers, count in parts
            )
            self._resources = stack.pop_all()
        self._leaving: list[tuple[Tensor, Ticket | None]] = [(buffer.tensor, None) for buffer in leaving]
        self._landing = [buffer.tensor for buffer in landing]
        self._arrivals: dict[int, _Arrival] = {}

    def send(self, gpu_batch: GpuBatch) -> None:
        """Starts moving the GPU batch's hidden states; the sender's copy is dropped."""
        hidden = gpu_batch.take_hidden()
        buffer, before = self._leaving.pop(0)
        if before is not None:
            before.wait_on_device(self._sender)
        nbytes = hidden.numel() * hidden.itemsize
        buffer[:nbytes].view(self._dtype).view(hidden.shape).copy_(hidden)
        landing = self._landing.pop(0)
        ticket = self._copies.copy(landing[:nbytes], buffer[:nbytes], "gpu->gpu", sender=self._sender)
        self._leaving.append((buffer, ticket))
        self._arrivals[gpu_batch.index] = _Arrival(landing, ticket, hidden.shape)
        gpu_batch.hidden = None

    def receive(self, gpu_batch: GpuBatch) -> None:
        """Makes the GPU batch's hidden states valid on the receiver, for what is computed from now on."""
        buffer, ticket, shape = self._arrivals.pop(gpu_batch.index)
        ticket.wait_on_device()
        gpu_batch.hidden = buffer[: shape.numel() * self._dtype.itemsize].view(self._dtype).view(shape).clone()
        # Whatever lands there next starts behind this: a copy waits for what was computed when it was asked for.
        self._landing.append(buffer)

    def close(self) -> None:
        """Gives all memory back. No copy may be under way."""
        self._arrivals.clear()
        self._leaving.clear()
        self._landing.clear()
        self._resources.close()
