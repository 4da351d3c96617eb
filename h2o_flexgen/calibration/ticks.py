"""The time of a tick that the other figures leave unexplained: a short model runs in the engine itself, beside its
prediction.

Products one after the other are slower than each alone in a loop, small operations cost more than their bytes, every
task is issued, and now and then the system takes its time: all of that is in here, by the kind of unit and the rows of
the tick. Caches are small ones that evict, as they are where such costs count.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.calibration.bench import Bench, largest_cache
from h2o_flexgen.calibration.compute import greedy_sequences
from h2o_flexgen.calibration.timing import MOST_SAMPLES, Sample, sample_of
from h2o_flexgen.checkpoint.quantising import QuantisingSource
from h2o_flexgen.checkpoint.source import DummySource, WeightSource
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import UNIT_KINDS, ComputeRates, Curve
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.packing import groupwise
from h2o_flexgen.config.model.spec import ModelSpec, UnitSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.engine.execution.block import BlockRunner
from h2o_flexgen.engine.limits.plan import Plan, make_plan
from h2o_flexgen.engine.metrics.recorder import BlockTotals
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.model import decoder_of
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.engine.state.loader import Loaded, load
from h2o_flexgen.models.decoder import Decoder
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED, Task, TaskKind

ROWS = (1, 8, 32)
PROMPTS, _PROMPTS, _PROMPT_STEPS = (16, 64, 256), 8, 2
"""Tokens of each of so many prompts, and the steps that they go through."""
_WIDTH, _VOCABULARY = 64, 64
_PROMPT, _BUDGET, MOST_STEPS, _LEAST_STEPS = 33, 32, 48, 6
_WARM = 2  # steps that nothing is taken from, the prompts' included
_TURNS = 3  # times the largest cache of the processor that the short model's layers fill
_LEAST_LAYERS, _MOST_LAYERS = 2, 12
_MOST_BYTES = 2 << 30
_LEAST = 1e-7


def short_plan(spec: ModelSpec, dtype: str, tier: str, room: int) -> Plan:
    """A plan of a short model of the kind of `spec`, all of it on `tier`, that takes no more than `room` bytes.

    Where layers as wide as those of `spec` take more, they are tiny: the unexplained part is small beside wide layers.
    ModelError where neither can be made.
    """
    for short in _modules(spec, dtype) if isinstance(spec, ModuleSpec) else _natives(spec, dtype):
        eviction = EvictionConfig("h2o", budget=_BUDGET) if short.keeps_caches else EvictionConfig()
        request = PlanRequest(short, Workload(_PROMPT, MOST_STEPS), eviction, dtype, Caps(), tier)
        at_home = {tier: 1.0}
        plan = make_plan(request, OffloadPolicy(max(ROWS), weights=at_home, cache=at_home, hidden=at_home))
        longest = with_prompts(plan, PROMPTS[-1]) if isinstance(short, ModuleSpec) else plan
        if max(each.footprint.total(tier) for each in (plan, longest)) <= room:
            break
    return plan


def with_prompts(plan: Plan, length: int) -> Plan:
    """The same model for `_PROMPTS` prompts of another length."""
    request = replace(plan.request, workload=Workload(length, MOST_STEPS))
    return make_plan(request, replace(plan.policy, gpu_batch_size=_PROMPTS))


def _enough_layers(spec: ModelSpec, dtype: str) -> int:
    """As many as just leave the processor's caches before they come again."""
    sizes = (group.buffer_bytes(dtype) for group in spec.weight_groups if group.key.startswith("layers.0."))
    return min(max(_LEAST_LAYERS, -(-_TURNS * largest_cache() // sum(sizes))), _MOST_LAYERS, spec.num_layers)


def _modules(spec: ModuleSpec, dtype: str) -> Iterator[ModelSpec]:
    """Of a model of transformers' modules: its first layers, until there is one of each kind, and a tiny one."""
    from h2o_flexgen.models.hf.shrink import shortened, shrunk  # imports transformers

    kinds = [(*spec.layers[i][1:4], spec.windows[i], spec.arch.experts_of(i)) for i in range(spec.num_layers)]
    layers = max(1 + max(kinds.index(kind) for kind in kinds), _enough_layers(spec, dtype))
    for config_of in (partial(shortened, share=layers / spec.num_layers), shrunk):
        try:
            made = _module_spec(spec, config_of)
        except Exception:
            if config_of is shrunk:
                raise
            continue  # not every type can be made short
        yield made


@torch.inference_mode(False)
def _module_spec(spec: ModuleSpec, config_of: Callable[[Mapping[str, Any]], Any]) -> ModelSpec:
    """Of a config that is made of the one of `spec`. Raises what transformers does, and ModelError."""
    from h2o_flexgen.models.hf.record import spec_of
    from h2o_flexgen.models.hf.rows import spec_of_rows

    config = json.loads(config_of(json.loads(spec.config)).to_json_string())
    name = f"a short {spec.name}"
    made = spec_of_rows(config, name, spec.alone) if spec.alone else spec_of(config, name)
    # Products of a few rows that follow each other take another time than alone: a short model is packed as well.
    kind = spec.packed_kind or {}
    bits, group = int(kind.get("bits") or 0), int(kind.get("group") or 0)
    usual = [groupwise(each, group) for each in (4, 8)] if group else []
    own = usual and all(packing in usual for _, packing in spec.packings)
    return made.with_bits(bits, group) if own else made


def _natives(spec: ModelSpec, dtype: str) -> Iterator[ModelSpec]:
    """`spec` with few layers, and with tiny ones."""
    short = replace(
        spec,
        name="short",
        num_layers=_enough_layers(spec, dtype),
        max_positions=max(spec.max_positions, _PROMPT + MOST_STEPS),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    yield short
    bridged = spec.embed_dim != spec.hidden_size
    yield replace(
        short,
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        ffn_size=_WIDTH,
        num_heads=1,
        num_kv_heads=1,
        embed_dim=_WIDTH // 2 if bridged else _WIDTH,
    )


class _Timed(NamedTuple):
    """Seconds that a tick took, and those that are known of it."""

    lasted: float
    known: float


@dataclass(frozen=True)
class ShortRun:
    """A short model of random weights on one device, and a plan that keeps everything there."""

    plan: Plan
    loaded: Loaded
    decoder: Decoder

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return self.plan.request.spec.units

    def block(
        self, rows: int, steps: int, trace: Trace, on_step: Callable[[int], None] = lambda tokens: None
    ) -> BlockTotals:
        """One block of `rows` rows through so many steps; `on_step` is called when each starts."""
        request, totals = self.plan.request, BlockTotals()
        spec, policy = request.spec, make_policy(request.eviction)
        runner = BlockRunner(self.decoder, self.loaded.stages, policy, Sampler(), trace, on_tokens=on_step)
        sequences = greedy_sequences(spec, request.eviction, rows, (request.workload.prompt_len, steps))
        for _ in runner.run(self.plan, [sequences], totals):
            pass
        return totals

    def ticks(self, rows: int, steps: int) -> Iterator[tuple[UnitSpec, int, float]]:
        """(unit, step, seconds to the next tick) of one block of `rows` rows, the last tick left out. Experts belong to
        the tick that chose them."""
        trace, units = Trace(enabled=True), {unit.name: unit for unit in self.units}
        self.block(rows, steps, trace)
        computed = [row for row in trace.timeline().rows if row.resource == "compute" and " expert" not in row.task]
        for row, following in pairwise(computed):
            name, _, step, *_ = row.task.split()
            yield units[name], int(step), following.start - row.start

    def priced(self, rates: ComputeRates, rows: int) -> Callable[[UnitSpec, int], float]:
        """Seconds of the tick of a unit in a step of a block of `rows` rows, as far as `rates` know them."""
        plan = self.plan
        request, tier = plan.request, plan.request.compute_tier
        profile = HardwareProfile("being measured", "", request.dtype, {}, {tier: rates})
        compute = CostModel(replace(request, profile=profile), plan.policy, plan.placement, (rows,)).compute

        def known(unit: UnitSpec, step: int) -> float:
            experts = sum(compute.chosen_experts(step, unit).values())
            return compute.seconds(Task(TaskKind.COMPUTE, step, unit.index, 0)) + experts

        return known


@contextmanager
def _short_run(bench: Bench, spec: ModelSpec | None = None) -> Iterator[ShortRun]:
    """`spec`: that of the bench where none is given."""
    dtype = str(bench.dtype).removeprefix("torch.")
    plan = short_plan(spec or bench.spec, dtype, bench.name, min(_MOST_BYTES, bench.room() // 4))
    short = plan.request.spec
    source: WeightSource = DummySource(replace(short, packings=()), dtype)
    if short.packings:
        source = QuantisingSource(source, short)
    with closing(load(plan, source, EngineConfig(), [bench.device], "", _ignore, _ignore)) as loaded:
        yield ShortRun(plan, loaded, decoder_of(short, source, dtype, bench.device))


@torch.inference_mode()
def unexplained_ticks(
    bench: Bench, rates: ComputeRates, seconds: float, spec: ModelSpec | None = None
) -> dict[str, Curve]:
    """Seconds of decode ticks, from the start of one to that of the next, beyond what `rates` say, over their rows.

    By the kind of the unit. The first run of all, which warms up, is left out. `spec`: of the model, where it is not
    that of the bench.
    """
    clock = bench.timer.clock
    with _short_run(bench, spec) as run:

        def take(rows: int, seconds: float) -> dict[str, list[_Timed]]:
            known, begun = run.priced(rates, rows), clock()
            steps = int(seconds / sum(known(unit, 1) for unit in run.units))
            there = {unit.kind for unit in run.units}  # not all where layers have one half
            taken = {kind: [] if kind in there else [_Timed(_LEAST, 0.0)] for kind in UNIT_KINDS}
            while not taken["head"] or clock() - begun < seconds:
                for unit, step, lasted in run.ticks(rows, min(MOST_STEPS, max(_LEAST_STEPS, steps))):
                    if step >= _WARM:
                        taken[unit.kind].append(_Timed(lasted, known(unit, step)))
            return taken

        list(run.ticks(1, _LEAST_STEPS))
        return _beyond(bench, "ticks", seconds, take)


@torch.inference_mode()
def recorded_ticks(bench: Bench, rates: ComputeRates, seconds: float) -> Curve | None:
    """Seconds of a tick of a decode step recorded as a CUDA graph, less the prediction of `rates`, which know no ticks.

    Over its rows. A step is launched as a whole: its seconds beyond the prediction are divided evenly by its ticks, the
    choice of tokens included. None where steps are not recorded: on a CPU, without Triton, or where recording failed.
    """
    clock = bench.timer.clock
    with _short_run(bench) as run:
        ticks = len(run.units)

        def take(rows: int, seconds: float) -> dict[str, list[_Timed]]:
            """Of steps that are launched as a whole; none where steps are not."""
            price, start = run.priced(rates, rows), clock()
            known = sum(price(unit, FIRST_REPLAYED) for unit in run.units) / ticks
            taken, begun = list[_Timed](), list[float]()
            while not taken or clock() - start < seconds:
                begun.clear()
                totals = run.block(rows, MOST_STEPS, Trace(), lambda tokens: begun.append(clock()))
                if totals.graph_launches < MOST_STEPS - FIRST_REPLAYED:
                    return {}
                # Every step ends with a look at its tokens, so that the device is through with it when the next begins.
                steps = [(later - earlier) / ticks for earlier, later in pairwise(begun)]
                taken += [_Timed(step, known) for step in steps[FIRST_REPLAYED:]]
            return {"step": taken}

        return _beyond(bench, "recorded steps", seconds, take).get("step")


@torch.inference_mode()
def prompt_ticks(bench: Bench, rates: ComputeRates, seconds: float, spec: ModuleSpec) -> dict[str, Curve]:
    """Seconds per prompt of the ticks of a step of prompts, less the prediction of `rates`, which know no ticks.

    A curve over a prompt's tokens for each kind of unit, of transformers' modules; as long prompts as there is time
    for. The work that mixers do prompt by prompt is included.
    """
    beyond: dict[str, list[tuple[float, float]]] = {kind: [] for kind in UNIT_KINDS}
    clock, last = bench.timer.clock, 0.0
    with _short_run(bench, spec) as run:
        begun = clock()
        for length in PROMPTS:
            fits = length + _PROMPT_STEPS <= run.plan.request.spec.max_positions
            if beyond["attn"] and (not fits or 4 * last > seconds - (clock() - begun)):
                break
            long, start = replace(run, plan=with_prompts(run.plan, length)), clock()
            known, taken = long.priced(rates, _PROMPTS), list[dict[str, float]]()
            while len(taken) < 2 or (len(taken) < MOST_SAMPLES and clock() - start < seconds / len(PROMPTS)):
                sums = dict.fromkeys(UNIT_KINDS, 0.0)
                for unit, step, lasted in long.ticks(_PROMPTS, _PROMPT_STEPS):
                    sums[unit.kind] += 0.0 if step else lasted - known(unit, 0)
                taken.append(sums)
            last = (clock() - start) / len(taken)
            counts = Counter[str](unit.kind for unit in run.units)
            for kind, points in beyond.items():
                each = statistics.median(sums[kind] for sums in taken) / (counts[kind] or 1) / _PROMPTS
                points.append((length, max(_LEAST, each)))
    return {kind: Curve(tuple(points)) for kind, points in beyond.items()}


def _beyond(
    bench: Bench, figure: str, seconds: float, take: Callable[[int, float], dict[str, list[_Timed]]]
) -> dict[str, Curve]:
    """Seconds of ticks beyond their known parts, over the rows, by kind; empty where `take` gives no ticks.

    `take(rows, seconds)` gives ticks by their kind.
    """
    budget = bench.timer.budget(seconds, dict.fromkeys(ROWS, 1.0))
    beyond: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for rows in ROWS:
        taken = bench.timer.repeats.steadiest(partial(take, rows, budget.take(rows)), _spread)
        if not taken:
            return {}
        for kind, ticks in taken.items():
            bench.spreads.note(f"{bench.name} {figure}", _sample(ticks))
            # The mean: a run pays for rare delays as well.
            beyond[kind].append((rows, max(_LEAST, statistics.fmean(tick.lasted - tick.known for tick in ticks))))
    return {kind: Curve(tuple(points)) for kind, points in beyond.items()}


def _sample(ticks: list[_Timed]) -> Sample:
    return sample_of([tick.lasted for tick in ticks])


def _spread(taken: dict[str, list[_Timed]]) -> float:
    """Of the typical kind."""
    return statistics.median(_sample(ticks).spread for ticks in taken.values()) if taken else 0.0


def _ignore(*_: object) -> None:
    """Ignores the copies and the progress of loading: there is little to load."""
