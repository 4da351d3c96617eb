"""One block from sequences to finished sequences: builds caches and stores, makes the schedule, runs the executor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from h2o_flexgen.cache.eviction.base import EvictionPolicy
from h2o_flexgen.cache.kv_cache import CacheShape
from h2o_flexgen.config.model.spec import ModelSpec, UnitSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.batching.scheduler import BatchScheduler, WaitingQueue
from h2o_flexgen.engine.execution.executor import ExecutionContext, Executor
from h2o_flexgen.engine.execution.finite import FiniteCheck
from h2o_flexgen.engine.execution.host_attention import HostAttention
from h2o_flexgen.engine.execution.host_fill import HostFill
from h2o_flexgen.engine.execution.stages import BlockSize, Stage, open_stages
from h2o_flexgen.engine.limits.devices import return_free_pages
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.metrics.recorder import BlockTotals
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.metrics.work_counter import WorkCounter
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.engine.state.kv_store import CacheMaker, CacheStore, Place
from h2o_flexgen.engine.state.loader import LoadedStage
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.models.decoder import Decoder
from h2o_flexgen.schedule.host_attention import prompt_bytes
from h2o_flexgen.schedule.pipeline import pipeline
from h2o_flexgen.schedule.tasks import ScheduleShape, Tick, WholeStep, groups_of
from h2o_flexgen.schedule.zigzag import zigzag


@dataclass
class BlockRunner:
    """Runs blocks one after another on loaded weights. Owns nothing but the totals."""

    spec: ModelSpec
    decoder: Decoder
    stages: tuple[LoadedStage, ...]
    eviction: EvictionPolicy
    sampler: Sampler
    trace: Trace
    dtype: str
    check_finite: bool = False
    rolling: bool = False
    share_prefixes: bool = True
    on_tokens: Callable[[int], None] = lambda tokens: None
    """Called before every step with the tokens so far; a finished sequence counts as all it asked for."""
    on_prompts: Callable[[int], None] = lambda tokens: None
    """Called with the prompt tokens so far when prompts begin and when they have been through another unit; tokens that
    are under way count by the share of the layers that they have been through."""
    finished_tokens: int = 0
    """What the sequences that are finished asked for."""
    prompt_halves: int = 0
    """Prompt tokens times the layer halves that they have been through."""

    def run(
        self,
        plan: Plan,
        rows: list[list[Sequence]],
        totals: BlockTotals,
        waiting: WaitingQueue | None = None,
    ) -> Generator[Sequence]:
        """Runs `rows` (one list per GPU batch); yields sequences as they finish. Leaves nothing behind.

        Rows of `waiting` take the places of finished ones, and leave the queue when they do; some may be left in it.
        """
        waiting = WaitingQueue() if waiting is None else waiting
        device, chunk = self.stages[0].device, plan.policy.chunk
        gpu_batches = [GpuBatch(index, chunk, device, self.rolling) for index in range(len(rows))]
        shapes, maker = self._shapes(plan, rows, waiting)
        steps = waiting.steps + max(row.steps for gpu_batch in rows for row in gpu_batch)
        groups = groups_of(len(rows), len(self.stages))
        refills = [
            BatchScheduler(
                [gpu_batches[i] for i in group], [rows[i] for i in group], waiting, chunk, self.share_prefixes
            )
            for group in groups
        ]
        with ExitStack() as stack:
            stack.callback(self._reset)
            size = self._size(shapes, gpu_batches, waiting.longest_prompt * len(rows[0]), groups)
            beside = partial(self._beside, plan, rows, waiting)
            stages = open_stages(plan, self.stages, self.spec, size, beside, stack)
            # Whatever is still under way writes to buffers and files that go then; its errors no longer matter.
            stack.callback(self._drain)
            together = [[gpu_batches[i] for i in group] for group in groups]
            machinery = self._context(plan, stages, maker)
            executor = Executor(machinery, together, partial(self._prompts_through, totals))
            totals.kv_bytes = max(totals.kv_bytes, sum(stage.caches.nbytes for stage in stages))
            shape = self._shape(plan, steps, stages, len(gpu_batches))
            tally = WorkCounter(self.spec, plan, totals.work)
            try:
                for row in executor.run(self._ticks(shape, refills, gpu_batches, tally, executor.whole)):
                    self._count_row(row, totals)
                    tally.finished(row)
                    yield row
            finally:
                # Of a block that failed, too: what was computed in vain took its time.
                totals.prefill_seconds += executor.prefill_seconds
                totals.decode_seconds += executor.decode_seconds
                totals.graph_launches += executor.replayed
                totals.not_recorded = totals.not_recorded or executor.not_recorded

    def _drain(self) -> None:
        for stage in self.stages:
            stage.copies.drain()

    def _reset(self) -> None:
        for stage in self.stages:
            stage.weights.reset()

    def _ticks(
        self,
        shape: ScheduleShape,
        refills: list[BatchScheduler],
        gpu_batches: list[GpuBatch],
        tally: WorkCounter,
        whole: WholeStep,
    ) -> Iterator[Tick]:
        def active(step: int, group: int = 0) -> list[int]:
            going = (row for gpu_batch in gpu_batches for row in gpu_batch.rows if not row.finished)
            self.on_tokens(self.finished_tokens + sum(row.steps - row.remaining for row in going))
            if step == 0:
                self._tell_prompts()
            indices = refills[group].active(step)
            if indices:
                tally.step([gpu_batches[index] for index in indices])
            return indices

        if len(shape.stages) == 1:
            return zigzag(shape, active, refills[0].last, whole)
        return pipeline(shape, active, lambda step, group: refills[group].last(step))

    def _shape(self, plan: Plan, steps: int, stages: list[Stage], batches: int) -> ScheduleShape:
        return ScheduleShape(
            units=self.spec.units,
            num_steps=steps,
            num_batches=batches,
            streamed=frozenset().union(*(stage.loaded.weights.streamed for stage in stages)),
            cache_moves=frozenset().union(*(stage.caches.moves for stage in stages)),
            hidden_moves=frozenset().union(*(stage.hidden.moves for stage in stages)),
            lookahead=plan.policy.lookahead,
            host_attends=frozenset().union(*(stage.host.places for stage in stages if stage.host is not None)),
            stages=tuple(stage.loaded.units for stage in stages),
        )

    def _context(self, plan: Plan, stages: list[Stage], maker: CacheMaker) -> ExecutionContext:
        return ExecutionContext(
            self.decoder,
            stages,
            maker,
            self.sampler,
            self.trace,
            plan.policy.overlap,
            FiniteCheck() if self.check_finite else None,
            self.rolling,
        )

    def _host_attention(self, stage: LoadedStage, number: int, caches: CacheStore) -> HostAttention | None:
        """What attends to a stage's caches in host memory beside its GPU."""
        dtype, streamed = torch_dtype(self.dtype), stage.weights.streamed
        places = caches.on_host
        return HostAttention(stage.tiers, stage.copies, self.decoder, self.trace, places, dtype, streamed, number)

    def _host_fill(self, plan: Plan, rows: list[list[Sequence]], waiting: WaitingQueue, stage: LoadedStage) -> HostFill:
        """What fills a stage's caches in host memory beside its GPU."""
        longest = max(waiting.longest_prompt, *(len(row.prompt_ids) for gpu_batch in rows for row in gpu_batch))
        sums, places = self.eviction.statistic == "column_sums", len(rows[0])
        nbytes = prompt_bytes(self.spec, self.dtype, places, longest, plan.policy.chunk, sums=sums)
        return HostFill(stage.tiers, stage.copies, nbytes)

    def _beside(
        self,
        plan: Plan,
        rows: list[list[Sequence]],
        waiting: WaitingQueue,
        stage: LoadedStage,
        number: int,
        caches: CacheStore,
    ) -> tuple[HostAttention | None, HostFill | None]:
        """What the host does for a stage while its GPU goes on."""
        if not plan.policy.overlap or not caches.on_host:
            return None, None
        # Only where other GPU batches are computed meanwhile, and nobody looks at single units.
        attends = len(rows) > 1 and not self.check_finite
        host = self._host_attention(stage, number, caches) if attends else None
        return host, self._host_fill(plan, rows, waiting, stage)

    def _shapes(
        self, plan: Plan, rows: list[list[Sequence]], waiting: WaitingQueue
    ) -> tuple[dict[Place, CacheShape], CacheMaker]:
        """The K and V of each (layer, GPU batch), for all rows that may come into it, and what makes caches in them."""
        spec = self.spec
        slots, devices = dict[Place, int](), dict[Place, torch.device]()
        units = [(self.spec.units[unit], stage) for stage in self.stages for unit in stage.units]
        at = {unit.layer: stage.device for unit, stage in units if unit.kind == "attn"}
        maker = CacheMaker(spec, self.eviction, slots, devices)
        shapes = {}
        for layer in range(spec.num_layers):
            later = waiting.slots(spec.arch.window_of(layer))
            for gpu_batch, first in enumerate(rows):
                shape = CacheShape.of(maker.budgets(layer, first), spec.num_kv_heads, spec.head_dim)
                slots[layer, gpu_batch] = max(shape.capacity, later)
                shapes[layer, gpu_batch] = replace(shape, capacity=slots[layer, gpu_batch])
                on_cpu = plan.policy.cpu_cache_compute and plan.placement.cache[layer, gpu_batch] == "cpu"
                devices[layer, gpu_batch] = torch.device("cpu") if on_cpu else at[layer]
        return shapes, maker

    def _size(
        self, shapes: dict[Place, CacheShape], gpu_batches: list[GpuBatch], most_tokens: int, groups: tuple[range, ...]
    ) -> BlockSize:
        """`most_tokens`: of a GPU batch in any step but the first."""
        nbytes = self.spec.hidden_bytes(
            max(most_tokens, *(gpu_batch.prompt_tokens for gpu_batch in gpu_batches)), self.dtype
        )
        return BlockSize(shapes, nbytes, torch_dtype(self.dtype), groups)

    def _prompts_through(self, totals: BlockTotals, gpu_batch: GpuBatch, unit: UnitSpec) -> None:
        """The prompts of a GPU batch have been through a unit; after the last they count, and their activations are not
        needed again."""
        if unit.layer is not None:
            self.prompt_halves += sum(len(row.prompt_ids) for row in gpu_batch.fresh)
        self._tell_prompts()
        if unit.kind != "head":
            return
        if gpu_batch.device.type == "cpu":
            return_free_pages()
        totals.computed_prompt_tokens += gpu_batch.segments[-1].stop + sum(len(row.fed) for row in gpu_batch.fresh)

    def _tell_prompts(self) -> None:
        self.on_prompts(self.prompt_halves // (2 * self.spec.num_layers))

    def _count_row(self, row: Sequence, totals: BlockTotals) -> None:
        self.finished_tokens += row.steps
        totals.sequences += 1
        totals.prompt_tokens += row.prompt_tokens
        totals.generated_tokens += len(row.token_ids)
