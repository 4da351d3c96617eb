"""One block from sequences to finished sequences: builds caches and stores, makes the schedule, runs the executor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from h2o_flexgen.cache.eviction.base import EvictionPolicy
from h2o_flexgen.cache.kv_cache import CacheShape, KVCache
from h2o_flexgen.config.model import ModelSpec
from h2o_flexgen.engine.batch import GpuBatch
from h2o_flexgen.engine.executor import Executor, Machinery
from h2o_flexgen.engine.finite import FiniteCheck
from h2o_flexgen.engine.plan import Plan
from h2o_flexgen.engine.sampler import Sampler
from h2o_flexgen.engine.segments import segments_of
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.engine.stores import CacheStore, HiddenStore, kv_bytes
from h2o_flexgen.engine.trace import Trace
from h2o_flexgen.engine.weights import WeightStore
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import torch_dtype
from h2o_flexgen.memory.tiers import Tiers
from h2o_flexgen.models.decoder import Decoder
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
    flops: float = 0.0


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
    """Called at every step with the tokens of the block so far; a finished sequence counts as all it asked for."""

    def run(self, plan: Plan, rows: list[list[Sequence]], totals: BlockTotals) -> Generator[Sequence]:
        """Runs `rows` (one list per GPU batch); yields sequences as they finish. Leaves nothing behind."""
        caches = self._caches(plan, rows)
        batches = self._batches(plan, rows)
        stores: list[CacheStore | HiddenStore] = []
        try:
            homes = {place: plan.placement.cache[place] for place in caches}
            dtype = torch_dtype(self.dtype)
            store = CacheStore(self.tiers, self.copies, caches, homes, dtype, plan.policy.cpu_cache_compute)
            stores.append(store)
            hidden = self._hidden_store(plan, batches)
            stores.append(hidden)
            machinery = Machinery(
                self.decoder,
                self.weights,
                store,
                hidden,
                self.sampler,
                self.copies,
                self.trace,
                plan.policy.overlap,
                FiniteCheck() if self.check_finite else None,
                self.rolling,
            )
            executor = Executor(machinery, batches)
            totals.kv_bytes = max(totals.kv_bytes, sum(kv_bytes(cache.shape, dtype) for cache in caches.values()))
            try:
                for row in executor.run(self._ticks(plan, executor, store, hidden, rows)):
                    self._count_row(row, totals)
                    yield row
            finally:
                self._count(executor, batches, totals)
        finally:
            # Whatever is still under way writes to buffers and files that go now; its errors no longer matter.
            self.copies.drain()
            for each in reversed(stores):
                each.close()
            self.weights.reset()

    def _ticks(
        self, plan: Plan, executor: Executor, caches: CacheStore, hidden: HiddenStore, rows: list[list[Sequence]]
    ) -> Iterator[Tick]:
        def active(step: int) -> list[int]:
            every = (row for batch in rows for row in batch)
            self.on_tokens(sum(row.max_new_tokens if row.finished else len(row.token_ids) for row in every))
            return executor.active(step)

        shape = ScheduleShape(
            units=self.spec.units,
            num_steps=max(row.steps for batch in rows for row in batch),
            num_batches=len(rows),
            streamed=self.weights.streamed,
            cache_moves=caches.moves,
            hidden_moves=hidden.moves,
            lookahead=plan.policy.lookahead,
        )
        return zigzag(shape, active)

    def _batches(self, plan: Plan, rows: list[list[Sequence]]) -> list[GpuBatch]:
        chunk = plan.policy.prefill_chunk
        prompts = [[row.prompt_ids for row in batch] for batch in rows]
        segments = segments_of(prompts, chunk, self.share_prefixes)
        return [
            GpuBatch(i, batch, parts, chunk, self.tiers.device, self.rolling)
            for i, (batch, parts) in enumerate(zip(rows, segments, strict=True))
        ]

    def _caches(self, plan: Plan, rows: list[list[Sequence]]) -> dict[tuple[int, int], KVCache]:
        caches = {}
        for index, batch in enumerate(rows):
            for layer in range(self.spec.num_layers):
                window = self.spec.arch.window_of(layer)
                budgets = [row.budget.within(window) for row in batch]
                caches[layer, index] = KVCache(
                    CacheShape.of(budgets, self.spec.num_kv_heads, self.spec.head_dim),
                    budgets,
                    self.eviction,
                    layer=layer,
                    row_ids=[row.row_id for row in batch],
                    device=self._cache_device(plan, layer, index),
                    window=window,
                )
        return caches

    def _cache_device(self, plan: Plan, layer: int, batch: int) -> torch.device:
        if plan.policy.cpu_cache_compute and plan.placement.cache[layer, batch] == "cpu":
            return torch.device("cpu")
        return self.tiers.device

    def _hidden_store(self, plan: Plan, batches: list[GpuBatch]) -> HiddenStore:
        # One batch alone is never parked: its hidden states are wanted again by the very next unit.
        homes = {batch.index: plan.placement.hidden[batch.index] for batch in batches} if len(batches) > 1 else {}
        dtype = torch_dtype(self.dtype)
        nbytes = self.spec.hidden_bytes(max(batch.tokens for batch in batches), self.dtype)
        return HiddenStore(self.tiers, self.copies, homes, nbytes, dtype)

    def _count(self, executor: Executor, batches: list[GpuBatch], totals: BlockTotals) -> None:
        """Time and prompts of a block, of one that failed too: what was computed in vain took its time."""
        totals.prefill_seconds += executor.prefill_seconds
        totals.decode_seconds += executor.decode_seconds
        for batch in batches:
            if executor.decode_seconds or batch.finished:
                attended = sum((part.stop - part.start) * (part.past + part.length) for part in batch.segments)
                totals.computed_prompt_tokens += batch.tokens + sum(len(row.fed) for row in batch.rows)
                totals.flops += self.spec.terms(tokens=batch.tokens, attended=attended, batch=len(batch.rows)).total

    def _count_row(self, row: Sequence, totals: BlockTotals) -> None:
        prompt, generated = row.prompt_tokens, len(row.token_ids)
        totals.sequences += 1
        totals.prompt_tokens += prompt
        totals.generated_tokens += generated
        context = prompt + generated / 2 if row.budget.full else row.budget.total
        steps = max(0, len(row.fed) + generated - 1)
        totals.flops += steps * self.spec.decode_flops(1, int(context))
