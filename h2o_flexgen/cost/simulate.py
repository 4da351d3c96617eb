"""How long a plan takes: its real schedule on the clock of a hardware profile.

The prompt's pass is simulated, and decode steps until they repeat; the others take as long as those. A step differs
from the one before it only by what grows (attention on a GPU reads the slots in use) and by caches on another tier,
which are written home every REWRITE_EVERY steps and collect new tokens in between: see `_SampledSteps`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.config.reports.record import RATES, Throughput
from h2o_flexgen.cost.executor import SimulatedExecutor, Span
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.schedule.footprint import REWRITE_EVERY
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED, Task, TaskKind
from h2o_flexgen.schedule.timeline import Row, Timeline
from h2o_flexgen.schedule.zigzag import zigzag


class Bound(NamedTuple):
    """The resource that was busy longest, for how long, and the phase in which most time went."""

    phase: str
    resource: str
    seconds: float


@dataclass(frozen=True)
class _Expected(Throughput):
    """Expected times and bytes, named as in a RunRecord. busy: seconds by resource, "compute" or link."""

    sequences: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    decode_s: float
    busy: Mapping[str, float]
    bytes_moved: Mapping[str, int]

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def bound(self) -> Bound:
        resource = max(self.busy, key=lambda name: self.busy[name])
        return Bound("prefill" if self.prefill_s >= self.decode_s else "decode", resource, self.busy[resource])


@dataclass(frozen=True)
class Simulation(_Expected):
    """One block, simulated. Seconds and bytes are of all its steps, those included that were extrapolated.

    steps: which steps were simulated; `timeline` shows them one after the other.
    """

    steps: tuple[int, ...]
    model: CostModel = field(repr=False)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Each resource's work over time. Simulated anew: a search never asks, and would keep that of all plans."""
        return tuple(_executed(self.model, self.steps, trace=True).clock.spans)

    @property
    def timeline(self) -> Timeline:
        """The same as rows, as a trace of the engine has them."""
        return Timeline(tuple(Row(self._label(task), start, end, where) for task, start, end, where in self.spans))

    def _label(self, task: Task) -> str:
        unit = self.model.spec.units[task.unit]
        step = self.steps[task.step] if task.step < len(self.steps) else task.step
        if task.kind is TaskKind.COMPUTE:
            experts = f" expert {', '.join(map(str, task.experts))}" if task.experts else f" batch {task.batch}"
            return f"{unit.name} step {step}{experts}"
        if task.kind is TaskKind.LOAD_WEIGHTS:
            return f"{task.kind} {unit.weights} step {step}"
        return f"{task.kind} {unit.name} step {step} batch {task.batch}"


def simulate(model: CostModel, steps: int | None = None) -> Simulation:
    """The block of `model`, from few of its steps.

    steps: simulate so many of its first and let the last of them stand for all later; None: see `_sample`.
    """
    sample = _sample(model) if steps is None else _all_of(min(max(steps, 2), model.steps) - 1)
    run = _executed(model, sample.steps, trace=False)
    weights = sample.weights(model.steps)
    times = [weights[step] for step in sample.steps]
    ends, busy_by, moved_by = zip(*run.ends, strict=True)
    prefill = ends[0]
    decode = _added([{"": end} for end in ends], times)[""] - prefill
    busy = _added(busy_by, times)
    _for_all_bytes(busy, _added(moved_by, times), model)
    return Simulation(
        sequences=model.sequences,
        prompt_tokens=model.sequences * model.request.workload.prompt_len,
        generated_tokens=model.sequences * model.steps,
        prefill_s=prefill,
        decode_s=decode,
        busy=busy,
        bytes_moved=dict(model.moves.bytes_moved()),
        steps=sample.steps,
        model=model,
    )


def _executed(model: CostModel, steps: tuple[int, ...], *, trace: bool) -> SimulatedExecutor:
    """The first steps of the schedule, with the prices of `steps`; the last step of all reads no weights ahead."""
    run = SimulatedExecutor(model, steps, trace=trace)
    ends = bool(model.shape.streamed) and steps[-1] == model.steps - 1

    def chosen(step: int, unit: UnitSpec) -> list[int]:
        return model.chosen(steps[min(step, len(steps) - 1)], unit)

    def ahead(step: int, unit: UnitSpec) -> bool:
        return model.reads_ahead(steps[min(step, len(steps) - 1)], unit)

    ticks = zigzag(model.shape, last=lambda step: ends and step == len(steps) - 1, chosen=chosen, ahead=ahead)
    run.run(takewhile(lambda tick: tick.compute is None or tick.compute.step < len(steps), ticks))
    return run


def _added(by: Sequence[Mapping[str, float]], times: Sequence[float]) -> dict[str, float]:
    """The sum of all steps, of which those that were simulated left `by` their end; each stands for `times`."""
    total, before = defaultdict[str, float](float), dict[str, float]()
    for now, each in zip(by, times, strict=True):
        for name, seconds in now.items():
            total[name] += each * (seconds - before.get(name, 0.0))
        before = dict(now)
    return dict(total)


def _for_all_bytes(busy: dict[str, float], moved: Mapping[str, float], model: CostModel) -> None:
    """Makes `busy` of links what all their bytes take, not what the steps that were simulated had `moved`.

    While reads ahead fill the buffers, or empty them, a step reads more or less than it uses.
    """
    alone = defaultdict[str, float](float)
    for (link, _), traffic in model.moves.traffic(range(model.steps)).items():
        alone[link] += traffic.seconds
    for link, seconds in alone.items():
        if moved.get(link):
            busy[link] *= seconds / moved[link]


class _SampledSteps(NamedTuple):
    """The steps that are simulated, and how the others follow from them.

    opening: the first decode steps, which stand for themselves. typical: later ones without a rewrite; the steps
    between them are interpolated. rewrite: one in which caches are written home and those that feel it; they stand for
    all of their kind. closing: the last of all, which reads nothing ahead and stands for itself; none where no weights
    are read.
    """

    opening: tuple[int, ...]
    typical: tuple[int, ...]
    rewrite: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({0, *self.opening, *self.typical, *self.rewrite, *self.closing}))

    def weights(self, steps: int) -> dict[int, float]:
        """How many of all `steps` each simulated one stands for."""
        weights = dict.fromkeys(self.steps, 0.0)
        for step in (0, *self.opening, *self.closing):
            weights[step] += 1
        steps -= len(self.closing)
        first = len(self.opening) + 1
        if len(self.typical) == 1:
            weights[self.typical[0]] += steps - first
        else:
            for step in range(first, steps):
                self._add(weights, step, 1.0)
        rewrites = len(range(REWRITE_EVERY, steps - 1 + len(self.closing), REWRITE_EVERY))
        for step in self.rewrite:
            weights[step] += rewrites
            self._add(weights, step, -rewrites)
        return weights

    def _add(self, weights: dict[int, float], step: int, times: float) -> None:
        """`times` the interpolation at `step`."""
        points = self.typical
        at = bisect_left(points, step)
        if at in (0, len(points)):
            weights[points[min(at, len(points) - 1)]] += times
            return
        low, high = points[at - 1], points[at]
        weights[high] += times * (step - low) / (high - low)
        weights[low] += times * (high - step) / (high - low)


def _all_of(last: int) -> _SampledSteps:
    return _SampledSteps(tuple(range(1, last)), (last,) if last else ())


def _sample(model: CostModel) -> _SampledSteps:
    """Few steps from which all follow: the first decode step, which may find buffers that were filled while the prompt
    was computed, and a typical one. With growing attention there are three of these, from early to late.

    Caches that move are written home after the prompt and at rewrites, and reads wait for that: one step is held up,
    and in the next the link is ahead with what it read meanwhile. A typical step then has half as many new tokens to
    apply as there can be. Where steps are recorded, those before the first that is only launched stand for themselves,
    as do those in which reads of several units ahead get into their rhythm, and the last of all where weights are read.
    """
    last, moves = model.steps - 1, bool(model.shape.cache_moves)
    alone = FIRST_REPLAYED - 1 if model.recorded else 2 if moves else 1
    if model.shape.streamed and model.policy.lookahead > 1:
        alone = max(alone, model.policy.lookahead + 1)
    if last <= max(5 if moves else 0, alone + 2):
        return _all_of(last)
    closing = (last,) if model.shape.streamed else ()
    end = last - len(closing)
    usual = REWRITE_EVERY // 2 if moves else alone + 1
    typical = {min(usual, end)}
    if model.compute_tier == "gpu" and any(model.held(layer, 1) < model.held(layer, last) for layer in model.kinds):
        every = REWRITE_EVERY if moves else 1
        typical |= {step - (step - usual) % every for step in (last // 2, end) if step > usual}
    rewrite = range(REWRITE_EVERY, min(REWRITE_EVERY + 2, end) + 1) if moves and last > REWRITE_EVERY else ()
    return _SampledSteps(tuple(range(1, alone + 1)), tuple(sorted(typical)), tuple(rewrite), closing)


@dataclass(frozen=True)
class Prediction(_Expected):
    """The prediction for the whole workload. block: the first one, which is as large as any."""

    blocks: int
    block: Simulation = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The `predicted` object of a RunRecord: seconds, bytes, tokens per second."""
        return {
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            **{name: getattr(self, name) for name in RATES},
            "busy": dict(self.busy),
            "bytes_moved": dict(self.bytes_moved),
            "bound": self.bound._asdict(),
            "blocks": self.blocks,
        }


def predict(model: CostModel) -> Prediction:
    """All blocks of the workload under the plan of `model`, whatever block that is of."""
    first, *others = model.blocks
    # Where new memory costs nothing, a later block is like the first.
    priced = any(rates.fresh_bytes_per_s is not None for rates in model.machine.compute.values())
    shapes = Counter([(first, model.later), *((rows, model.later or priced) for rows in others)])
    simulated = [(simulate(replace(model, batches=b, later=late)), count) for (b, late), count in shapes.items()]
    busy, moved = defaultdict[str, float](float), Counter[str]()
    for block, count in simulated:
        for resource, seconds in block.busy.items():
            busy[resource] += count * seconds
        for link, nbytes in block.bytes_moved.items():
            moved[link] += count * nbytes
    prefill = sum(count * block.prefill_s for block, count in simulated)
    decode = sum(count * block.decode_s for block, count in simulated)
    sequences = model.call_sequences
    return Prediction(
        sequences=sequences,
        prompt_tokens=sequences * model.request.workload.prompt_len,
        generated_tokens=sequences * model.steps,
        prefill_s=prefill,
        decode_s=decode,
        busy=dict(busy),
        bytes_moved=dict(moved),
        blocks=sum(shapes.values()),
        block=simulated[0][0],
    )
