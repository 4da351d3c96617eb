"""The price of every task of a plan, and the named terms that it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

from h2o_flexgen.cost.case import Case
from h2o_flexgen.cost.compute import Compute
from h2o_flexgen.cost.moves import Moves, Transfer
from h2o_flexgen.schedule.host_attention import HOST_ATTENTION
from h2o_flexgen.schedule.tasks import Task, TaskKind
from h2o_flexgen.units import format_bytes, format_seconds

Phase = Literal["prefill", "decode"]


class Term(NamedTuple):
    """What one pass over the model costs one resource, "compute", a link or the host, by what it is spent on."""

    phase: Phase
    resource: str
    name: str
    unit: Literal["s", "B"]
    value: float

    def __str__(self) -> str:
        shown = format_bytes(self.value) if self.unit == "B" else format_seconds(self.value)
        return f"{self.phase} {self.resource}: {self.name}: {shown}"


class Price(NamedTuple):
    """What a task takes while nothing else is busy.

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


class CostModel(Case):
    """Prices every task of one block under one plan, as the engine would run it.

    Peak memory is not here: `schedule.footprint` has it.
    """

    @cached_property
    def compute(self) -> Compute:
        """The prices of compute ticks by what they are spent on."""
        return Compute(self)

    @cached_property
    def moves(self) -> Moves:
        """The bytes of loads and stores."""
        return Moves(self)

    def price(self, task: Task, step: int | None = None) -> Price:
        """Of one task, in `step` where one is given; worked out once for all that cost the same."""
        key = (task.kind, task.step if step is None else step, *self.twins[task.unit, task.batch])
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self._priced(Task(*key))
        return found

    @cached_property
    def _prices(self) -> dict[tuple[TaskKind, int, int, int], Price]:
        return {}

    def _priced(self, task: Task) -> Price:
        transfers, compute = self.moves.transfers(task), self.compute
        if task.kind is not TaskKind.COMPUTE:
            return Price(compute.issue_seconds(task), transfers)
        return Price(compute.seconds(task), transfers, compute.host_seconds(task), compute.finish_seconds(task))

    def terms(self) -> tuple[Term, ...]:
        """Of the prompt's pass, and of a decode step in the middle; bytes of decode are the average of its steps."""
        middle = max(1, self.steps // 2)
        phases: list[tuple[Phase, int]] = [("prefill", 0), ("decode", middle)]
        return tuple(
            term
            for phase, step in phases[: 1 if self.steps == 1 else 2]
            for term in (*self._compute_terms(phase, step), *self._link_terms(phase))
        )

    def _compute_terms(self, phase: Phase, step: int) -> Iterator[Term]:
        totals: dict[tuple[str, str], float] = {}
        host = 0.0
        for (unit, batch), alike in self.alike.items():
            task = Task(TaskKind.COMPUTE, step, unit, batch)
            host += alike * self.price(task).host
            for part, seconds in self.compute.parts(task).items():
                place = self.spec.units[unit].kind, part
                totals[place] = totals.get(place, 0.0) + alike * seconds
        for (kind, part), seconds in totals.items():
            if seconds:
                yield Term(phase, "compute", f"{kind}: {self._described(part, phase, step)}", "s", seconds)
        if host:
            what = self._described("attention", phase, step) if phase == "decode" else "filling caches"
            yield Term(phase, HOST_ATTENTION, f"attn: {what}", "s", host)

    def _described(self, part: str, phase: str, step: int) -> str:
        rows = max(self.rows)
        if part == "attention" and phase == "decode":
            slots = max(self.held(layer, step) for layer in range(self.spec.num_layers))
            return f"attention of {rows} rows over {slots} tokens"
        if part == "products":
            tokens = rows if phase == "decode" else min(self.policy.chunk, rows * self.workload.prompt_len)
            return f"products of {tokens} rows"
        return part

    def _link_terms(self, phase: Phase) -> Iterator[Term]:
        steps = range(1) if phase == "prefill" else range(1, self.steps)
        for (link, what), traffic in self.moves.traffic(steps).items():
            yield Term(phase, link, what, "B", traffic.nbytes / len(steps))
            yield Term(phase, link, what, "s", traffic.seconds / len(steps))
