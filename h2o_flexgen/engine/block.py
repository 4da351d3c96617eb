"""One block from sequences to finished sequences: builds caches and stores, makes the schedule, runs the executor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from h2o_flexgen.cache.eviction.base import EvictionPolicy
from h2o_flexgen.cache.kv_cache import CacheShape
from h2o_flexgen.config.model import ModelSpec
from h2o_flexgen.config.work import Work
from h2o_flexgen.engine.caches import CacheMaker, CacheStore
from h2o_flexgen.engine.executor import Executor, Machinery
from h2o_flexgen.engine.finite import FiniteCheck
from h2o_flexgen.engine.hidden import HiddenStore
from h2o_flexgen.engine.host import HostAttention
from h2o_flexgen.engine.host_fill import HostFill
from h2o_flexgen.engine.lane import Lane
from h2o_flexgen.engine.machine import return_free_pages
from h2o_flexgen.engine.plan import Plan
from h2o_flexgen.engine.refill import Refill
from h2o_flexgen.engine.sampler import Sampler
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.engine.tally import Tally
from h2o_flexgen.engine.trace import Trace
from h2o_flexgen.engine.waiting import Waiting
from h2o_flexgen.engine.weights import WeightStore
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.models.decoder import Decoder
from h2o_flexgen.schedule.host_attention import prompt_bytes
from h2o_flexgen.schedule.tasks import ScheduleShape, Tick
from h2o_flexgen.schedule.zigzag import zigzag


@dataclass
class BlockTotals:
    """What the blocks of a call added up to."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    """Prefixes that several prompts share counted once."""
    generated_tokens: int = 0
    sequences: int = 0
    kv_bytes: int = 0
    replayed_steps: int = 0
    """Decode steps of GPU batches that were launched as CUDA graphs."""
    not_recorded: str | None = None
    """Why such a graph could not be recorded, the first time of all; None where none failed."""
    work: Work = field(default_factory=Work)
    """Counted step by step; of sequences that a failed block left unfinished without what decode read from caches."""


@dataclass
class BlockRunner:
    """Runs blocks one after another on loaded weights. Owns nothing but the totals."""

    spec: ModelSpec
    decoder: Decoder
    weights: WeightStore
    tiers: Tiers
    copies: CopyEngine
    eviction: EvictionPolicy
    sampler: Sampler
    trace: Trace
    dtype: str
    check_finite: bool = False
    rolling: bool = False
    share_prefixes: bool = True
    on_tokens: Callable[[int], None] = lambda tokens: None
    """Called at every step with the tokens so far; a finished sequence counts as all it asked for."""
    finished_tokens: int = 0
    """What the sequences that are finished asked for."""

    def run(
        self,
        plan: Plan,
        rows: list[list[Sequence]],
        totals: BlockTotals,
        waiting: Waiting | None = None,
    ) -> Generator[Sequence]:
        """Runs `rows` (one list per lane); yields sequences as they finish. Leaves nothing behind.

        Rows of `waiting` take the places of finished ones, and leave the queue when they do; some may be left in it.
        """
        waiting = Waiting() if waiting is None else waiting
        device, chunk = self.tiers.device, plan.policy.prefill_chunk
        lanes = [Lane(index, chunk, device, self.rolling) for index in range(len(rows))]
        shapes, maker = self._shapes(plan, rows, waiting)
        steps = waiting.steps + max(row.steps for lane in rows for row in lane)
        refill = Refill(lanes, rows, waiting, chunk, self.share_prefixes)
        stores: list[CacheStore | HiddenStore | HostAttention | HostFill] = []
        try:
            homes = {place: plan.placement.cache[place] for place in shapes}
            dtype = torch_dtype(self.dtype)
            store = CacheStore(self.tiers, self.copies, shapes, homes, dtype, plan.policy.cpu_cache_compute)
            stores.append(store)
            hidden = self._hidden_store(plan, lanes, waiting.longest_prompt * len(rows[0]))
            stores.append(hidden)
            host = self._host_attention(plan, len(lanes), store)
            stores.extend([] if host is None else [host])
            fill = self._host_fill(plan, rows, waiting, store)
            stores.extend([] if fill is None else [fill])
            machinery = replace(self._machinery(plan, maker, store, hidden), host=host, fill=fill)
            executor = Executor(machinery, lanes, partial(self._prompts_through, totals))
            totals.kv_bytes = max(totals.kv_bytes, store.nbytes)
            shape = self._shape(plan, steps, lanes, machinery)
            tally = Tally(self.spec, plan, totals.work)
            try:
                for row in executor.run(self._ticks(shape, refill, lanes, tally)):
                    self._count_row(row, totals)
                    tally.finished(row)
                    yield row
            finally:
                # Of a block that failed, too: what was computed in vain took its time.
                totals.prefill_seconds += executor.prefill_seconds
                totals.decode_seconds += executor.decode_seconds
                totals.replayed_steps += executor.replayed
                totals.not_recorded = totals.not_recorded or executor.not_recorded
        finally:
            # Whatever is still under way writes to buffers and files that go now; its errors no longer matter.
            self.copies.drain()
            for each in reversed(stores):
                each.close()
            self.weights.reset()

    def _ticks(self, shape: ScheduleShape, refill: Refill, lanes: list[Lane], tally: Tally) -> Iterator[Tick]:
        def active(step: int) -> list[int]:
            going = (row for lane in lanes for row in lane.rows if not row.finished)
            self.on_tokens(self.finished_tokens + sum(len(row.token_ids) for row in going))
            indices = refill.active(step)
            tally.step([lanes[index] for index in indices])
            return indices

        return zigzag(shape, active, refill.last)

    def _shape(self, plan: Plan, steps: int, lanes: list[Lane], machinery: Machinery) -> ScheduleShape:
        host = machinery.host
        return ScheduleShape(
            units=self.spec.units,
            num_steps=steps,
            num_batches=len(lanes),
            streamed=self.weights.streamed,
            cache_moves=machinery.caches.moves,
            hidden_moves=machinery.hidden.moves,
            lookahead=plan.policy.lookahead,
            host_attends=frozenset() if host is None else host.places,
        )

    def _machinery(self, plan: Plan, maker: CacheMaker, caches: CacheStore, hidden: HiddenStore) -> Machinery:
        return Machinery(
            self.decoder,
            self.weights,
            maker,
            caches,
            hidden,
            self.sampler,
            self.copies,
            self.trace,
            plan.policy.overlap,
            FiniteCheck() if self.check_finite else None,
            self.rolling,
        )

    def _host_attention(self, plan: Plan, lanes: int, caches: CacheStore) -> HostAttention | None:
        """What attends to caches in host memory beside the GPU; None where there is no other lane to compute meanwhile,
        or nothing may be left to be done later."""
        places = caches.on_host if plan.policy.overlap and lanes > 1 and not self.check_finite else {}
        if not places:
            return None
        dtype, streamed = torch_dtype(self.dtype), self.weights.streamed
        return HostAttention(self.tiers, self.copies, self.decoder, self.trace, places, dtype, streamed)

    def _host_fill(
        self, plan: Plan, rows: list[list[Sequence]], waiting: Waiting, caches: CacheStore
    ) -> HostFill | None:
        """What fills caches in host memory beside the GPU."""
        if not plan.policy.overlap or not caches.on_host:
            return None
        longest = max(waiting.longest_prompt, *(len(row.prompt_ids) for lane in rows for row in lane))
        sums, places = self.eviction.statistic == "column_sums", len(rows[0])
        nbytes = prompt_bytes(self.spec, self.dtype, places, longest, plan.policy.prefill_chunk, sums=sums)
        return HostFill(self.tiers, self.copies, nbytes)

    def _shapes(
        self, plan: Plan, rows: list[list[Sequence]], waiting: Waiting
    ) -> tuple[dict[tuple[int, int], CacheShape], CacheMaker]:
        """The K and V of each (layer, lane), for all rows that may come into it, and what makes caches in them."""
        spec = self.spec
        slots, devices = dict[tuple[int, int], int](), dict[tuple[int, int], torch.device]()
        maker = CacheMaker(spec, self.eviction, slots, devices)
        shapes = {}
        for layer in range(spec.num_layers):
            later = waiting.slots(spec.arch.window_of(layer))
            for lane, first in enumerate(rows):
                shape = CacheShape.of(maker.budgets(layer, first), spec.num_kv_heads, spec.head_dim)
                slots[layer, lane] = max(shape.capacity, later)
                shapes[layer, lane] = replace(shape, capacity=slots[layer, lane])
                devices[layer, lane] = self._cache_device(plan, layer, lane)
        return shapes, maker

    def _cache_device(self, plan: Plan, layer: int, lane: int) -> torch.device:
        if plan.policy.cpu_cache_compute and plan.placement.cache[layer, lane] == "cpu":
            return torch.device("cpu")
        return self.tiers.device

    def _hidden_store(self, plan: Plan, lanes: list[Lane], most_tokens: int) -> HiddenStore:
        """`most_tokens`: of a lane in any step but the first."""
        # One lane alone is never parked: its hidden states are wanted again by the very next unit.
        homes = {lane.index: plan.placement.hidden[lane.index] for lane in lanes} if len(lanes) > 1 else {}
        dtype = torch_dtype(self.dtype)
        nbytes = self.spec.hidden_bytes(max(most_tokens, *(lane.prompt_tokens for lane in lanes)), self.dtype)
        return HiddenStore(self.tiers, self.copies, homes, nbytes, dtype)

    def _prompts_through(self, totals: BlockTotals, lane: Lane) -> None:
        """The prompts of a lane have been through all units: they count, and their activations are not needed again."""
        if self.tiers.device.type == "cpu":
            return_free_pages()
        totals.computed_prompt_tokens += lane.segments[-1].stop + sum(len(row.fed) for row in lane.fresh)

    def _count_row(self, row: Sequence, totals: BlockTotals) -> None:
        self.finished_tokens += row.max_new_tokens
        totals.sequences += 1
        totals.prompt_tokens += row.prompt_tokens
        totals.generated_tokens += len(row.token_ids)
