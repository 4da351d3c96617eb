"""Walks the ticks of a schedule: issue stores and loads, wait for what the compute needs, compute, free.

The executor decides nothing: order comes from `schedule`, places from the stores, tokens from the sampler.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.model import UnitSpec
from h2o_flexgen.engine.batch import GpuBatch
from h2o_flexgen.engine.finite import FiniteCheck
from h2o_flexgen.engine.path import PromptAttention, PromptPath
from h2o_flexgen.engine.sampler import Sampler
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.engine.stores import CacheStore, HiddenStore
from h2o_flexgen.engine.trace import Trace
from h2o_flexgen.engine.weights import WeightStore
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.models.decoder import Decoder, Weights
from h2o_flexgen.models.rotary import Angles, Rotary, rotate
from h2o_flexgen.schedule.tasks import Task, TaskKind, Tick


@dataclass
class Machinery:
    """What a block runs on. All of it outlives the block except `caches` and `hidden`."""

    decoder: Decoder
    weights: WeightStore
    caches: CacheStore
    hidden: HiddenStore
    sampler: Sampler
    copies: CopyEngine
    trace: Trace
    overlap: bool = True
    finite: FiniteCheck | None = None
    rolling: bool = False
    """Keys are rotated by their place in the cache, not by their place in the text."""


class Executor:
    """Runs one block: all its GPU batches through all steps of a schedule.

    `run` yields the sequences that finish, as they finish. Computes on the calling thread; copies run on the engine's.
    """

    def __init__(self, machinery: Machinery, batches: list[GpuBatch]) -> None:
        self._m, self._batches = machinery, batches
        self._units: tuple[UnitSpec, ...] = machinery.decoder.spec.units
        spec = machinery.decoder.spec
        self._layers = spec.num_layers
        self._last_position = spec.max_positions - 1 if spec.arch.positions == "learned" else None
        self._windows = [spec.arch.window_of(layer) for layer in range(spec.num_layers)]
        self._path = PromptPath()
        self._tables: dict[tuple[Rotary, torch.device], Angles] = {}
        self._issue = {
            TaskKind.LOAD_WEIGHTS: lambda t: machinery.weights.load(self._units[t.unit].weights),
            TaskKind.FREE_WEIGHTS: lambda t: machinery.weights.free(self._units[t.unit].weights),
            TaskKind.LOAD_CACHE: lambda t: machinery.caches.load(self._layer(t), t.batch),
            TaskKind.STORE_CACHE: lambda t: machinery.caches.store(self._layer(t), t.batch, t.step),
            TaskKind.LOAD_HIDDEN: lambda t: machinery.hidden.load(self._batches[t.batch]),
            TaskKind.STORE_HIDDEN: lambda t: machinery.hidden.store(self._batches[t.batch]),
        }
        self.prefill_seconds = self.decode_seconds = 0.0

    def active(self, step: int) -> list[int]:
        """The GPU batches that still have an unfinished row: what the schedule asks at the start of every step."""
        return [batch.index for batch in self._batches if not batch.finished]

    @torch.inference_mode()
    def run(self, ticks: Iterable[Tick]) -> Iterator[Sequence]:
        """Walks `ticks`; yields each sequence once it is finished."""
        clock = time.perf_counter()
        for tick in ticks:
            for task in (*tick.stores, *tick.loads):
                self._issue[task.kind](task)
                if not self._m.overlap:
                    self._m.copies.drain()
            if tick.compute is not None:
                step = tick.compute.step
                finished = self._compute(tick.compute)
                now = time.perf_counter()
                if step == 0:
                    self.prefill_seconds += now - clock
                else:
                    self.decode_seconds += now - clock
                clock = now
                yield from finished
                clock = time.perf_counter() if finished else clock
            for task in tick.frees:
                self._issue[task.kind](task)

    def _compute(self, task: Task) -> list[Sequence]:
        unit, batch = self._units[task.unit], self._batches[task.batch]
        weights = self._m.weights.get(unit.weights)
        if unit.kind != "embed":
            self._m.hidden.wait(batch)
        cache = None
        if unit.kind == "attn":
            cache = self._m.caches.wait(self._layer(task), batch.index, task.step)
        with self._m.trace.record(task, unit):
            if unit.kind == "embed":
                tokens, positions = batch.inputs(task.step)
                # A finished row goes on counting until its GPU batch is done; the table of positions ends before.
                positions = positions if self._last_position is None else positions.clamp(max=self._last_position)
                batch.hidden = self._m.decoder.embed(weights, tokens, positions)
            elif cache is not None:
                self._attend(unit, batch, weights, cache, task.step)
            elif unit.kind == "mlp":
                for part in batch.take_hidden().split(batch.chunk):
                    self._m.decoder.mlp(weights, part)
            else:
                return self._sample(batch, weights)
        if self._m.finite is not None:
            self._m.finite.look(unit, batch)
        return []

    def _attend(self, unit: UnitSpec, batch: GpuBatch, weights: Weights, cache: KVCache, step: int) -> None:
        decoder, hidden, layer = self._m.decoder, batch.take_hidden(), unit.layer or 0
        rotary = decoder.rotary_of(layer)
        if step > 0 and rotary is not None and self._m.rolling:
            table = self._table(rotary, cache.device, hidden.dtype)
            decoder.attn(weights, hidden, partial(_rolling_attention, cache, decoder.scale, table))
            return
        angles = None if rotary is None else batch.angles(rotary, hidden.dtype)
        if step > 0:
            decoder.attn(weights, hidden, partial(_decode_attention, cache, decoder.scale, angles))
            return
        prompts = PromptAttention(
            cache,
            self._path,
            decoder.scale,
            self._m.caches.wants_column_sums(layer),
            self._windows[layer],
            self._m.rolling,
        )
        for chunk in batch.chunks:
            decoder.attn(weights, hidden[chunk.start : chunk.stop], partial(prompts.chunk, chunk, angles))
        if batch is self._batches[-1]:
            self._path.clear()
        if layer == self._layers - 1:
            # Nothing after the last attention looks back: only each prompt's last token goes on.
            batch.hidden = hidden[batch.last_tokens()]

    def _table(self, rotary: Rotary, device: torch.device, dtype: torch.dtype) -> Angles:
        """What turns the keys of the caches on `device` by their places in them; one table serves the whole block."""
        if (rotary, device) not in self._tables:
            self._tables[rotary, device] = rotary.table(self._m.caches.most_slots, dtype, device)
        return self._tables[rotary, device]

    def _sample(self, batch: GpuBatch, weights: Weights) -> list[Sequence]:
        logits = self._m.decoder.head(weights, batch.take_hidden())
        finished = self._m.sampler.step(batch.rows, logits)
        if self._m.finite is not None:
            for row in finished:
                self._m.finite.explain(row)
        return finished

    def _layer(self, task: Task) -> int:
        layer = self._units[task.unit].layer
        if layer is None:
            raise RuntimeError(f"{task}: a cache task needs a layer")
        return layer


def _decode_attention(cache: KVCache, scale: float, angles: Angles | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One decode step where the cache lives; the new token's q, k, v go there and the answer comes back."""
    place = cache.device
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    return cache.attend(q.to(place), k.to(place), v.to(place), scale).to(q.device)


def _rolling_attention(cache: KVCache, scale: float, table: Angles, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `_decode_attention`, with keys that the cache itself rotates by their place in it."""
    place = cache.device
    return cache.attend(q.to(place), k.to(place), v.to(place), scale, table=table).to(q.device)
