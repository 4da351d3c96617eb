"""Counts the work of a block while it runs: the amounts of a roofline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.batching.prefix_tree import parts_of
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.schedule.work import CountedWork, PhaseWork, Window, links


class _CacheCounts(NamedTuple):
    """A kind of layer by window, device that attends, and tier of the cache; `layer`: one of them."""

    layer: int
    window: Window
    device: str
    tier: str


class WorkCounter:
    """Adds one block to `work`: `step` before each step, `finished` for each row."""

    def __init__(self, spec: ModelSpec, plan: Plan, work: CountedWork) -> None:
        self._spec, self._plan, self._work = spec, plan, work
        self._tier = plan.request.compute_tier
        dtype = plan.request.dtype
        self._token = spec.mean_by_window(lambda layer: spec.kv_bytes_per_token_and_layer(dtype, layer))
        self._caches: dict[int, Counter[_CacheCounts]] = {}
        self._batch_of: dict[int, int] = {}
        groups = spec.groups_by_key
        # After the last attention only each prompt's last token goes on.
        *before, last, _ = spec.units
        whole = spec.arch.whole_ends
        self._before = Counter(unit.products for unit in (*before, *([last] * whole)) if unit.kind == "mlp")
        self._behind = Counter([last.products] if last.kind == "mlp" and not whole else [])
        self._attend = Counter(unit.products for unit in spec.units if unit.kind == "attn")
        self._streamed, self._experts = Counter[str](), Counter[str]()
        for key, tier in plan.placement.weights.items():
            for link in links(tier, self._tier, inward=True):
                kind = self._experts if ".experts." in key else self._streamed
                kind[link] += groups[key].nbytes(plan.request.dtype)

    def step(self, gpu_batches: SequenceOf[GpuBatch]) -> None:
        prompts = sum(gpu_batch.prompt_tokens for gpu_batch in gpu_batches)
        tokens = prompts + sum(gpu_batch.decoding for gpu_batch in gpu_batches)
        chosen = self._spec.chosen_share(tokens)
        for work, part in self._parts(prompts / max(1, tokens)):
            work.steps += part
            for link in self._streamed | self._experts:
                nbytes = self._streamed[link] + chosen * self._experts[link]
                work.moved[link, "weights"] += part * nbytes
        all_going = 0
        for gpu_batch in gpu_batches:
            going = [row for row in gpu_batch.rows[: gpu_batch.decoding] if not row.finished]
            for row in gpu_batch.fresh:
                self._batch_of[row.row_id] = gpu_batch.index
            self._products(gpu_batch, len(going))
            all_going += len(going)
            self._reads(gpu_batch, going)
            if len(gpu_batches) > 1:
                self._hidden(gpu_batch, len(going))
        self._experts_of(all_going, prompts, self._before["router"])
        self._experts_of(all_going, sum(len(gpu_batch.fresh) for gpu_batch in gpu_batches), self._behind["router"])

    def finished(self, row: Sequence) -> None:
        """Counts the kept prompt tokens and decode steps of a row that has left."""
        fed = len(row.fed)
        steps = fed + len(row.token_ids) - row.again - 1
        if steps < 0:
            return
        missing = sum(row.missing(step) for step in range(1, steps + 1)) if row.dropped else 0
        for caches, layers in self._caches_of(self._batch_of[row.row_id]).items():
            budget, prompt = row.budget_in(caches.layer, caches.window), len(row.prompt_ids)
            kept = min(prompt, budget.after_prompt)
            attended = _summed(kept, steps, budget) - missing
            # The first token comes from the prompt's last query, unless the end of the prompt is yet to be fed.
            first = 0 if fed else min(prompt, caches.window or prompt)
            asked = first + attended - _summed(kept, max(0, fed - 1), budget)
            self._work.dependency += layers * asked / self._spec.num_layers
            if not steps:
                continue
            self._work.decode.cache_tokens[caches.window, caches.device] += layers * attended
            self._move(self._work.decode, caches, layers * (attended - steps), inward=True)
            # The keys and values of the last step are read by no step.
            self._move(self._work.prefill, caches, layers * kept, inward=False)
            self._move(self._work.decode, caches, layers * (steps - 1), inward=False)

    def _products(self, gpu_batch: GpuBatch, going: int) -> None:
        """going: decode rows that are not finished."""
        idle = gpu_batch.decoding - going
        tokens, ends = going + gpu_batch.prompt_tokens, going + len(gpu_batch.fresh)
        for work, part in self._parts(gpu_batch.prompt_share):
            work.products["embed", tokens] += part
            for each in gpu_batch.parts:
                rows = each.span.stop - each.span.start - (idle if each.rows else 0)
                for kind, layers in self._attend.items() if rows else ():
                    work.products[kind, rows] += part * layers
            self._halves(work, tokens, gpu_batch.chunk, {kind: part * count for kind, count in self._before.items()})
        for work, part in self._parts(len(gpu_batch.fresh) / max(1, gpu_batch.decoding + len(gpu_batch.fresh))):
            self._halves(work, ends, gpu_batch.chunk, dict.fromkeys(self._behind, part))
            work.products["head", ends] += part

    def _halves(self, work: PhaseWork, tokens: int, chunk: int, times: Mapping[str, float]) -> None:
        """MLP halves of `tokens` tokens; times: by the kind of their products."""
        for kind, count in times.items():
            for rows in parts_of(tokens, chunk):
                work.products[kind, rows] += count

    def _experts_of(self, going: int, fresh: int, layers: int) -> None:
        """The experts of some layers, for all GPU batches' tokens: `going` decode rows and `fresh` prompt tokens."""
        tokens = going + fresh
        for work, part in self._parts(fresh / tokens) if tokens and layers else ():
            work.products["experts", tokens] += part * layers

    def _reads(self, gpu_batch: GpuBatch, going: list[Sequence]) -> None:
        """The tokens that attention reads; `finished` counts those of decode rows, without the prompts' share of mixed
        ticks."""
        share, windows = gpu_batch.prompt_share, {caches.window for caches in self._caches_of(gpu_batch.index)}
        for segment in gpu_batch.segments:
            queries, keys = segment.stop - segment.start, segment.past + segment.length
            for window in windows:
                seen = keys if window is None else min(keys, window)
                for work, part in self._parts(share):
                    work.prompt_pairs[window, seen] += part * queries * seen
        if not going:
            return
        for caches, layers in self._caches_of(gpu_batch.index).items():
            for work, part in self._parts(share):
                work.cache_calls[caches.window, caches.device] += part * layers
            if not gpu_batch.segments:
                continue
            held = 0
            for row in going:
                budget, new = row.budget_in(caches.layer, caches.window), row.steps - row.remaining
                held += _attended(min(len(row.prompt_ids), budget.after_prompt), new, budget) - row.missing(new)
            for work, sign in ((self._work.prefill, share), (self._work.decode, -share)):
                work.cache_tokens[caches.window, caches.device] += sign * layers * held
                self._move(work, caches, sign * layers * (held - len(going)), inward=True)

    def _hidden(self, gpu_batch: GpuBatch, going: int) -> None:
        """Hidden states of one of several GPU batches, which leave and come back between units."""
        tier = self._plan.placement.hidden[gpu_batch.index]
        spec, dtype = self._spec, self._plan.request.dtype
        # After the last attention only each prompt's last token goes on.
        passed = [spec.units[stage[-1]] for stage in self._plan.request.stages[:-1]]
        late = sum(unit.index >= len(spec.units) - 3 for unit in passed)
        first, last = 2 * spec.num_layers - 1 - len(passed) + late, 2 - late
        if not gpu_batch.fresh:
            sent = {unit.layer for unit in passed if unit.kind == "attn"}
            layers = range(spec.num_layers)
            beside = [layer not in sent and self._attends_beside(layer, gpu_batch.index) for layer in layers]
            first, last = first - sum(beside[:-1]), last - beside[-1]
        before = first * spec.hidden_bytes(going + gpu_batch.prompt_tokens, dtype)
        behind = last * spec.hidden_bytes(going + len(gpu_batch.fresh), dtype)
        for inward in (True, False):
            for link in links(tier, self._tier, inward=inward):
                for nbytes, share in (
                    (before, gpu_batch.prompt_share),
                    (behind, len(gpu_batch.fresh) / max(1, gpu_batch.decoding + len(gpu_batch.fresh))),
                ):
                    for work, part in self._parts(share):
                        work.moved[link, "hidden"] += part * nbytes

    def _parts(self, share: float) -> list[tuple[PhaseWork, float]]:
        """The phases and their shares in something of which `share` is prompts."""
        both = (self._work.prefill, share), (self._work.decode, 1 - share)
        return [(work, part) for work, part in both if part]

    def _move(self, work: PhaseWork, caches: _CacheCounts, tokens: float, *, inward: bool) -> None:
        for link in links(caches.tier, caches.device, inward=inward) if tokens else ():
            work.moved[link, "cache"] += tokens * self._token[caches.window]

    def _caches_of(self, gpu_batch: int) -> Counter[_CacheCounts]:
        """The number of layers of each kind."""
        if gpu_batch not in self._caches:
            layers = filter(self._spec.attends, range(self._spec.num_layers))
            self._caches[gpu_batch] = Counter(self._kind(layer, gpu_batch) for layer in layers)
        return self._caches[gpu_batch]

    def _attends_beside(self, layer: int, gpu_batch: int) -> bool:
        """Whether hidden states wait for decode attention on the host, and do not move."""
        beside = self._plan.policy.overlap and self._plan.policy.num_gpu_batches > 1
        return beside and self._kind(layer, gpu_batch).device != self._tier

    def _kind(self, layer: int, gpu_batch: int) -> _CacheCounts:
        tier = self._plan.placement.cache[layer, gpu_batch]
        device = "cpu" if self._plan.policy.cpu_cache_compute and tier == "cpu" else self._tier
        windows, even = self._spec.windows, self._plan.request.eviction.how_layers_share == "uniform"
        return _CacheCounts(windows.index(windows[layer]) if even else layer, windows[layer], device, tier)


def _attended(kept: int, step: int, budget: Budget) -> int:
    """The tokens that decode step 1, 2, ... reads, the newest included, after a prompt of which `kept` stay."""
    most = budget.total + (not budget.full)
    return kept + step if kept + step <= most else most - (most - kept - step) % budget.burst


def _summed(kept: int, steps: int, budget: Budget) -> int:
    """The sum of `_attended` over the first steps."""
    most, burst = budget.total + (not budget.full), budget.burst
    growing = max(0, min(steps, most - kept))
    whole, rest = divmod(steps - growing, burst)
    # Between bursts from most - burst + 1 to most, again and again.
    later = whole * (burst * most - burst * (burst - 1) // 2) + rest * (most - burst) + rest * (rest + 1) // 2
    return growing * kept + growing * (growing + 1) // 2 + later
