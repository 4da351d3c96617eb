"""The bytes that a schedule moves over each link, tick by tick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from h2o_flexgen.config.placement import Placement
from h2o_flexgen.schedule.tasks import ScheduleShape, Task, TaskKind, Tick
from h2o_flexgen.schedule.work import links


def planned_bytes(
    ticks: Iterable[Tick],
    shape: ScheduleShape,
    placement: Placement,
    *,
    compute_tier: str,
    group_bytes: Mapping[str, int],
    state_bytes: Callable[[Task], int],
    exchanged: Callable[[Task], Iterable[tuple[str, str, int]]] = lambda task: (),
) -> Counter[str]:
    """Bytes that `ticks` move over each link ("disk->cpu", ...), found by walking them.

    group_bytes: bytes of each streamed weight group as moved. state_bytes: bytes of a cache or hidden task; it is asked
    for each, because a cache's load, its first store and its later stores differ, and so do layers with a window.
    exchanged: what a compute task and a host that attends to caches send each other: links, names and bytes.
    """
    moved: Counter[str] = Counter()
    for tick in ticks:
        for task in (*tick.stores, *tick.loads):
            inward, home, nbytes = True, "", 0
            if task.kind is TaskKind.LOAD_WEIGHTS:
                key = shape.units[task.unit].weights
                home, nbytes = placement.weights[key], group_bytes[key]
            else:
                inward = task.kind in (TaskKind.LOAD_CACHE, TaskKind.LOAD_HIDDEN)
                home, nbytes = _state_home(task, shape, placement), state_bytes(task)
            for link in links(home, compute_tier, inward=inward):
                moved[link] += nbytes
        for link, _, nbytes in exchanged(tick.compute) if tick.compute is not None else ():
            moved[link] += nbytes
    return moved


def _state_home(task: Task, shape: ScheduleShape, placement: Placement) -> str:
    if task.kind in (TaskKind.LOAD_HIDDEN, TaskKind.STORE_HIDDEN):
        return placement.hidden[task.batch]
    layer = shape.units[task.unit].layer
    if layer is None:
        raise ValueError(f"{task} names a unit without a cache")
    return placement.cache[layer, task.batch]


def expected_loads(shape: ScheduleShape, passes: int | None = None) -> dict[str, int]:
    """How often each streamed group has to be read in `passes` walks over all units.

    None: one walk per step, which is zig-zag without early finishes; row-by-row makes one per step and GPU batch.
    Laid end to end, a walk reads a group once per run of consecutive units that use it: every group once per walk, and
    a tied one (the head of a walk and the embedding of the next are one run) once more in all.
    """
    keys = [unit.weights for unit in shape.units] * (shape.num_steps if passes is None else passes)
    return dict(Counter(key for key, _ in groupby(keys) if key in shape.streamed))
