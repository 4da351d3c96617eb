"""What a tick takes where decode steps are recorded as CUDA graphs: the short model of `ticks`, by whole steps."""

from __future__ import annotations

import statistics
from functools import partial
from itertools import pairwise

import torch

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.ticks import LEAST, MOST_STEPS, ROWS, priced, run_block, short_run
from h2o_flexgen.calibration.timing import Clock, sample_of
from h2o_flexgen.config.hardware.rates import ComputeRates, Curve
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.state.loader import Loaded
from h2o_flexgen.schedule.recorded import FIRST_REPLAYED
from h2o_flexgen.schedule.tasks import Task, TaskKind


@torch.inference_mode()
def recorded_ticks(bench: Bench, rates: ComputeRates, seconds: float) -> Curve | None:
    """Seconds of a tick of a recorded decode step beyond what `rates`, which know of no ticks, say, over its rows.

    A step is launched as a whole: what it takes beyond is divided evenly by its ticks, the choice of tokens included.
    None where steps are not recorded: on a CPU, without Triton, or where recording failed.
    """
    beyond: list[tuple[float, float]] = []
    with short_run(bench) as (plan, loaded):
        units = plan.request.spec.units
        budget = bench.timer.budget(seconds, dict.fromkeys(map(str, ROWS), 1.0))
        for rows in ROWS:
            take = partial(_replayed, plan, loaded, rows, budget.take(str(rows)), bench.timer.clock)
            steps = bench.timer.repeats.steadiest(take, lambda taken: sample_of(taken).spread if taken else 0.0)
            if not steps:
                return None
            bench.spreads.note(f"{bench.name} recorded steps", sample_of(steps))
            compute = priced(plan, rates, rows)
            known = sum(compute.seconds(Task(TaskKind.COMPUTE, FIRST_REPLAYED, unit.index, 0)) for unit in units)
            beyond.append((rows, max(LEAST, (statistics.fmean(steps) - known) / len(units))))
    return Curve(tuple(beyond))


def _replayed(plan: Plan, loaded: Loaded, rows: int, seconds: float, clock: Clock) -> list[float]:
    """Seconds of steps that were launched as a whole, of blocks of `rows` rows one after the other for about `seconds`;
    none where steps are not."""
    taken: list[float] = []
    start = clock()
    while not taken or clock() - start < seconds:
        begun: list[float] = []
        totals = run_block(plan, loaded, rows, MOST_STEPS, Trace(), partial(_note, begun, clock))
        if totals.graph_launches < MOST_STEPS - FIRST_REPLAYED:
            return []
        # Every step ends with a look at its tokens, so that the device is through with it when the next one begins.
        taken += [later - earlier for earlier, later in pairwise(begun)][FIRST_REPLAYED:]
    return taken


def _note(begun: list[float], clock: Clock, tokens: int) -> None:
    begun.append(clock())
