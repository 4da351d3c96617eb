"""Hidden states while a block runs: where they are computed on, or parked on another tier between two units."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing

import torch
from torch import Tensor

from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.state.backing import BackingFactory, BackingStore, BufferRing
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import page_ceil
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.schedule.footprint import STATE_BUFFERS


class HiddenStore:
    """The hidden states of a block's GPU batches that are parked off the compute tier between two units."""

    def __init__(
        self, tiers: Tiers, copies: CopyEngine, backing: Mapping[int, tuple[str, int]], nbytes: int, dtype: torch.dtype
    ) -> None:
        """`backing`: per GPU batch the tier, and a place there, which GPU batches that are never parked at one time may
        share; `nbytes`: of the largest hidden state, all tokens that a GPU batch may have in a step."""
        compute = tiers.compute
        parked = {gpu_batch: backing for gpu_batch, backing in backing.items() if backing[0] != compute.name}
        self.moves = frozenset(parked)
        self._dtype, size = dtype, page_ceil(nbytes)
        with ExitStack() as stack:
            count = STATE_BUFFERS if parked else 0
            self._ring = stack.enter_context(closing(BufferRing(compute, size, count, "hidden buffers")))
            new_backing = BackingFactory(
                tiers, copies, "hidden states", size, {tier for tier, _ in parked.values()}, stack
            )
            made = {backing: new_backing(backing[0], size) for backing in sorted(set(parked.values()))}
            self._backing: dict[int, BackingStore] = {gpu_batch: made[backing] for gpu_batch, backing in parked.items()}
            self._resources = stack.pop_all()
        self._shapes: dict[int, torch.Size] = {}
        self._loading: dict[int, tuple[int, Ticket]] = {}

    def store(self, gpu_batch: GpuBatch) -> None:
        """Parks the hidden states; the compute tier's copy is dropped."""
        hidden = gpu_batch.take_hidden()
        slot = self._ring.take_now()
        buffer = self._ring.buffers[slot].tensor[: page_ceil(hidden.numel() * hidden.itemsize)]
        self._view(buffer, hidden.shape).copy_(hidden)
        self._shapes[gpu_batch.index] = hidden.shape
        self._ring.give_back(slot, self._backing[gpu_batch.index].save(buffer))
        gpu_batch.hidden = None

    def load(self, gpu_batch: GpuBatch) -> None:
        """Starts bringing parked hidden states back."""
        slot, ready = self._ring.take()
        nbytes = page_ceil(self._shapes[gpu_batch.index].numel() * self._dtype.itemsize)
        target = self._ring.buffers[slot].tensor[:nbytes]
        self._loading[gpu_batch.index] = (slot, self._backing[gpu_batch.index].fetch(target, ready))

    def wait(self, gpu_batch: GpuBatch) -> None:
        """Makes `GPU batch.hidden` valid if a load is on its way."""
        loading = self._loading.pop(gpu_batch.index, None)
        if loading is not None:
            slot, ticket = loading
            ticket.wait_on_device()
            gpu_batch.hidden = self._view(self._ring.buffers[slot].tensor, self._shapes[gpu_batch.index]).clone()
            self._ring.give_back(slot)

    def _view(self, buffer: Tensor, shape: torch.Size) -> Tensor:
        return buffer[: shape.numel() * self._dtype.itemsize].view(self._dtype).view(shape)

    def close(self) -> None:
        """Gives all memory and files back. No copy may be under way."""
        self._loading.clear()
        self._resources.close()
        self._backing.clear()
