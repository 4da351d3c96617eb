"""Walks the ticks of a schedule: issue stores and loads, wait for the compute's inputs, compute, free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.base import RankedPolicy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.execution.attention import PrefixPath, PromptAttention, TickAttention, TickStates
from h2o_flexgen.engine.execution.cuda_graphs import DecodeGraphs, Launched, recorder
from h2o_flexgen.engine.execution.mixture import Mixture
from h2o_flexgen.engine.execution.stages import Stage
from h2o_flexgen.engine.metrics.recorder import BlockTotals
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.engine.state.kv_store import BatchCache, CacheMaker, States
from h2o_flexgen.kernels.types import Logits
from h2o_flexgen.models.decoder import Attention, Decoder, Weights
from h2o_flexgen.models.rotary import Angles, Rotary
from h2o_flexgen.schedule.tasks import Task, TaskKind, Tick, recordable

if TYPE_CHECKING:
    from h2o_flexgen.engine.execution.passes import Passes


class _StageGroup(NamedTuple):
    """GPU batches whose prompts follow one another in every unit, and their shared prefix and states."""

    gpu_batches: list[GpuBatch]
    path: PrefixPath
    states: list[States]


class FiniteCheck:
    """`--check-finite`: remembers the first unit after which a sequence's hidden states held nan or infinity.

    Costs a pass over hidden states and a wait for the device per unit."""

    def __init__(self) -> None:
        self._first: dict[int, str] = {}

    def look(self, unit: UnitSpec, gpu_batch: GpuBatch) -> None:
        """Called after each unit but the output head."""
        hidden = gpu_batch.take_hidden()
        finite = torch.isfinite(hidden).all(-1)
        if bool(finite.all()):
            return
        for span, rows in gpu_batch.rows_at():
            if not bool(finite[span].all()):
                for row in rows:
                    self._first.setdefault(row.row_id, unit.name)

    def explain(self, row: Sequence) -> None:
        """Adds the unit to the error of a sequence whose numbers are not finite."""
        if row.fault == "numbers":
            row.error = f"{row.error}; they stopped being so in unit {self._first.get(row.row_id, 'head')}"


class Executor:
    """Runs one block: all its GPU batches through all steps of a schedule.

    Computes on the calling thread, each unit on its stage's device; copies run on the engine's threads.
    """

    def __init__(
        self,
        decoder: Decoder,
        stages: SequenceOf[Stage],
        maker: CacheMaker,
        groups: SequenceOf[list[GpuBatch]],
        sampler: Sampler,
        trace: Trace,
        totals: BlockTotals,
        on_prompts: Callable[[GpuBatch, UnitSpec], None],
        *,
        overlap: bool = True,
        finite: FiniteCheck | None = None,
    ) -> None:
        """groups: GPU batches that go through a unit one right after the other. totals: get seconds, experts and
        recordings. on_prompts: called after each unit of a GPU batch with fresh prompts."""
        self._decoder, self._all_stages, self._maker = decoder, stages, maker
        self._sampler, self._trace, self._totals, self._on_prompts = sampler, trace, totals, on_prompts
        self._overlap, self._finite = overlap, finite
        self.path_sums = False
        """As in `PromptAttention`."""
        self._gpu_batches = [gpu_batch for group in groups for gpu_batch in group]
        self._rolling = self._gpu_batches[0].rolling
        self._passes = _passes(decoder)
        made = [_StageGroup(group, PrefixPath(), []) for group in groups]
        self._groups = [group for group in made for _ in group.gpu_batches]
        self._stages = [stage for stage in stages for _ in stage.loaded.units]  # of each unit
        spec = decoder.spec
        self._units: tuple[UnitSpec, ...] = spec.units
        self._attending = {unit.layer: self._stages[unit.index] for unit in self._units if unit.kind == "attn"}
        self._layers = spec.num_layers
        self._layer = [-1 if unit.layer is None else unit.layer for unit in self._units]
        self._last_position = spec.max_positions - 1 if spec.arch.positions == "learned" else None
        self._sources = [spec.source_of(layer) for layer in range(spec.num_layers)]
        self._windows = [spec.arch.window_of(layer) for layer in range(spec.num_layers)]
        self._tables: dict[tuple[Rotary, torch.device], Angles] = {}
        self.mixture = Mixture(decoder, self._gpu_batches)
        self._graphs: DecodeGraphs | None = None
        self._launch = self._launcher()
        self._launched: dict[int, Launched] = {}  # of GPU batches whose step was launched as a whole
        self._issue = {
            TaskKind.LOAD_WEIGHTS: lambda t: self._stages[t.unit].loaded.weights.load(self._group(t)),
            TaskKind.FREE_WEIGHTS: lambda t: self._stages[t.unit].free_weights(self._group(t)),
            TaskKind.LOAD_CACHE: lambda t: self._stages[t.unit].caches.load(self._layer[t.unit], t.batch),
            TaskKind.STORE_CACHE: lambda t: self._stages[t.unit].caches.store(self._layer[t.unit], t.batch),
            TaskKind.LOAD_HIDDEN: lambda t: self._stages[t.unit].load_hidden(self._gpu_batches[t.batch]),
            TaskKind.STORE_HIDDEN: lambda t: self._stages[t.unit].store_hidden(self._gpu_batches[t.batch]),
            TaskKind.PASS_HIDDEN: lambda t: self._stages[t.unit].leave(self._gpu_batches[t.batch]),
        }

    def close(self) -> None:
        """Drops recorded steps, and ends the modules' forwards."""
        if self._passes is not None:
            self._passes.close()
        if self._graphs is not None:
            self._graphs.close()
            self._totals.graph_launches += self._graphs.launches
            self._totals.not_recorded = self._totals.not_recorded or self._graphs.failure

    def advance(self, ticks: Iterator[Tick]) -> list[Sequence]:
        """Walks `ticks` until sequences finish, which it returns; none once there are no more ticks."""
        clock = time.perf_counter()
        with torch.inference_mode():
            for tick in ticks:
                finished: list[Sequence] = []
                with self._all_stages[tick.stage].loaded.computing():
                    self._do((*tick.stores, *tick.loads))
                    if tick.compute is not None and tick.compute.experts:
                        self._experts(tick.compute)
                        clock = self._count(self.mixture.prompt_share, clock)
                    elif tick.compute is not None:
                        gpu_batch = self._gpu_batches[tick.compute.batch]
                        # Decode rows and prompts go through a tick together: its time is divided by their tokens.
                        prompts = gpu_batch.prompt_share
                        whole = self._whole(tick.compute)
                        finished = self._compute(tick.compute) if whole is None else whole
                        self._do(tick.passes)
                        if gpu_batch.fresh:
                            self._on_prompts(gpu_batch, self._units[tick.compute.unit])
                        clock = self._count(prompts, clock)
                    for task in tick.frees:
                        self._issue[task.kind](task)
                if finished:
                    return finished
        return []

    def _count(self, prompts: float, since: float) -> float:
        """The time now. Divides the seconds since `since` between prefill and decode by the share of prompt tokens."""
        now = time.perf_counter()
        self._totals.prefill_seconds += prompts * (now - since)
        self._totals.decode_seconds += (1 - prompts) * (now - since)
        return now

    def chosen(self, step: int, unit: UnitSpec) -> list[int]:
        """The experts of `unit` that the tokens of `step` chose, once all its GPU batches have been routed."""
        chosen = self.mixture.chosen(unit)
        self._totals.experts_read += len(chosen)
        self._totals.experts_of += len(unit.experts)
        self._stages[unit.index].loaded.weights.choose([unit.experts[expert] for expert in chosen])
        return chosen

    def streams(self, key: str) -> bool:
        """Whether a weight group has to be loaded before its use, as things are now."""
        return self._all_stages[0].loaded.weights.streams(key)

    def _group(self, task: Task) -> str:
        """The weight group that a task loads or frees."""
        unit = self._units[task.unit]
        return unit.experts[task.experts[0]] if task.experts else unit.weights

    def _experts(self, task: Task) -> None:
        unit, stage = self._units[task.unit], self._stages[task.unit]
        weights = [stage.loaded.weights.get(unit.experts[expert]) for expert in task.experts]
        what = f" experts {task.experts[0]} to {task.experts[-1]}"
        with self._trace.record(task, unit, self.mixture.prompt_share, what, stage.number):
            self.mixture.compute(task.experts, weights)

    def _do(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._issue[task.kind](task)
            if not self._overlap:
                for stage in self._all_stages:
                    stage.loaded.copies.drain()

    def whole(self, batch: int) -> bool:
        """Whether the current step of GPU batch `batch` was launched as a whole, so that only sampling is left."""
        return batch in self._launched

    def _whole(self, task: Task) -> list[Sequence] | None:
        """The compute of a GPU batch whose step is launched as a whole: everything at its first unit, sampling at its
        last. None: the unit is to be computed."""
        unit, gpu_batch = self._units[task.unit], self._gpu_batches[task.batch]
        if unit.kind == "embed" and self._launch is not None:
            with self._trace.record(task, unit, 0.0):
                launched = self._launch(gpu_batch)
            if launched is not None:
                self._launched[gpu_batch.index] = launched
                return []
        if gpu_batch.index not in self._launched:
            return None
        outcome = self._launched.pop(gpu_batch.index)
        if isinstance(outcome, Tensor):
            return self._choose(gpu_batch, outcome)
        return self._sampler.take(gpu_batch.rows, *outcome())

    def _launcher(self) -> Callable[[GpuBatch], Launched | None] | None:
        """The function that launches a decode step as a whole, None where the ticks have to run it: among others
        where steps move data between tiers, with a trace, and with `--check-finite`."""
        device, first = self._gpu_batches[0].device, self._all_stages[0]
        moves = first.loaded.weights.streamed or first.caches.moves or first.hidden.moves
        can = self._passes is None and recordable(
            moves=bool(len(self._all_stages) > 1 or moves or self._decoder.spec.arch.experts),
            elsewhere=any(place.type != device.type for place in self._maker.devices.values()),
            rolling=self._rolling,
        )
        if not can or self._trace.enabled or self._finite is not None:
            return None
        make = recorder(device)
        if make is not None:
            self._graphs = DecodeGraphs(make, self._repeating, self._forward)
            return self._graphs.step
        # Several GPU batches share a unit's weights while the processor's caches hold them: these go tick by tick.
        return self._at_once if device.type == "cpu" and len(self._gpu_batches) == 1 else None

    def _at_once(self, gpu_batch: GpuBatch) -> Tensor | None:
        """The logits of a step without prompts: of small models the ticks take as long as an eighth of it."""
        return None if gpu_batch.fresh else self._forward(gpu_batch, *gpu_batch.inputs())

    def _repeating(self, gpu_batch: GpuBatch) -> list[KVCache] | None:
        """The caches of a GPU batch, if all are on its device and launch the same in every step; else None."""
        if any(row.params.fold is not None for row in gpu_batch.rows):
            return None
        store = self._all_stages[0].caches
        caches = [store.wait(layer, gpu_batch.index).rows for layer in range(self._layers)]
        found = [cache for cache in caches if cache is not None and cache.repeats]
        # A device may be called by its type alone.
        alike = all(cache.device.type == gpu_batch.device.type for cache in found)
        return found if len(found) == self._layers and alike else None

    def _forward(self, gpu_batch: GpuBatch, tokens: Tensor, positions: Tensor) -> Tensor:
        """A decode step through all units, without any transfer: logits (rows, vocab) float32."""
        (stage,) = self._all_stages
        for unit in self._units:
            weights = stage.loaded.weights.get(unit.weights)
            if unit.kind == "embed":
                self._embed(gpu_batch, weights, tokens, positions)
            elif unit.kind == "attn":
                layer = self._layer[unit.index]
                self._attend(layer, gpu_batch, weights, stage.caches.wait(self._sources[layer], gpu_batch.index))
            elif unit.kind == "mlp":
                self._mlp(gpu_batch, weights)
        hidden, gpu_batch.hidden = gpu_batch.take_hidden(), None
        return self._decoder.head(stage.loaded.weights.get(self._units[-1].weights), hidden)

    def _compute(self, task: Task) -> list[Sequence]:
        unit, gpu_batch, stage = self._units[task.unit], self._gpu_batches[task.batch], self._stages[task.unit]
        stage.finish(gpu_batch)
        weights = stage.loaded.weights.get(unit.weights)
        if task.unit == stage.loaded.units[0]:
            stage.enter(gpu_batch)
        else:
            stage.hidden.wait(gpu_batch)
            if self._passes is None:
                self.mixture.finish(gpu_batch)
            else:
                self._passes.give(gpu_batch, self.mixture.made(gpu_batch))
        cache = None
        if unit.kind == "attn":
            cache = stage.caches.wait(self._sources[self._layer[task.unit]], gpu_batch.index)
        with self._trace.record(task, unit, gpu_batch.prompt_share, "", stage.number):
            if self._passes is not None:
                logits = self._pass(self._passes, unit, gpu_batch, weights, cache)
                if logits is not None:
                    return self._choose(gpu_batch, logits)
            elif unit.kind == "embed":
                self._embed(gpu_batch, weights, *gpu_batch.inputs())
            elif cache is not None:
                self._attend(self._layer[task.unit], gpu_batch, weights, cache, task)
            elif unit.experts:
                self.mixture.route(gpu_batch, weights)
            elif unit.kind == "mlp":
                self._mlp(gpu_batch, weights)
            else:
                return self._choose(gpu_batch, self._decoder.head(weights, gpu_batch.take_hidden()))
        if self._finite is not None:
            self._finite.look(unit, gpu_batch)
        return []

    def _pass(
        self, passes: Passes, unit: UnitSpec, gpu_batch: GpuBatch, weights: Weights, cache: BatchCache | None
    ) -> Tensor | None:
        """A unit of transformers' modules, which keep hidden states themselves; returns the logits of the last one."""
        if unit.kind == "head":
            logits = passes.head(gpu_batch, unit, weights)
            gpu_batch.go_last()
            return logits
        if unit.kind == "embed":
            tokens, positions = gpu_batch.inputs()
            passes.begin(gpu_batch, unit, weights, tokens, self._in_table(positions))
        elif cache is not None and self._decoder.spec.keeps_caches:
            layer, attention, states = self._layer[unit.index], None, None
            if not self._decoder.spec.attends(layer):
                if gpu_batch.kept is not None:
                    cache.change(gpu_batch.kept, None)
            elif self._sources[layer] == layer:
                attention = self._begin_attention(layer, gpu_batch, cache, None)
            else:
                attention = self._attention(layer, gpu_batch, cache, torch.float32, None)
            if cache.states is not None:
                states = TickStates(cache.states, self._groups[gpu_batch.index].states, gpu_batch.decoding)
            passes.attend(gpu_batch, unit, weights, attention, states)
            self._end_attention(gpu_batch, cache, self._decoder.spec.last_readers[self._sources[layer]] == layer)
        elif unit.experts:
            self.mixture.add(gpu_batch, passes.route(gpu_batch, unit, weights))
        else:
            passes.go_on(gpu_batch, unit, weights)
        if self._finite is not None:
            gpu_batch.hidden = passes.hidden(gpu_batch)
        return None

    def _in_table(self, positions: Tensor) -> Tensor:
        # A finished row that stays goes on counting; the table of positions ends before.
        return positions if self._last_position is None else positions.clamp(max=self._last_position)

    def _embed(self, gpu_batch: GpuBatch, weights: Weights, tokens: Tensor, positions: Tensor) -> None:
        gpu_batch.hidden = self._decoder.embed(weights, tokens, self._in_table(positions))

    def _mlp(self, gpu_batch: GpuBatch, weights: Weights) -> None:
        hidden = gpu_batch.take_hidden()
        # Decode steps are one part always, and torch's split is a wrapper in Python.
        for part in (hidden,) if hidden.shape[0] <= gpu_batch.chunk else hidden.split(gpu_batch.chunk):
            self._decoder.mlp(weights, part)

    def _attend(
        self, layer: int, gpu_batch: GpuBatch, weights: Weights, cache: BatchCache, task: Task | None = None
    ) -> None:
        """task: this compute, if host attention may finish it later; None: everything is done here."""
        hidden, sinks = gpu_batch.take_hidden(), weights.get("sinks")
        sinks = None if sinks is None else sinks.to(torch.float32, copy=True)  # the host may read them later
        attention = self._begin_attention(layer, gpu_batch, cache, sinks, hidden.dtype)
        host = None if task is None else self._stages[task.unit].host
        if task is not None and host is not None and host.serves(layer, gpu_batch):
            host.begin(task, self._units[task.unit], gpu_batch, weights, attention)
            return
        for part in gpu_batch.parts:
            early = part.chunk is None and attention.growth is None  # rotated where they are made
            attend: Attention = attention.placed if early else partial(attention.part, part)
            self._decoder.attn(weights, hidden[part.span], attend, attention.row_angles if early else None)
        if gpu_batch.fresh:
            self._end_attention(gpu_batch, cache)
            if layer == self._layers - 1:
                gpu_batch.keep_last_tokens()

    def _begin_attention(
        self,
        layer: int,
        gpu_batch: GpuBatch,
        cache: BatchCache,
        sinks: Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> TickAttention:
        """The attention of this tick's queries, after rows have left or come; `dtype`: of angles."""
        if gpu_batch.kept is not None:
            cache.change(
                gpu_batch.kept, self._maker.make(layer, gpu_batch.index, gpu_batch.fresh) if gpu_batch.fresh else None
            )
        if cache.rows is not None:
            for row in gpu_batch.rows[: gpu_batch.decoding]:
                if row.dropped:
                    cache.rows.drop(row.row_id, [(each.start, each.stop) for each in row.dropped])
        return self._attention(layer, gpu_batch, cache, dtype, sinks)

    def _end_attention(self, gpu_batch: GpuBatch, cache: BatchCache, last: bool = True) -> None:
        """After fresh prompts fill their caches: joins rows, clears paths. `last`: no later layer reads them."""
        if not gpu_batch.fresh:
            return
        if last:
            cache.join()
        group = self._groups[gpu_batch.index]
        if not any(later.fresh for later in group.gpu_batches if later.index > gpu_batch.index):
            group.path.clear()
            group.states.clear()

    def _attention(
        self, layer: int, gpu_batch: GpuBatch, cache: BatchCache, dtype: torch.dtype, sinks: Tensor | None
    ) -> TickAttention:
        logits = Logits(self._decoder.scale_of(layer), self._decoder.soft_cap, sinks)
        rotary, rows = self._decoder.rotary_of(layer), gpu_batch.decoding
        prompts = None
        if cache.fresh is not None:
            # A prefix path may lead through several GPU batches, so it holds what the most demanding of them needs.
            group, stage = self._groups[gpu_batch.index], self._attending[layer]
            sums = any(self._maker.wants_column_sums(layer, each.fresh) for each in group.gpu_batches)
            fill = None
            if stage.host is not None and (layer, gpu_batch.index) in stage.caches.on_host:
                fill = partial(stage.host.fill, cache)
            window = self._windows[layer] if cache.fresh.chunk is None else None
            queries = max(self._maker.queries(layer, each.fresh) for each in group.gpu_batches if each.fresh)
            raw = isinstance(self._maker.eviction, RankedPolicy) and self._maker.eviction.raw_queries
            turn = None if rotary is None else partial(_following_angles, rotary)
            lengths, reads = [len(row.prompt_ids) for row in gpu_batch.fresh], self._sources[layer] != layer
            if reads:
                sums, queries, fill = False, 0, None
            prompts = PromptAttention(
                cache.fresh,
                group.path,
                logits,
                lengths,
                sums,
                queries,
                raw,
                turn,
                window,
                self._rolling,
                fill,
                layer,
                self.path_sums,
                reads=reads,
            )
        of_rows = of_prompts = table = growth = None
        if rotary is not None:
            angles, growth = gpu_batch.angles(rotary, dtype)
            if not self._rolling:
                of_rows = angles
                if prompts is not None:
                    of_rows, of_prompts = Angles(*(x[:rows] for x in angles)), Angles(*(x[rows:] for x in angles))
            else:
                table = None if cache.rows is None else self._table(rotary, cache.rows.device, dtype)
                of_prompts = None if prompts is None else angles
        again = self._sources[layer] != layer
        return TickAttention(logits, cache.rows, prompts, of_rows, of_prompts, table, growth, again=again)

    def _table(self, rotary: Rotary, device: torch.device, dtype: torch.dtype) -> Angles:
        """Angles that rotate cached keys on `device` by their places in the cache; one table serves the block."""
        if (rotary, device) not in self._tables:
            most = max(stage.caches.most_slots for stage in self._all_stages)
            self._tables[rotary, device] = rotary.table(most, dtype, device)
        return self._tables[rotary, device]

    def _choose(self, gpu_batch: GpuBatch, logits: Tensor) -> list[Sequence]:
        finished = self._sampler.step(gpu_batch.rows, logits)
        if self._finite is not None:
            for row in finished:
                self._finite.explain(row)
        return finished


def _passes(decoder: Decoder) -> Passes | None:
    """Passes of a model that runs by transformers' modules (imported only for it); None for other models."""
    if not isinstance(decoder.spec, ModuleSpec):
        return None
    from h2o_flexgen.engine.execution.passes import Passes, RowPasses
    from h2o_flexgen.models.hf.decoder import ModuleDecoder

    assert isinstance(decoder, ModuleDecoder), "transformers' modules have a decoder of their own"
    return RowPasses(decoder) if decoder.spec.alone else Passes(decoder)


def _following_angles(rotary: Rotary, positions: Tensor) -> Angles:
    """Float32 angles of `positions`, in a sequence that ends at the first of them."""
    return rotary.angles(positions, positions[:1].expand_as(positions), torch.float32)
