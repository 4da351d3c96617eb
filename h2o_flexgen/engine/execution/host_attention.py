"""Attention over caches in host memory while a GPU computes other GPU batches.

A decode step's queries, keys and values are copied to the host, a thread attends, and the answer is copied back when
hidden states are needed, on the compute stream and not behind queued weights. The same thread fills caches with
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.config.model.tensors import TENSOR_ALIGN, round_up
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.execution.attention import NO_CACHE, TickAttention
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.state.backing import BufferCycle, typed
from h2o_flexgen.engine.state.kv_store import BatchCache, Place
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.packed import PackedWeight, Weight
from h2o_flexgen.kernels.types import KeysValues
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.pinned import Pin
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.models.decoder import Decoder, Weights
from h2o_flexgen.schedule import workspace
from h2o_flexgen.schedule.tasks import Task


class _Desk(NamedTuple):
    """Buffers of one GPU batch, flat uint8: queries on the device and on the host, answers likewise."""

    queries: Tensor
    heard: Tensor
    said: Tensor
    answer: Tensor


@dataclass
class _Late:
    """A pending second half of an attention unit."""

    task: Task
    unit: UnitSpec
    weights: Weights
    rows: int
    attended: Ticket


class HostAttention:
    """Works on one block's caches in host memory, on a thread of its own. Called by the executor in schedule order.

    `begin` computes the first half of an attention unit, `finish` the second, before hidden states are read; between
    them the cache belongs to the thread, and hidden states are not parked. `keep` copies the output projection if the
    unit's weights are freed in between. `finish` raises the thread's errors. A cache belongs to the thread from `fill`
    to `BatchCache.settled`.
    """

    def __init__(
        self,
        tiers: Tiers,
        copies: CopyEngine,
        decoder: Decoder,
        trace: Trace,
        places: Mapping[Place, int],
        dtype: torch.dtype,
        streamed: frozenset[str],
        prompt_room: int,
        stage: int = 0,
    ) -> None:
        """places: rows of each (layer, GPU batch) whose decode attention is computed here. streamed: weight groups that
        do not stay. prompt_room: bytes of prompts that are copied asynchronously, larger ones are waited for. stage:
        the number of the GPU's."""
        self.places, self._stage = frozenset(places), stage
        self._copies, self._decoder, self._trace, self._dtype = copies, decoder, trace, dtype
        spec, name, compute = decoder.spec, str(dtype).removeprefix("torch."), tiers.compute
        self._heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self._down, self._up = f"{compute.name}->cpu", f"cpu->{compute.name}"
        self._late: dict[int, _Late] = {}
        with ExitStack() as stack:
            both = (compute, tiers.cpu)
            prompts = BufferCycle(both, prompt_room, workspace.FILL_BUFFERS, "prompts for the cpu")
            self._prompts = stack.enter_context(prompts)
            self._desks: dict[int, _Desk] = {}
            for gpu_batch, rows in sorted({gpu_batch: rows for (_, gpu_batch), rows in places.items()}.items()):
                sizes = workspace.query_bytes(spec, rows, name), workspace.answer_bytes(spec, rows, name)
                tensors = [
                    stack.enter_context(tier.allocate(nbytes, "queries for the cpu", Pin.FIRST)).tensor
                    for nbytes in sizes
                    for tier in both
                ]
                self._desks[gpu_batch] = _Desk(*tensors)
            layers, groups = {layer for layer, _ in places}, spec.groups_by_key
            keys = {unit.weights for unit in spec.units if unit.kind == "attn" and unit.layer in layers} & streamed
            nbytes = max((workspace.output_bytes(groups[key], name) for key in keys), default=0)
            self._kept = torch.empty(0)
            if nbytes:
                self._kept = stack.enter_context(compute.allocate(nbytes, "output projection")).tensor
            self._resources = stack.pop_all()

    def serves(self, layer: int, gpu_batch: GpuBatch) -> bool:
        """Whether this step's attention is computed here: only if all rows decode."""
        return (layer, gpu_batch.index) in self.places and not gpu_batch.fresh

    def pending(self, gpu_batch: GpuBatch) -> bool:
        """Whether the second half of the GPU batch's attention is to come."""
        return gpu_batch.index in self._late

    def begin(
        self, task: Task, unit: UnitSpec, gpu_batch: GpuBatch, weights: Weights, attention: TickAttention
    ) -> None:
        """The first half: computes queries, keys and values and sends them to the thread."""
        rows, name = gpu_batch.decoding, f"{unit.name} step {task.step} batch {task.batch}"
        parts = attention.turned(*self._decoder.queries(weights, gpu_batch.take_hidden()))
        desk = self._desks[gpu_batch.index]
        queries, heard = (self._view(flat, rows, sum(self._heads)) for flat in (desk.queries, desk.heard))
        torch.cat(parts, dim=1, out=queries)
        down = self._copies.copy(heard, queries, self._down, label=f"queries {name}")
        answer = self._view(desk.answer, rows, self._heads[0])
        attend = partial(_attend, attention, list(heard.split(self._heads, dim=1)), answer)
        attended = self._copies.run(attend, workspace.HOST_ATTENTION, after=down, label=name)
        self._late[gpu_batch.index] = _Late(task, unit, weights, rows, attended)

    def finish(self, gpu_batch: GpuBatch) -> None:
        """The second half, if it is pending: updates the GPU batch's hidden states."""
        late = self._late.pop(gpu_batch.index, None)
        if late is None:
            return
        late.attended.wait()
        desk, heads = self._desks[gpu_batch.index], self._heads[0]
        said, answer = (self._view(flat, late.rows, heads) for flat in (desk.said, desk.answer))
        with self._trace.record(late.task, late.unit, 0.0, " output", self._stage):
            name = f"{late.unit.name} step {late.task.step} batch {late.task.batch}"
            self._copies.copy_in_turn(said, answer, self._up, label=f"answer {name}")
            self._decoder.output(late.weights, gpu_batch.take_hidden(), said)

    def keep(self, key: str) -> None:
        """Before group `key` is freed: copies the output projection if a second half still needs it."""
        waiting = [late for late in self._late.values() if late.unit.weights == key]
        if not waiting:
            return
        output = {name: tensor for name, tensor in waiting[0].weights.items() if workspace.is_output(name)}
        kept = _copied(output, self._kept)
        for late in waiting:
            late.weights = kept

    def fill(
        self, cache: BatchCache, rows: list[int], k: Tensor, v: Tensor, sums: Tensor | None, past: KeysValues | None
    ) -> None:
        """`KVCache.fill` of the fresh rows of `cache`, from tensors on the GPU."""
        fresh = required(cache.fresh, NO_CACHE)
        tensors = [k, v, *(past or ()), *(() if sums is None else (sums,))]
        fill = partial(_fill, fresh, rows, past is not None)
        used = _extent(tensors)
        if used > self._prompts.nbytes:
            if cache.filling is not None:
                cache.filling.wait()
            fill([tensor.to(fresh.device) for tensor in tensors])
            return
        (here, there), busy = self._prompts.take()
        if busy is not None:
            busy.wait()
        for packed, tensor in zip(_packed(here, tensors), tensors, strict=True):
            packed.copy_(tensor)
        down = self._copies.copy(there[:used], here[:used], self._down, label="prompts")
        arrived = partial(fill, _packed(there, tensors))
        cache.filling = self._copies.run(arrived, workspace.HOST_ATTENTION, after=(down, cache.filling))
        self._prompts.until(cache.filling)

    def close(self) -> None:
        """Releases all memory. No copy and no attention may be under way."""
        self._late.clear()
        self._resources.close()

    def _view(self, flat: Tensor, rows: int, heads: int) -> Tensor:
        return typed(flat, torch.Size((rows, heads, self._decoder.spec.head_dim)), self._dtype)


def _attend(attention: TickAttention, parts: list[Tensor], answer: Tensor) -> None:
    """Runs on the thread. parts: q, k and v."""
    with torch.inference_mode():
        answer.copy_(attention.attend(*parts))


def _fill(cache: KVCache, rows: list[int], followed: bool, tensors: list[Tensor]) -> None:
    """Runs on the thread. tensors: K and V, with `followed` those of the tokens before, and perhaps column sums."""
    k, v, *rest = tensors
    past = KeysValues(rest.pop(0), rest.pop(0)) if followed else None
    with torch.inference_mode():
        cache.fill(rows, k, v, rest[0] if rest else None, past=past)


def _copied(weights: Mapping[str, Weight], flat: Tensor) -> dict[str, Weight]:
    """Copies of weights in a flat uint8 buffer, one behind the other; packed ones stay packed."""
    copies, start = dict[str, Weight](), 0
    for name, weight in weights.items():
        copy: Weight
        if isinstance(weight, PackedWeight):
            copy = PackedWeight.over(weight.packing, weight.shape, flat[start:], weight.dtype)
            for part, own in copy.parts.items():
                own.copy_(weight.parts[part])
            nbytes = weight.packing.nbytes(weight.shape)
        else:
            copy = typed(flat[start:], weight.shape, weight.dtype).copy_(weight)
            nbytes = weight.numel() * weight.itemsize
        copies[name] = copy
        start += round_up(nbytes, TENSOR_ALIGN)
    return copies


def _packed(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views for tensors like these in a flat uint8 buffer, one behind the other."""
    places, start = [], 0
    for tensor in like:
        places.append(typed(flat[start:], tensor.shape, tensor.dtype))
        start += round_up(tensor.numel() * tensor.itemsize, TENSOR_ALIGN)
    return places


def _extent(tensors: list[Tensor]) -> int:
    """The bytes that `_packed` uses of its buffer."""
    *others, last = (tensor.numel() * tensor.itemsize for tensor in tensors)
    return sum(round_up(nbytes, TENSOR_ALIGN) for nbytes in others) + last
