"""What one GPU batch costs each resource in a pass over the model, summed from the prices of its tasks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from h2o_flexgen.cost.terms import CostModel
from h2o_flexgen.schedule.footprint import REWRITE_EVERY
from h2o_flexgen.schedule.host_attention import HOST_ATTENTION
from h2o_flexgen.schedule.tasks import Task, TaskKind


class BatchPrices:
    """The prices of a block whose GPU batches and units are all treated alike: of its last GPU batch.

    Beside "compute" and the links there is a resource for what nothing can hide: a cache or hidden state is asked for
    one tick ahead, so that what takes longer than the tick before its own is waited for.
    """

    def __init__(self, model: CostModel, others: Iterable[CostModel]) -> None:
        """`others`: the same block with other placements, one of which the tick before may belong to."""
        self._model, self._others = model, list(others)
        self._batch = len(model.rows) - 1
        self._units = Counter(model.twins[unit.index, self._batch][0] for unit in model.spec.units)

    def seconds(self, passes: range) -> dict[str, float]:
        """Of one of `passes`: of computation the one in the middle, of links their average. Weights are not in it."""
        step = passes[len(passes) // 2]
        found, waiting, computing = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
        for unit, count in self._units.items():
            computing += count * self._computing(unit, step)
            self._add_host(found, Task(TaskKind.COMPUTE, step, unit, self._batch), count)
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

    def _add_host(self, found: dict[str, float], task: Task, count: int) -> None:
        """What `count` such computes leave to the host, and the links to it and back."""
        price = self._model.price(task)
        found[HOST_ATTENTION] += count * price.host
        for link, _, seconds in price.transfers:
            found[link] += count * seconds

    def half_seconds(self, kind: str, passes: range) -> float:
        """The longest that the attention or MLP half of a layer computes for this GPU batch, wherever its cache is."""
        unit = next(unit.index for unit in self._model.spec.units if unit.kind == kind)
        return self._longest(Task(TaskKind.COMPUTE, passes[len(passes) // 2], unit, self._batch))

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

    def _moves(self, unit: int, step: int, passes: range) -> Iterator[tuple[Task, float]]:
        """Loads and stores of a unit's state in an average pass, and how often."""
        batch, last = self._batch, self._model.steps - 1
        if self._moving(unit):
            if step > 0:
                yield Task(TaskKind.LOAD_CACHE, step, unit, batch), 1.0
            stores = sum(each % REWRITE_EVERY == 0 and each < last for each in passes)
            yield Task(TaskKind.STORE_CACHE, 0, unit, batch), stores / len(passes)
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
