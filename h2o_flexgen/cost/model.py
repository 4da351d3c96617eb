"""The price of every task of a plan, and the named terms that it is made of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Literal, NamedTuple

from h2o_flexgen.cost.compute import Compute
from h2o_flexgen.cost.inputs import CostInputs, Moves, Transfer
from h2o_flexgen.schedule.footprint import REWRITE_EVERY
from h2o_flexgen.schedule.tasks import Task, TaskKind
from h2o_flexgen.schedule.workspace import HOST_ATTENTION
from h2o_flexgen.units import format_bytes, format_seconds


class Term(NamedTuple):
    """Seconds that a pass over the model costs one resource, "compute", a link or the host, by what they are for."""

    phase: str
    resource: str
    name: str
    unit: Literal["s", "B"]
    value: float

    def __str__(self) -> str:
        shown = format_bytes(self.value) if self.unit == "B" else format_seconds(self.value)
        return f"{self.phase} {self.resource}: {self.name}: {shown}"


class Price(NamedTuple):
    """The price of a task while nothing else is busy.

    seconds    of the computing thread: of a compute all that it does, the state that arrived included; else what it
               copies aside, before the transfers of a store start or weights that are still needed are freed
    transfers  what a load or store moves over which links, one after the other; of a compute what goes to the host that
               attends or fills, and what comes back; the engine's bytes
    host       what the host does for a compute while the computing thread goes on
    finish     of `seconds` what comes after the host's attention
    """

    seconds: float
    transfers: tuple[Transfer, ...] = ()
    host: float = 0.0
    finish: float = 0.0


class CostModel(CostInputs):
    """Prices every task of one block under one plan, as the engine would run it.

    Peak memory is not here: `schedule.footprint` has it.
    """

    @cached_property
    def compute(self) -> Compute:
        """The prices of compute ticks by what they are spent on."""
        return Compute(self, self.moves)

    @cached_property
    def moves(self) -> Moves:
        return Moves(self)

    def price(self, task: Task, step: int | None = None) -> Price:
        """The price of a task, in `step` where one is given; computed once for all tasks that cost the same."""
        at = task.step if step is None else step
        if task.experts:
            return self._price_of_experts(task, at)
        key = (task.kind, at, *self.first_alike[task.unit, task.batch])
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._priced(Task(*key))
        return found

    @cached_property
    def _prices(self) -> dict[tuple[object, ...], Price]:
        return {}

    def _price_of_experts(self, task: Task, step: int) -> Price:
        """Experts of a layer are alike, and so are the layers but for the last one's prompts."""
        last = self.spec.units[task.unit].layer == self.spec.num_layers - 1
        tier = "" if task.kind is TaskKind.COMPUTE else self.placement.weights[self.moves.key(task)]
        key = (task.kind, step, last, tier, len(task.experts))
        if key not in self._prices:
            self._prices[key] = self._priced(replace(task, step=step))
        return self._prices[key]

    def _priced(self, task: Task) -> Price:
        transfers, compute = self.moves.transfers(task), self.compute
        if task.kind is not TaskKind.COMPUTE:
            return Price(compute.issue_seconds(task), transfers)
        if task.experts:
            return Price(compute.seconds(task))
        return Price(compute.seconds(task), transfers, compute.host_seconds(task), compute.finish_seconds(task))

    def terms(self) -> tuple[Term, ...]:
        """The terms of the prompt's pass, and of a middle decode step with the average bytes of all decode steps."""
        middle = max(1, self.steps // 2)
        phases = [("prefill", 0), ("decode", middle)]
        return tuple(
            term
            for phase, step in phases[: 1 if self.steps == 1 else 2]
            for term in (*self._compute_terms(phase, step), *self._link_terms(phase))
        )

    def _compute_terms(self, phase: str, step: int) -> Iterator[Term]:
        totals: dict[tuple[str, str], float] = {}
        host = 0.0
        for (unit, batch), alike in self.alike.items():
            task = Task(TaskKind.COMPUTE, step, unit, batch)
            host += alike * self.price(task).host
            # Of the experts every GPU batch's equal share.
            shared = self.compute.chosen_experts(step, self.spec.units[unit])
            experts = [(part, seconds / len(self.batches)) for part, seconds in shared.items()]
            for part, seconds in (*self.compute.parts(task).items(), *experts):
                place = self.spec.units[unit].kind, part
                totals[place] = totals.get(place, 0.0) + alike * seconds
        for (kind, part), seconds in totals.items():
            if seconds:
                yield Term(phase, "compute", f"{kind}: {self._described(part, phase, step)}", "s", seconds)
        if host:
            what = self._described("attention", phase, step) if phase == "decode" else "filling caches"
            yield Term(phase, HOST_ATTENTION, f"attn: {what}", "s", host)

    def _described(self, part: str, phase: str, step: int) -> str:
        rows = max(self.batches)
        if part == "attention" and phase == "decode":
            slots = max(self.held(layer, step) for layer in range(self.spec.num_layers))
            return f"attention of {rows} rows over {slots} tokens"
        if part == "products":
            tokens = rows if phase == "decode" else min(self.policy.chunk, rows * self.prompt)
            return f"products of {tokens} rows"
        return part

    def _link_terms(self, phase: str) -> Iterator[Term]:
        steps = range(1) if phase == "prefill" else range(1, self.steps)
        for (link, what), traffic in self.moves.traffic(steps).items():
            yield Term(phase, link, what, "B", traffic.nbytes / len(steps))
            yield Term(phase, link, what, "s", traffic.seconds / len(steps))


class BatchPrices:
    """The prices of a block whose GPU batches and units are all treated alike: of its last GPU batch.

    Beside "compute" and the links there is a resource for what nothing can hide: a cache or hidden state is asked for
    one tick ahead, so that what takes longer than the tick before its own is waited for.
    """

    def __init__(self, model: CostModel, others: Iterable[CostModel]) -> None:
        """`others`: the same block with other placements, one of which the tick before may belong to. `model` may have
        fewer GPU batches than the block that is asked for."""
        self._model, self._others = model, list(others)
        self._batch = len(model.batches) - 1
        self._units = Counter(model.first_alike[unit.index, self._batch][0] for unit in model.spec.units)

    def seconds(self, passes: range, sequences: int) -> dict[str, float]:
        """Seconds by resource of one of `passes`, without weights: compute in the middle one, links on average.

        sequences: of the block; a GPU batch has its share of what their experts take.
        """
        step = passes[len(passes) // 2]
        found, waiting, computing = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
        for unit, count in self._units.items():
            computing += count * (self._computing(unit, step) + self._experts(unit, step, sequences))
            task = Task(TaskKind.COMPUTE, step, unit, self._batch)
            price = self._model.price(task)
            found[HOST_ATTENTION] += count * price.host
            for link, _, seconds in price.transfers:
                found[link] += count * seconds
            for task, times in self._moves(unit, step, passes):
                transfers = self._model.price(task).transfers
                for link, _, seconds in transfers:
                    found[link] += count * times * seconds
                late = sum(seconds for _, _, seconds in transfers) - self._before(unit, step)
                if task.kind in (TaskKind.LOAD_CACHE, TaskKind.LOAD_HIDDEN) and late > 0:
                    waiting[task.kind] += count * times * late
        found["compute"] = computing
        if not found[HOST_ATTENTION]:
            del found[HOST_ATTENTION]
        waited = ((TaskKind.LOAD_CACHE, "caches"), (TaskKind.LOAD_HIDDEN, "hidden states"))
        for kind, what in waited if self._model.policy.overlap else ():
            found[f"compute and waiting for {what}"] = computing + waiting[kind]
        return dict(found)

    def half_seconds(self, kind: str, passes: range, sequences: int) -> float:
        """The longest that the attention or MLP half of a layer computes for this GPU batch, wherever its cache is, its
        share of experts in a block of `sequences` included."""
        units = {unit.products: unit.index for unit in self._model.spec.units if unit.kind == kind}
        step = passes[len(passes) // 2]
        tasks = (Task(TaskKind.COMPUTE, step, unit, self._batch) for unit in units.values())
        return max(self._longest(task) + self._experts(task.unit, step, sequences) for task in tasks)

    def _computing(self, unit: int, step: int) -> float:
        """The computing thread's seconds for one tick and its stores."""
        model, batch = self._model, self._batch
        seconds = model.price(Task(TaskKind.COMPUTE, step, unit, batch)).seconds
        if self._parked(unit + 1):
            seconds += model.price(Task(TaskKind.STORE_HIDDEN, step, unit, batch)).seconds
        if self._moving(unit):
            between = step + (step > 0 and step % REWRITE_EVERY == 0)  # fifteen of sixteen steps are no rewrites
            seconds += model.price(Task(TaskKind.STORE_CACHE, between, unit, batch)).seconds
        return seconds

    def _experts(self, unit: int, step: int, sequences: int) -> float:
        """This GPU batch's share of the experts of a unit."""
        model = self._model
        parts = model.compute.chosen_experts(step, model.spec.units[unit], sequences)
        return sum(parts.values()) * model.batches[self._batch] / sequences

    def _moves(self, unit: int, step: int, passes: range) -> Iterator[tuple[Task, float]]:
        """Loads and stores of a unit's state in an average pass, and how often."""
        batch, last = self._batch, self._model.steps - 1
        if self._moving(unit):
            if step > 0:
                yield Task(TaskKind.LOAD_CACHE, step, unit, batch), 1.0
            stores = sum(each % REWRITE_EVERY == 0 and each < last for each in passes)
            yield Task(TaskKind.STORE_CACHE, 0, unit, batch), stores / len(passes)
            if self._model.kept_bytes(self._model.spec.units[unit].layer or 0, batch):
                between = sum(each % REWRITE_EVERY != 0 and each < last for each in passes)  # states alone
                yield Task(TaskKind.STORE_CACHE, 1, unit, batch), between / len(passes)
        if self._parked(unit):
            yield Task(TaskKind.LOAD_HIDDEN, step, unit, batch), 1.0
        if self._parked(unit + 1):
            yield Task(TaskKind.STORE_HIDDEN, step, unit, batch), 1.0

    def _moving(self, unit: int) -> bool:
        spec = self._model.spec.units[unit]
        return spec.kind == "attn" and (spec.layer, self._batch) in self._model.shape.cache_moves

    def _parked(self, unit: int) -> bool:
        """Whether hidden states come to `unit` from another tier."""
        return 0 < unit < len(self._model.spec.units) and self._batch in self._model.shape.hidden_moves

    def _before(self, unit: int, step: int) -> float:
        """The longest that the tick before one of `unit` can take: of another GPU batch, or of the unit before."""
        return self._longest(Task(TaskKind.COMPUTE, step, unit if self._batch > 0 else unit - 1, self._batch))

    def _longest(self, task: Task) -> float:
        return max(model.price(task).seconds for model in self._others)
