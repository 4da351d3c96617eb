"""Runs one block: builds caches and stores, makes the schedule, runs the executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from h2o_flexgen.cache.eviction.base import EvictionPolicy, RankedPolicy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.lengths import slots_needed
from h2o_flexgen.cache.prefix_store import PrefixStore
from h2o_flexgen.cache.recall import DiskShelves, Recall, RecallCounts
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.model.packing import first_tokens, newest_tokens
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.batching.scheduler import BatchScheduler, BlockRoom, WaitingQueue
from h2o_flexgen.engine.execution.executor import Executor, FiniteCheck
from h2o_flexgen.engine.execution.host_attention import HostAttention
from h2o_flexgen.engine.execution.stages import ActivationTransfer, Stage, parked
from h2o_flexgen.engine.limits.devices import return_free_pages, rss
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.metrics.recorder import BlockTotals
from h2o_flexgen.engine.metrics.trace import ScoreLog, Trace
from h2o_flexgen.engine.metrics.work_counter import WorkCounter
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.engine.state.backing import HiddenStore
from h2o_flexgen.engine.state.kv_store import CacheMaker, CacheStore, Place, RowStatePlaces
from h2o_flexgen.engine.state.loader import LoadedStage
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.memory.pinned import Pin
from h2o_flexgen.models.decoder import Decoder
from h2o_flexgen.schedule.footprint import most_arrivals, recall_items, shelved_layers
from h2o_flexgen.schedule.pipeline import pipeline
from h2o_flexgen.schedule.request import BlockShape
from h2o_flexgen.schedule.tasks import ScheduleShape, Tick, groups_of
from h2o_flexgen.schedule.workspace import prompt_bytes
from h2o_flexgen.schedule.zigzag import zigzag

_NEAR = 0.95  # of the memory that a process has


@dataclass
class BlockRunner:
    """Runs blocks one after another on loaded weights.

    on_tokens   called before every step with the tokens so far; a finished sequence counts as all it asked for
    on_prompts  called with the prompt tokens done, when prompts begin and after each unit; a token under way counts by
                the share of layers that it has passed
    """

    decoder: Decoder
    stages: tuple[LoadedStage, ...]
    eviction: EvictionPolicy
    sampler: Sampler
    trace: Trace
    scores: ScoreLog | None = None
    check_finite: bool = False
    share_prefixes: bool = True
    prefixes: PrefixStore | None = None
    on_tokens: Callable[[int], None] = lambda tokens: None
    on_prompts: Callable[[int], None] = lambda tokens: None
    finished_tokens: int = 0  # that finished sequences asked for
    prompt_halves: int = 0  # prompt tokens times the layer halves that they have passed

    def run(
        self, plan: Plan, rows: list[list[Sequence]], totals: BlockTotals, waiting: WaitingQueue | None = None
    ) -> Generator[Sequence]:
        """Runs `rows` (one list per GPU batch), then rows of `waiting` in the places of finished ones; yields sequences
        as they finish. Some may be left in `waiting`."""
        waiting = WaitingQueue() if waiting is None else waiting
        device, chunk, rolling = self.stages[0].device, plan.policy.chunk, plan.request.eviction.rolling_positions
        gpu_batches = [GpuBatch(index, chunk, device, rolling) for index in range(len(rows))]
        maker = self._maker(plan, rows, waiting)
        steps = waiting.steps + max(row.steps for gpu_batch in rows for row in gpu_batch)
        groups = groups_of(len(rows), len(self.stages))
        together = [[gpu_batches[i] for i in group] for group in groups]
        sharing = self.share_prefixes, self.prefixes, partial(self._queries, maker)
        schedulers = [
            BatchScheduler(members, [rows[each.index] for each in members], waiting, chunk, *sharing)
            for members in together
        ]
        with ExitStack() as stack:
            if self.prefixes is not None:
                for scheduler in schedulers:
                    stack.callback(self.prefixes.release, scheduler)
            for each in self.stages:
                stack.callback(each.weights.reset)
            maker = replace(maker, recall=self._open_recall(plan, len(rows), totals.recall, stack))
            stages = self._open_stages(plan, rows, waiting, maker, gpu_batches, groups, stack)
            # Transfers under way write to buffers and files that are released next; their errors no longer matter.
            for each in self.stages:
                stack.callback(each.copies.drain)
            executor = Executor(
                self.decoder,
                stages,
                maker,
                together,
                self.sampler,
                self.trace,
                totals,
                partial(self._prompts_through, totals, stages, _NEAR * _memory_of(plan)),
                overlap=plan.policy.overlap,
                finite=FiniteCheck() if self.check_finite else None,
            )
            executor.path_sums = self.prefixes is not None and self.prefixes.sums
            stack.callback(executor.close)
            totals.hold([(stage.caches.nbytes, stage.caches.state_bytes) for stage in stages])
            counter = WorkCounter(self.decoder.spec, plan, totals.work)
            ticks = self._ticks(self._shape(plan, steps, stages, len(rows)), schedulers, gpu_batches, counter, executor)
            while finished := executor.advance(ticks):
                for row in finished:
                    self._count_row(row, totals, stages)
                    counter.finished(row)
                    if self.scores is not None and not row.paused:
                        self.scores.ended(row, _holding(row, stages))
                    yield row

    def _queries(self, maker: CacheMaker, row: Sequence) -> int:
        """The most of a row's last queries that its cache in any layer looks at."""
        policy = self.eviction
        if not isinstance(policy, RankedPolicy):
            return maker.least_queries
        if type(policy).queries is RankedPolicy.queries and not policy.asks and not row.budget.fair:
            return maker.least_queries
        return max(maker.queries(layer, [row]) for layer in range(self.decoder.spec.num_layers))

    def _ticks(
        self,
        shape: ScheduleShape,
        schedulers: list[BatchScheduler],
        gpu_batches: list[GpuBatch],
        counter: WorkCounter,
        executor: Executor,
    ) -> Iterator[Tick]:
        def active(step: int, group: int = 0) -> list[int]:
            going = (row for gpu_batch in gpu_batches for row in gpu_batch.rows if not row.finished)
            self.on_tokens(self.finished_tokens + sum(row.steps - row.remaining for row in going))
            if step == 0:
                self._tell_prompts()
            indices = schedulers[group].active(step)
            executor.mixture.step = step
            if indices:
                counter.step([gpu_batches[index] for index in indices])
            return indices

        if len(shape.stages) == 1:
            last, chosen, ahead = schedulers[0].last, executor.chosen, executor.mixture.reads_ahead
            return zigzag(shape, active, last, executor.whole, chosen, executor.streams, ahead)
        return pipeline(shape, active, lambda step, group: schedulers[group].last(step))

    def _shape(self, plan: Plan, steps: int, stages: list[Stage], batches: int) -> ScheduleShape:
        return ScheduleShape(
            units=self.decoder.spec.units,
            num_steps=steps,
            num_batches=batches,
            streamed=frozenset().union(*(stage.loaded.weights.streamed for stage in stages)),
            cache_moves=frozenset().union(*(stage.caches.moves for stage in stages)),
            hidden_moves=frozenset().union(*(stage.hidden.moves for stage in stages)),
            lookahead=plan.policy.lookahead,
            host_attends=frozenset().union(*(stage.host.places for stage in stages if stage.host is not None)),
            stages=tuple(stage.loaded.units for stage in stages),
            expert_slots=min(stage.loaded.weights.expert_slots for stage in stages),
        )

    def _maker(self, plan: Plan, rows: list[list[Sequence]], waiting: WaitingQueue) -> CacheMaker:
        """Makes the caches of each (layer, GPU batch), with room for all rows that may join it."""
        spec = self.decoder.spec
        units = [(spec.units[unit], stage) for stage in self.stages for unit in stage.units]
        at = {unit.layer: stage.device for unit, stage in units if unit.kind == "attn"}
        shapes, devices = dict[Place, CacheShape](), dict[Place, torch.device]()
        for layer in spec.last_readers:
            window = spec.arch.window_of(layer)
            far = plan.request.eviction.far_heads(layer)
            later = [waiting.slots(layer, window, part) for part in range(2 if far else 1)]
            for gpu_batch, first in enumerate(rows):
                budgets = [row.budget_in(layer, window) for row in first]
                heads = spec.heads_of(layer)
                shape = CacheShape.of(budgets, heads.keys, heads.dim, spec.cache_bits, heads.joint, spec.cache_rotation)
                slots = [max(slots_needed([b.part(i) for b in budgets]), most) for i, most in enumerate(later)]
                slots = slots if spec.attends(layer) else [0]
                shape = replace(shape, far=far if slots[0] else ()).with_slots(slots)
                if slots[0] and not heads.joint and spec.arch.chunk_of(layer) is None:
                    opening = first_tokens(spec.cache_bits, spec.cache_rotation)
                    full = plan.request.budgets[layer].full
                    newest = newest_tokens(spec.cache_newest, shape.capacity, opening, full)
                    shape = replace(shape, newest=newest, first=opening)
                shapes[layer, gpu_batch] = shape
                on_cpu = plan.policy.cpu_cache_compute and plan.placement.cache[layer, gpu_batch] == "cpu"
                devices[layer, gpu_batch] = torch.device("cpu") if on_cpu else at[layer]
        watch = None if self.scores is None else self.scores.filled
        return CacheMaker(spec, self.eviction, shapes, devices, watch)

    def _open_stages(
        self,
        plan: Plan,
        rows: list[list[Sequence]],
        waiting: WaitingQueue,
        maker: CacheMaker,
        gpu_batches: list[GpuBatch],
        groups: tuple[range, ...],
        stack: ExitStack,
    ) -> list[Stage]:
        """The stores of a block, stage by stage; `stack` closes them."""
        spec, name, dtype = self.decoder.spec, plan.request.dtype, torch_dtype(plan.request.dtype)
        # The most tokens of a GPU batch, in the first step or any later one.
        places = len(rows[0])
        tokens = max(waiting.longest_prompt * places, *(gpu_batch.prompt_tokens for gpu_batch in gpu_batches))
        longest, prompt_room = max(waiting.longest_prompt, *(len(row.pass_ids) for each in rows for row in each)), 0
        waiting.room = BlockRoom(self._slots(maker), min(longest, tokens // places))
        if plan.policy.overlap:
            sums = self.eviction.column_sums
            prompt_room = prompt_bytes(spec, name, places, longest, plan.policy.chunk, sums=sums)
        # Only where other GPU batches are computed meanwhile, and no single units are looked at.
        attends, nbytes = len(rows) > 1 and not self.check_finite, spec.hidden_bytes(tokens, name)
        transfers: list[ActivationTransfer | None] = [None]
        for sender, receiver in pairwise(self.stages):
            landings = most_arrivals(groups, receiver.units)
            between = ActivationTransfer(sender.tiers, receiver.tiers, receiver.copies, nbytes, landings, dtype)
            transfers.append(stack.enter_context(closing(between)))
        transfers.append(None)
        stages = []
        for number, each in enumerate(self.stages):
            tiers, copies, host = each.tiers, each.copies, None
            layers = {spec.units[unit].layer for unit in each.units if spec.units[unit].kind == "attn"}
            own = {place: shape for place, shape in maker.shapes.items() if place[0] in layers}
            states = {
                place: RowStatePlaces(specs, shape.batch, name)
                for place, shape in own.items()
                if (specs := spec.states_of(place[0]))
            }
            on_cpu, counted = plan.policy.cpu_cache_compute, not spec.keeps_caches
            caches = CacheStore(tiers, copies, own, plan.placement.cache, dtype, on_cpu, counted, states)
            stack.enter_context(caches)
            hidden = stack.enter_context(HiddenStore(tiers, copies, dict(parked(plan, each, groups)), nbytes, dtype))
            if prompt_room and caches.on_host:
                beside, streamed = caches.on_host if attends else {}, each.weights.streamed
                host = HostAttention(
                    tiers, copies, self.decoder, self.trace, beside, dtype, streamed, prompt_room, number
                )
                stack.callback(host.close)
            stages.append(Stage(number, each, caches, hidden, transfers[number], transfers[number + 1], host))
        return stages

    def _open_recall(
        self, plan: Plan, batches: int, counts: RecallCounts, stack: ExitStack
    ) -> Callable[[SequenceOf[int]], Recall] | None:
        """Makes recalls of rows. Allocates what they have on disk, and charges memory, which is allocated row by row;
        `stack` releases and refunds it."""
        block, asked = BlockShape(plan.request, replace(plan.policy, num_gpu_batches=batches)), plan.request.eviction
        tiers, items, disk = self.stages[0].tiers, list(recall_items(block)), None
        if asked.recall is None:
            return None
        if asked.recall == "disk":
            on_disk, buffer, *items = items
            region = stack.enter_context(tiers.disk.allocate(on_disk.nbytes, on_disk.what))
            room = stack.enter_context(tiers.cpu.allocate(buffer.nbytes, buffer.what, Pin.NEVER))
            tokens = [*shelved_layers(plan.request).values()] * batches * block.rows
            length = on_disk.nbytes // max(1, sum(tokens))
            disk = DiskShelves(tiers.disk, region, tokens, length, room.tensor)
            stack.callback(disk.close)
        for item in items:
            tiers.memory(item.tier).charge(item.nbytes, item.what)
            stack.callback(tiers.memory(item.tier).refund, item.nbytes, item.what)
        return partial(Recall, every=asked.recall_every, counts=counts, logs=self.scores is not None, disk=disk)

    def _slots(self, maker: CacheMaker) -> dict[tuple[int, int | None], tuple[int, ...]]:
        """The fewest slots of a layer's caches, by layer and window."""
        slots = dict[tuple[int, int | None], tuple[int, ...]]()
        for (layer, _), shape in maker.shapes.items():
            if self.decoder.spec.attends(layer):
                where = layer, self.decoder.spec.arch.window_of(layer)
                own = tuple(part.capacity for part in shape.parts)
                slots[where] = tuple(map(min, slots.get(where, own), own))
        return slots

    def _prompts_through(
        self, totals: BlockTotals, stages: list[Stage], near: float, gpu_batch: GpuBatch, unit: UnitSpec
    ) -> None:
        """After a unit of a GPU batch with prompts: progress, and after the last one counts and free memory. near:
        bytes of the process from which on freed memory goes back after each layer, too."""
        if unit.layer is not None:
            self.prompt_halves += sum(len(row.prompt_ids) for row in gpu_batch.fresh)
        self._tell_prompts()
        if unit.kind == "mlp" and gpu_batch.device.type == "cpu" and rss() > near:
            return_free_pages(large=False)  # with several GPU batches, or prompts of many lengths, the heap grows
        if unit.kind != "head":
            return
        for row in gpu_batch.fresh:
            _count_spans(row, "prefill", stages)
        if gpu_batch.device.type == "cpu":
            return_free_pages()
        totals.computed_prompt_tokens += gpu_batch.segments[-1].stop + sum(len(row.fed) for row in gpu_batch.fresh)

    def _tell_prompts(self) -> None:
        self.on_prompts(self.prompt_halves // (len(self.decoder.spec.units) - 2))

    def _count_row(self, row: Sequence, totals: BlockTotals, stages: list[Stage]) -> None:
        _count_spans(row, "decode", stages)
        self.finished_tokens += row.steps
        totals.generated_tokens += len(row.token_ids) - row.again
        if not row.paused:
            totals.sequences += 1
            totals.prompt_tokens += row.prompt_tokens


def _memory_of(plan: Plan) -> float:
    """Bytes that the process may take: its cap, or with several GPU batches, where the heap grows, what is planned."""
    return plan.footprint.total("cpu") if plan.policy.num_gpu_batches > 1 else plan.request.capped.get("cpu", math.inf)


def _count_spans(row: Sequence, when: str, stages: list[Stage]) -> None:
    """Notes how many tokens of the row's spans are kept now, the mean over layers."""
    if row.spans:
        ranges = [(span.start, span.stop) for span in row.spans]
        layers = [cache.kept_in(place, ranges) for _, cache, place in _holding(row, stages)]
        layers = layers or [[float(stop - start) for start, stop in ranges]]  # caches that modules make evict nothing
        row.kept[when] = [sum(counts) / len(layers) for counts in zip(*layers, strict=True)]


def _holding(row: Sequence, stages: list[Stage]) -> Iterator[tuple[int, KVCache, int]]:
    return (held for stage in stages for held in stage.caches.holding(row.row_id))
