"""Walks the ticks of a schedule: issue stores and loads, wait for what the compute needs, compute, free.

The executor decides nothing: order comes from `schedule`, places from the stores, tokens from the sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.batching.prompt_attention import PrefixPath, PromptAttention
from h2o_flexgen.engine.execution.attention import TickAttention
from h2o_flexgen.engine.execution.cuda_graphs import DecodeGraphs, Launched, recorder
from h2o_flexgen.engine.execution.finite import FiniteCheck
from h2o_flexgen.engine.execution.stages import Stage
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.engine.state.kv_store import BatchCache, CacheMaker
from h2o_flexgen.models.decoder import Decoder, Weights
from h2o_flexgen.models.rotary import Angles, Rotary
from h2o_flexgen.schedule.recorded import recordable
from h2o_flexgen.schedule.tasks import Task, TaskKind, Tick


@dataclass
class ExecutionContext:
    """What a block runs on. All of it outlives the block except `maker` and the stores of `stages`."""

    decoder: Decoder
    stages: SequenceOf[Stage]
    """All units, cut into neighbours."""
    maker: CacheMaker
    sampler: Sampler
    trace: Trace
    overlap: bool = True
    finite: FiniteCheck | None = None
    rolling: bool = False
    """Keys are rotated by their place in the cache, not by their place in the text."""


class _StageGroup(NamedTuple):
    """GPU batches whose prompts come one right after the other in every unit, and what their prompts share in it."""

    gpu_batches: list[GpuBatch]
    path: PrefixPath


class Executor:
    """Runs one block: all its GPU batches through all steps of a schedule, whose GPU batches they are.

    Each unit is computed on its stage's device. `run` yields the sequences that finish, as they finish. Computes on the
    calling thread; copies run on the engine's.
    """

    def __init__(
        self,
        machinery: ExecutionContext,
        groups: SequenceOf[list[GpuBatch]],
        on_prompts: Callable[[GpuBatch, UnitSpec], None],
    ) -> None:
        """`groups`: the GPU batches, those together that go through a unit one right after the other. `on_prompts`
        hears of each GPU batch whose fresh prompts have been through a unit."""
        self._m, self._on_prompts = machinery, on_prompts
        self._gpu_batches = [gpu_batch for group in groups for gpu_batch in group]
        made = [_StageGroup(group, PrefixPath()) for group in groups]
        self._groups = [group for group in made for _ in group.gpu_batches]
        self._stages = [stage for stage in machinery.stages for _ in stage.loaded.units]
        self._units: tuple[UnitSpec, ...] = machinery.decoder.spec.units
        self._attending = {unit.layer: self._stages[unit.index] for unit in self._units if unit.kind == "attn"}
        spec = machinery.decoder.spec
        self._layers = spec.num_layers
        self._last_position = spec.max_positions - 1 if spec.arch.positions == "learned" else None
        self._windows = [spec.arch.window_of(layer) for layer in range(spec.num_layers)]
        self._tables: dict[tuple[Rotary, torch.device], Angles] = {}
        self._graphs = self._make_graphs()
        self._launched: dict[int, Launched] = {}  # of GPU batches whose step was launched as a whole
        self._issue = {
            TaskKind.LOAD_WEIGHTS: lambda t: self._at(t).loaded.weights.load(self._units[t.unit].weights),
            TaskKind.FREE_WEIGHTS: lambda t: self._at(t).free_weights(self._units[t.unit].weights),
            TaskKind.LOAD_CACHE: lambda t: self._at(t).caches.load(self._layer(t), t.batch),
            TaskKind.STORE_CACHE: lambda t: self._at(t).caches.store(self._layer(t), t.batch),
            TaskKind.LOAD_HIDDEN: lambda t: self._at(t).load_hidden(self._gpu_batches[t.batch]),
            TaskKind.STORE_HIDDEN: lambda t: self._at(t).store_hidden(self._gpu_batches[t.batch]),
            TaskKind.PASS_HIDDEN: lambda t: self._at(t).leave(self._gpu_batches[t.batch]),
        }
        self.prefill_seconds = self.decode_seconds = 0.0

    @property
    def replayed(self) -> int:
        """Decode steps of single GPU batches that were launched as a whole."""
        return 0 if self._graphs is None else self._graphs.replayed

    @property
    def not_recorded(self) -> str | None:
        """Why decode steps that could have been launched as a whole were not; None where nothing failed."""
        return None if self._graphs is None else self._graphs.failure

    @torch.inference_mode()
    def run(self, ticks: Iterable[Tick]) -> Iterator[Sequence]:
        """Walks `ticks`; yields each sequence once it is finished."""
        try:
            yield from self._walk(ticks)
        finally:
            if self._graphs is not None:
                self._graphs.close()

    def _walk(self, ticks: Iterable[Tick]) -> Iterator[Sequence]:
        clock = time.perf_counter()
        for tick in ticks:
            stage = self._m.stages[tick.stage].loaded
            with stage.computing():
                self._do((*tick.stores, *tick.loads))
            if tick.compute is not None:
                # Decode rows and prompts go through a tick together: its time is divided by their tokens.
                prompts = self._gpu_batches[tick.compute.batch].prompt_share
                with stage.computing():
                    finished = self._whole(tick.compute)
                    if finished is None:
                        finished = self._compute(tick.compute)
                    self._do(tick.passes)
                gpu_batch = self._gpu_batches[tick.compute.batch]
                if gpu_batch.fresh:
                    self._on_prompts(gpu_batch, self._units[tick.compute.unit])
                now = time.perf_counter()
                self.prefill_seconds += prompts * (now - clock)
                self.decode_seconds += (1 - prompts) * (now - clock)
                clock = now
                yield from finished
                clock = time.perf_counter() if finished else clock
            with stage.computing():
                for task in tick.frees:
                    self._issue[task.kind](task)

    def _do(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._issue[task.kind](task)
            if not self._m.overlap:
                for stage in self._m.stages:
                    stage.loaded.copies.drain()

    def whole(self, batch: int) -> bool:
        """Whether the step that GPU batch `batch` is in was launched as a whole: what is left of it is to choose
        tokens."""
        return batch in self._launched

    def _whole(self, task: Task) -> list[Sequence] | None:
        """The compute of a GPU batch whose step is launched as a whole: all of it at its first unit, and the choice of
        tokens at its last. None where the unit is to be computed."""
        unit, gpu_batch = self._units[task.unit], self._gpu_batches[task.batch]
        if unit.kind == "embed" and self._graphs is not None:
            with self._m.trace.record(task, unit, 0.0):
                launched = self._graphs.step(gpu_batch)
            if launched is not None:
                self._launched[gpu_batch.index] = launched
                return []
        if gpu_batch.index not in self._launched:
            return None
        outcome = self._launched.pop(gpu_batch.index)
        if isinstance(outcome, Tensor):
            return self._m.sampler.step(gpu_batch.rows, outcome)
        return self._m.sampler.take(gpu_batch.rows, *outcome())

    def _make_graphs(self) -> DecodeGraphs | None:
        """Where steps can be recorded and nobody looks at single units."""
        m, device, first = self._m, self._gpu_batches[0].device, self._m.stages[0]
        moves = bool(len(m.stages) > 1 or first.loaded.weights.streamed or first.caches.moves or first.hidden.moves)
        elsewhere = any(place.type != device.type for place in m.maker.devices.values())
        can = recordable(moves=moves, elsewhere=elsewhere, rolling=m.rolling)
        make = recorder(device) if can and not m.trace.enabled and m.finite is None else None
        return None if make is None else DecodeGraphs(make, self._repeating, self._forward)

    def _repeating(self, gpu_batch: GpuBatch) -> list[KVCache] | None:
        """The caches of a GPU batch, if all of them lie where it is computed and launch the same in every step."""
        store = self._m.stages[0].caches
        caches = [store.wait(layer, gpu_batch.index).rows for layer in range(self._layers)]
        found = [cache for cache in caches if cache is not None and cache.repeats]
        # A device may be called by its type alone.
        alike = all(cache.device.type == gpu_batch.device.type for cache in found)
        return found if len(found) == self._layers and alike else None

    def _forward(self, gpu_batch: GpuBatch, tokens: Tensor, positions: Tensor) -> Tensor:
        """A decode step through all units, everything being where it is computed: logits (rows, vocab) float32."""
        (stage,) = self._m.stages
        for unit in self._units:
            weights = stage.loaded.weights.get(unit.weights)
            if unit.kind == "embed":
                self._embed(gpu_batch, weights, tokens, positions)
            elif unit.kind == "attn":
                layer = _layer(unit)
                self._attend(layer, gpu_batch, weights, stage.caches.wait(layer, gpu_batch.index))
            elif unit.kind == "mlp":
                self._mlp(gpu_batch, weights)
        hidden, gpu_batch.hidden = gpu_batch.take_hidden(), None
        return self._m.decoder.head(stage.loaded.weights.get(self._units[-1].weights), hidden)

    def _compute(self, task: Task) -> list[Sequence]:
        unit, gpu_batch, stage = self._units[task.unit], self._gpu_batches[task.batch], self._at(task)
        stage.finish(gpu_batch)
        weights = stage.loaded.weights.get(unit.weights)
        if task.unit == stage.loaded.units[0]:
            stage.enter(gpu_batch)
        else:
            stage.hidden.wait(gpu_batch)
        cache = None
        if unit.kind == "attn":
            cache = stage.caches.wait(self._layer(task), gpu_batch.index)
        with self._m.trace.record(task, unit, gpu_batch.prompt_share, "", stage.number):
            if unit.kind == "embed":
                self._embed(gpu_batch, weights, *gpu_batch.inputs())
            elif cache is not None:
                self._attend(self._layer(task), gpu_batch, weights, cache, task)
            elif unit.kind == "mlp":
                self._mlp(gpu_batch, weights)
            else:
                return self._choose(gpu_batch, self._m.decoder.head(weights, gpu_batch.take_hidden()))
        if self._m.finite is not None:
            self._m.finite.look(unit, gpu_batch)
        return []

    def _embed(self, gpu_batch: GpuBatch, weights: Weights, tokens: Tensor, positions: Tensor) -> None:
        # A finished row that stays goes on counting; the table of positions ends before.
        positions = positions if self._last_position is None else positions.clamp(max=self._last_position)
        gpu_batch.hidden = self._m.decoder.embed(weights, tokens, positions)

    def _mlp(self, gpu_batch: GpuBatch, weights: Weights) -> None:
        hidden = gpu_batch.take_hidden()
        # Decode steps are one part always, and torch's split is a wrapper in Python.
        for part in (hidden,) if hidden.shape[0] <= gpu_batch.chunk else hidden.split(gpu_batch.chunk):
            self._m.decoder.mlp(weights, part)

    def _attend(
        self, layer: int, gpu_batch: GpuBatch, weights: Weights, cache: BatchCache, task: Task | None = None
    ) -> None:
        """`task`: which this is, where some of it may be left to be done later."""
        hidden = gpu_batch.take_hidden()
        if gpu_batch.kept is not None:
            cache.change(
                gpu_batch.kept, self._m.maker.make(layer, gpu_batch.index, gpu_batch.fresh) if gpu_batch.fresh else None
            )
        attention = self._attention(layer, gpu_batch, cache, hidden.dtype)
        host = None if task is None else self._at(task).host
        if task is not None and host is not None and host.serves(layer, gpu_batch):
            host.begin(task, self._units[task.unit], gpu_batch, weights, attention)
            return
        for part in gpu_batch.parts:
            self._m.decoder.attn(weights, hidden[part.span], partial(attention.part, part))
        if not gpu_batch.fresh:
            return
        cache.join()
        group = self._groups[gpu_batch.index]
        if not any(later.fresh for later in group.gpu_batches if later.index > gpu_batch.index):
            group.path.clear()
        if layer == self._layers - 1:
            gpu_batch.keep_last_tokens()

    def _attention(self, layer: int, gpu_batch: GpuBatch, cache: BatchCache, dtype: torch.dtype) -> TickAttention:
        """What this tick's queries do, and by which angles."""
        scale, rotary, rows = self._m.decoder.scale, self._m.decoder.rotary_of(layer), gpu_batch.decoding
        prompts = None
        if cache.fresh is not None:
            # A path may lead from GPU batch to GPU batch: what it is made of serves the most demanding of them.
            group, rolling = self._groups[gpu_batch.index], self._m.rolling
            sums = any(self._m.maker.wants_column_sums(layer, each.fresh) for each in group.gpu_batches)
            stage = self._attending[layer]
            there = (layer, gpu_batch.index) in stage.caches.on_host
            later = partial(stage.fill.fill, cache) if stage.fill is not None and there else None
            prompts = PromptAttention(cache.fresh, group.path, scale, sums, self._windows[layer], rolling, later)
        if rotary is None:
            return TickAttention(scale, cache.rows, prompts, None, None, None)
        if not self._m.rolling:
            row_angles, prompt_angles = _parted(gpu_batch.angles(rotary, dtype), rows)
            return TickAttention(scale, cache.rows, prompts, row_angles, prompt_angles, None)
        table = self._table(rotary, cache.rows.device, dtype) if cache.rows is not None else None
        return TickAttention(
            scale, cache.rows, prompts, None, gpu_batch.angles(rotary, dtype) if prompts else None, table
        )

    def _table(self, rotary: Rotary, device: torch.device, dtype: torch.dtype) -> Angles:
        """What turns the keys of the caches on `device` by their places in them; one table serves the whole block."""
        if (rotary, device) not in self._tables:
            most = max(stage.caches.most_slots for stage in self._m.stages)
            self._tables[rotary, device] = rotary.table(most, dtype, device)
        return self._tables[rotary, device]

    def _choose(self, gpu_batch: GpuBatch, logits: Tensor) -> list[Sequence]:
        finished = self._m.sampler.step(gpu_batch.rows, logits)
        if self._m.finite is not None:
            for row in finished:
                self._m.finite.explain(row)
        return finished

    def _at(self, task: Task) -> Stage:
        return self._stages[task.unit]

    def _layer(self, task: Task) -> int:
        return _layer(self._units[task.unit])


def _layer(unit: UnitSpec) -> int:
    if unit.layer is None:
        raise RuntimeError(f"{unit.name} has no cache")
    return unit.layer


def _parted(angles: Angles, rows: int) -> tuple[Angles, Angles]:
    """Those of the first `rows` tokens, and those of the others."""
    return Angles(angles.cos[:rows], angles.sin[:rows]), Angles(angles.cos[rows:], angles.sin[rows:])
