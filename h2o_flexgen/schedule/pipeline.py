"""The zig-zag schedule over several devices: each computes a stage, and groups of GPU batches follow each other.

In slot t stage s walks over its units with group (t - s) modulo the number of stages. A group thus enters the first
stage right after it has left the last, and no stage waits while there are as many groups as stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, chain, pairwise

from h2o_flexgen.config.model.spec import ModelSpec, UnitSpec
from h2o_flexgen.errors import UsageError
from h2o_flexgen.schedule.tasks import ScheduleShape, Tick
from h2o_flexgen.schedule.zigzag import BatchGroup, Pass, StageTicks


def pipeline(
    shape: ScheduleShape,
    active: Callable[[int, int], Sequence[int]] | None = None,
    last: Callable[[int, int], bool] | None = None,
) -> Iterator[Tick]:
    """Yield the ticks of a block on `shape.stages`; with one stage those of `zigzag`.

    Stages that are busy in one slot take turns, so that one host keeps all devices supplied; the output head comes
    last, since the host then waits for tokens. `active(step, group)` and `last(step, group)`: as for `zigzag`, of the
    batches of one group, asked when its `step` begins.
    """
    groups = [BatchGroup(shape, index, active, last) for index in range(len(shape.groups))]
    stages = [StageTicks(shape, units, number) for number, units in enumerate(shape.stages)]
    here: list[Pass | None] = [None] * len(stages)
    index = slot = 0
    while True:
        number = slot % len(stages)
        before, entering = here, groups[number].enter() if number < len(groups) else None
        here = [entering, *before[:-1]]
        if not any(here) and all(group.over for group in groups):
            break
        busy = [
            stage.walk(now, None if number == 0 else here[number - 1], _next_step(groups, number, here), was is None)
            for number, (stage, now, was) in enumerate(zip(stages, here, before, strict=True))
            if now is not None
        ]
        for tick in _in_turns(busy, shape.units[-1]):
            yield replace(tick, index=index)
            index += 1
        slot += 1
    for stage in stages:
        for tick in stage.drain():
            yield replace(tick, index=index)
            index += 1


def _next_step(groups: Sequence[BatchGroup], number: int, here: Sequence[Pass | None]) -> int | None:
    """The step of the next pass of a stage, if any group may go on; else None."""
    now = here[number]
    if now is None:
        return None
    for turn in range(now.group + 1, now.group + 1 + len(groups)):
        group, step = groups[turn % len(groups)], now.step + turn // len(groups)
        if group.step >= step or not group.over:
            return step
    return None


def _in_turns(busy: Sequence[Iterator[Tick]], head: UnitSpec) -> Iterator[Tick]:
    """A tick of each stage, the last one's first, then the next of each; the output head's after all others."""
    going: list[Iterator[Tick]] = list(reversed(busy))
    heads: Iterator[Tick] = iter(())
    while going:
        for stage in list(going):
            tick = next(stage, None)
            if tick is None:
                going.remove(stage)
            elif tick.compute is not None and tick.compute.unit == head.index:
                going.remove(stage)
                heads = chain((tick,), stage)
            else:
                yield tick
    yield from heads


@cache
def stages_of(spec: ModelSpec, count: int) -> tuple[range, ...]:
    """The units of `count` devices: neighbours, cut so that the largest stage has as few weights as possible.

    Tied embeddings count at both ends. UsageError for fewer units than devices.
    """
    groups, units = spec.groups_by_key, spec.units
    if not 1 <= count <= len(units):
        raise UsageError(
            f"--num-gpus is {count}, and {spec.name} has {len(units)} units: the embedding, halves of layers, the head",
            f"needed 1 to {len(units)}",
        )
    sizes = [sum(tensor.numel for tensor in groups[unit.weights].tensors) for unit in units]
    before = [0, *accumulate(sizes)]
    # least[n], if the first n units are those of the stages so far: the most weights of any, where the last one begins
    least = [(before[n], 0) for n in range(len(units) + 1)]
    starts = [[0] * (len(units) + 1)]
    for stage in range(1, count):
        least = [
            min((max(least[cut][0], before[n] - before[cut]), -cut) for cut in range(stage, n)) if n > stage else (0, 0)
            for n in range(len(units) + 1)
        ]
        least = [(most, -cut) for most, cut in least]
        starts.append([cut for _, cut in least])
    stop, cuts = len(units), [len(units)]
    for stage in range(count - 1, 0, -1):
        stop = starts[stage][stop]
        cuts.append(stop)
    cuts = [0, *reversed(cuts)]
    return tuple(range(start, end) for start, end in pairwise(cuts))
