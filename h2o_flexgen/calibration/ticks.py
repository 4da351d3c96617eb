"""What the other figures leave unexplained of a tick: a short model runs in the engine itself, beside its prediction.

Products one after the other are slower than each alone in a loop, small operations cost more than their bytes, every
task is issued, and now and then the system takes its time: all of that is in here, by the kind of unit and the rows of
the tick. Caches are small ones that evict, as they are where such costs count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import psutil
import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.calibration.bench import Bench, largest_cache
from h2o_flexgen.calibration.sampling import greedy_sequences
from h2o_flexgen.calibration.timing import Clock, sample_of
from h2o_flexgen.checkpoint.dummy import DummySource
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import UNIT_KINDS, ComputeRates, Curve
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.compute import Compute
from h2o_flexgen.cost.terms import CostModel
from h2o_flexgen.engine.execution.block import BlockRunner
from h2o_flexgen.engine.limits.plan import Caps, Plan, PlanRequest, make_plan
from h2o_flexgen.engine.metrics.recorder import BlockTotals
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.engine.state.loader import Loaded, load
from h2o_flexgen.models.decoder import Decoder
from h2o_flexgen.schedule.tasks import Task, TaskKind

ROWS = (1, 8, 32)
_WIDTH, _VOCABULARY = 64, 64
_PROMPT, _BUDGET, MOST_STEPS, _LEAST_STEPS = 33, 32, 48, 6
_WARM = 2  # steps that nothing is taken from, the prompts' included
_TURNS = 3  # times the largest cache of the processor that the short model's layers fill
_LEAST_LAYERS, _MOST_LAYERS = 2, 12
_MOST_BYTES = 2 << 30
LEAST = 1e-7


def short_model(spec: ModelSpec, dtype: str) -> ModelSpec:
    """`spec` with so few layers that they just leave the processor's caches before they come again.

    Where even that takes much memory the widths are tiny, too: what is left unexplained is small beside such layers.
    """
    sizes = {group.key: group.buffer_bytes(dtype) for group in spec.weight_groups}
    layer = sum(nbytes for key, nbytes in sizes.items() if key.startswith("layers.0."))
    layers = min(max(_LEAST_LAYERS, -(-_TURNS * largest_cache() // layer)), _MOST_LAYERS, spec.num_layers)
    short = replace(
        spec,
        name="short",
        num_layers=layers,
        max_positions=max(spec.max_positions, _PROMPT + MOST_STEPS),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    outer = sum(nbytes for key, nbytes in sizes.items() if not key.startswith("layers."))
    if outer + layers * layer <= min(_MOST_BYTES, psutil.virtual_memory().available // 4):
        return short
    bridged = spec.embed_dim != spec.hidden_size
    return replace(
        short,
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        ffn_size=_WIDTH,
        num_heads=1,
        num_kv_heads=1,
        embed_dim=_WIDTH // 2 if bridged else _WIDTH,
    )


@contextmanager
def short_run(bench: Bench) -> Iterator[tuple[Plan, Loaded]]:
    """A short model of random weights on the bench's device, and a plan that keeps everything there."""
    dtype = str(bench.dtype).removeprefix("torch.")
    spec, tier = short_model(bench.spec, dtype), bench.name
    eviction = EvictionConfig("h2o", budget=_BUDGET)
    request = PlanRequest(spec, Workload(_PROMPT, MOST_STEPS), eviction, dtype, Caps(), tier)
    at_home = {tier: 1.0}
    plan = make_plan(request, OffloadPolicy(max(ROWS), weights=at_home, cache=at_home, hidden=at_home))
    source = DummySource(spec, dtype)
    with closing(load(plan, source, EngineConfig(), [bench.device], "", _no_trace, _no_progress)) as loaded:
        yield plan, loaded


@torch.inference_mode()
def unexplained_ticks(bench: Bench, rates: ComputeRates, seconds: float) -> dict[str, Curve]:
    """Seconds of decode ticks, from the start of one to that of the next, beyond what `rates` say, over their rows.

    By the kind of the unit. The first run of all, which warms up, is left out.
    """
    repeats = bench.timer.repeats
    beyond: dict[str, list[tuple[float, float]]] = {kind: [] for kind in UNIT_KINDS}
    with short_run(bench) as (plan, loaded):
        _one_run(plan, loaded, 1, _LEAST_STEPS)
        budget = bench.timer.budget(seconds, dict.fromkeys(map(str, ROWS), 1.0))
        for rows in ROWS:
            compute, share = priced(plan, rates, rows), budget.take(str(rows))
            take = partial(_measured, plan, loaded, compute, rows, share, bench.timer.clock)
            measured = repeats.steadiest(take, _Measured.spread)
            for kind, values in measured.beyond.items():
                bench.spreads.note(f"{bench.name} ticks", sample_of(measured.lasting[kind]))
                # The mean: what a run meets now and then, it pays for.
                beyond[kind].append((rows, max(LEAST, statistics.fmean(values))))
    return {kind: Curve(tuple(points)) for kind, points in beyond.items()}


class _Measured(NamedTuple):
    """Seconds of ticks by the kind of their unit: those beyond what is known, and all of them."""

    beyond: dict[str, list[float]]
    lasting: dict[str, list[float]]

    def spread(self) -> float:
        """Of the typical kind."""
        return statistics.median(sample_of(lasting).spread for lasting in self.lasting.values())


def _measured(plan: Plan, loaded: Loaded, compute: Compute, rows: int, seconds: float, clock: Clock) -> _Measured:
    """Ticks of runs of `rows` rows, one after the other for about `seconds`; steps that warm up are left out."""
    units = plan.request.spec.units
    measured = _Measured({kind: [] for kind in UNIT_KINDS}, {kind: [] for kind in UNIT_KINDS})
    begun, steps = clock(), _steps(plan, compute, seconds)
    while not measured.lasting["attn"] or clock() - begun < seconds:
        for index, step, lasted in _one_run(plan, loaded, rows, steps):
            if step >= _WARM:
                known = compute.seconds(Task(TaskKind.COMPUTE, step, index, 0))
                measured.beyond[units[index].kind].append(lasted - known)
                measured.lasting[units[index].kind].append(lasted)
    return measured


def priced(plan: Plan, rates: ComputeRates, rows: int) -> Compute:
    """The prices of one block of `rows` rows, as far as `rates` know them."""
    request, tier = plan.request, plan.request.compute_tier
    profile = HardwareProfile("being measured", "", request.dtype, {}, {tier: rates})
    return CostModel(
        request.spec,
        request.workload,
        plan.policy,
        request.eviction,
        plan.placement,
        profile,
        request.dtype,
        tier,
        (rows,),
    ).compute


def _steps(plan: Plan, compute: Compute, seconds: float) -> int:
    """As many steps as are expected to take so long, within limits."""
    step = sum(compute.seconds(Task(TaskKind.COMPUTE, 1, unit.index, 0)) for unit in plan.request.spec.units)
    return min(MOST_STEPS, max(_LEAST_STEPS, int(seconds / step)))


def _one_run(plan: Plan, loaded: Loaded, rows: int, steps: int) -> list[tuple[int, int, float]]:
    """(index of the unit, step, seconds) of the ticks of one block of `rows` rows, the last one left out."""
    trace = Trace(enabled=True)
    run_block(plan, loaded, rows, steps, trace)
    return list(_ticks(plan.request.spec, trace))


def run_block(
    plan: Plan,
    loaded: Loaded,
    rows: int,
    steps: int,
    trace: Trace,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> BlockTotals:
    """One block of `rows` rows through so many steps, each of which `on_step` hears of when it starts."""
    request, totals = plan.request, BlockTotals()
    runner = BlockRunner(
        request.spec,
        Decoder(request.spec),
        loaded.stages,
        make_policy(request.eviction),
        Sampler(),
        trace,
        request.dtype,
        on_tokens=on_step,
    )
    sequences = greedy_sequences(request.spec, request.eviction, rows, (_PROMPT, steps))
    for _ in runner.run(plan, [sequences], totals):
        pass
    return totals


def _ticks(spec: ModelSpec, trace: Trace) -> Iterator[tuple[int, int, float]]:
    places = {unit.name: unit.index for unit in spec.units}
    for row, following in pairwise(row for row in trace.timeline().rows if row.resource == "compute"):
        name, _, step, *_ = row.task.split()
        yield places[name], int(step), following.start - row.start


def _no_trace(task: str, start: float, end: float, resource: str) -> None:
    """Nothing moves."""


def _no_progress(what: str, done: int, total: int) -> None:
    """There is next to nothing to load."""
