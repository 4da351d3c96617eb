"""The schedule over several devices: by hand, by the checker, beside zig-zag on one; and where units are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from h2o_flexgen.errors import UsageError
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.schedule.pipeline import pipeline, stages_of
from h2o_flexgen.schedule.tasks import NO_BATCH, ScheduleShape, Task, TaskKind, Tick
from h2o_flexgen.schedule.zigzag import zigzag
from tests.oracles.schedule import ScheduleError, check
from tests.schedule.shapes import Case, cases, make_shape, shapes
from tests.schedule.test_check import Place, dropped, duplicated, edited, moved, places, swapped
from tests.tiny import config_of


@dataclass(frozen=True)
class Groups:
    """A shape of several stages, and of each group the batches active in each of its steps, and if it knows its end."""

    shape: ScheduleShape
    record: tuple[tuple[tuple[int, ...], ...], ...]
    known: tuple[bool, ...]

    def active(self, step: int, group: int) -> tuple[int, ...]:
        return self.record[group][step]

    def last(self, step: int, group: int) -> bool:
        return self.known[group] and step == self.steps[group] - 1

    @property
    def ran(self) -> list[int]:
        return [sum(map(bool, entries)) for entries in self.record]

    @property
    def steps(self) -> list[int]:
        """As far as they are known while the schedule is made."""
        ends = zip(self.ran, self.known, strict=True)
        return [ran if known else self.shape.num_steps for ran, known in ends]

    @property
    def merged(self) -> list[list[int]]:
        steps = range(self.shape.num_steps)
        return [sorted(b for entries in self.record for b in entries[step]) for step in steps]


@st.composite
def several(draw: st.DrawFn) -> Groups:
    """Random shapes cut anywhere into 2 to 4 stages, with batches that drop out at random."""
    shape = draw(shapes())
    count = draw(st.integers(2, min(4, len(shape.units))))
    inner = st.lists(st.integers(1, len(shape.units) - 1), min_size=count - 1, max_size=count - 1, unique=True)
    cuts = [0, *sorted(draw(inner)), len(shape.units)]
    shape = replace(shape, stages=tuple(range(a, b) for a, b in pairwise(cuts)))
    ends = [draw(st.integers(1, shape.num_steps)) for _ in range(shape.num_batches)]
    record = tuple(
        tuple(tuple(k for k in group if step < ends[k]) for step in range(shape.num_steps)) for group in shape.groups
    )
    return Groups(shape, record, tuple(draw(st.booleans()) for _ in shape.groups))


def sound(case: Groups) -> list[Tick]:
    ticks = list(pipeline(case.shape, case.active, case.last))
    check(ticks, case.shape, case.merged, case.steps)
    return ticks


def fails(ticks: list[Tick], case: Groups) -> bool:
    try:
        check(ticks, case.shape, case.merged, case.steps)
    except ScheduleError:
        return True
    return False


@settings(max_examples=40, deadline=None)
@given(cases())
def test_on_one_device_it_is_the_zigzag_schedule(case: Case) -> None:
    ends = max(step for step, batches in enumerate(case.record) if batches)
    for last in (None, lambda step, group=0: step == ends):
        one = list(pipeline(case.shape, lambda step, group: case.active(step), last))
        assert one == list(zigzag(case.shape, case.active, last))


@settings(max_examples=60, deadline=None)
@given(several())
def test_every_schedule_is_sound(case: Groups) -> None:
    sound(case)


def brief(ticks: list[Tick]) -> list[str]:
    """Each tick's stage and compute: "1:x012" is step 0, unit 1, batch 2 on stage 1."""
    done = [(tick.stage, tick.compute) for tick in ticks if tick.compute is not None]
    return [f"{stage}:x{task.step}{task.unit}{task.batch}" for stage, task in done]


def two_stages(batches: int, **settings: object) -> ScheduleShape:
    """One layer: embedding and attention on one device, MLP and head on the other."""
    return replace(make_shape(steps=2, batches=batches, **settings), stages=(range(2), range(2, 4)))


def test_two_batches_on_two_devices_by_hand() -> None:
    ticks = list(pipeline(two_stages(2, streamed=())))
    assert brief(ticks) == [
        "0:x000", "0:x010",
        "1:x020", "0:x001", "0:x011", "1:x030",
        "1:x021", "0:x100", "0:x110", "1:x031",  # the first batch's tokens were chosen at the end of the slot before
        "1:x120", "0:x101", "0:x111", "1:x130",
        "1:x121", "1:x131",
    ]  # fmt: skip
    passed = [task for tick in ticks for task in tick.passes]
    assert [(task.step, task.unit, task.batch) for task in passed] == [(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)]
    assert {task.kind for task in passed} == {TaskKind.PASS_HIDDEN}


def test_a_group_of_two_batches_takes_turns_with_the_other() -> None:
    first_slots = brief(list(pipeline(two_stages(4, streamed=()))))[:12]
    assert first_slots == [
        "0:x000", "0:x001", "0:x010", "0:x011",
        "1:x020", "0:x002", "1:x021", "0:x003", "0:x012", "0:x013", "1:x030", "1:x031",
    ]  # fmt: skip


def test_one_batch_leaves_one_of_two_devices_idle() -> None:
    ticks = list(pipeline(two_stages(1, streamed=())))
    assert brief(ticks) == ["0:x000", "0:x010", "1:x020", "1:x030", "0:x100", "0:x110", "1:x120", "1:x130"]


def test_a_cache_is_loaded_for_the_first_unit_of_a_stage() -> None:
    """In the stage's tick before where the pass follows at once, else in its own."""
    stages = (range(1), range(1, 4))
    for batches, own in ((2, False), (1, True)):
        shape = replace(make_shape(steps=2, batches=batches, streamed=(), hidden_moves=False), stages=stages)
        ticks = list(pipeline(shape))
        loads = [(tick, task) for tick in ticks for task in tick.loads]
        assert len(loads) == batches
        for tick, task in loads:
            assert (task.kind, task.step, task.unit) == (TaskKind.LOAD_CACHE, 1, 1)
            assert tick.stage == 1
            assert (tick.compute.unit == 1) == own


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(several(), st.sampled_from(["drop", "twice", "move"]), st.data())
def test_what_is_dropped_doubled_or_moved_is_found(case: Groups, change: str, data: st.DataObject) -> None:
    ticks = sound(case)
    assume(places(ticks))
    place = data.draw(st.sampled_from(places(ticks)))
    if change == "drop":
        assert fails(dropped(ticks, place), case)
    elif change == "twice":
        assert fails(duplicated(ticks, place), case)
    else:
        targets = list(elsewhere(ticks, place))
        assume(targets)
        assert fails(moved(ticks, place, data.draw(st.sampled_from(targets))), case)


def elsewhere(ticks: list[Tick], place: Place) -> Iterator[int]:
    """Where a task may not stand. What is loaded early may be loaded earlier, or later as long as it is in time; what
    is freed as a stage is drained, because nobody knew that it had ended, might have been freed with its last use."""
    at, kind, number = place
    stage, task = ticks[at].stage, getattr(ticks[at], kind)[number]
    uses = [tick.index for tick in ticks if tick.stage == stage and tick.compute and needs(tick.compute, task)]
    if kind == "loads":
        next_use = next(index for index in [*uses, len(ticks)] if index >= at)
        allowed = range(next_use + 1)
    else:
        allowed = range(uses[-1], uses[-1] + 1) if uses and kind == "frees" and ticks[at].compute is None else range(0)
    yield from (
        tick.index for tick in ticks if tick.index != at and (tick.stage != stage or tick.index not in allowed)
    )  # fmt: skip


def needs(compute: Task, load: Task) -> bool:
    """Whether `compute` uses what `load` brings."""
    return compute.unit == load.unit and compute.step >= load.step and load.batch in (NO_BATCH, compute.batch)


@settings(max_examples=40, deadline=None)
@given(several(), st.data())
def test_computes_out_of_order_and_lost_passes_are_found(case: Groups, data: st.DataObject) -> None:
    ticks = sound(case)
    computing = [tick.index for tick in ticks if tick.compute]
    one, other = data.draw(st.lists(st.sampled_from(computing), min_size=2, max_size=2, unique=True))
    assert fails(swapped(ticks, one, other), case)
    exchanged = [replace(ticks[{one: other, other: one}.get(at, at)], index=at) for at in range(len(ticks))]
    assert fails(exchanged, case)
    assert fails(edited(ticks, one, stage=ticks[one].stage + 1), case)
    passing = [tick.index for tick in ticks if tick.passes]
    assert fails(edited(ticks, data.draw(st.sampled_from(passing)), passes=()), case)


def test_shapes_without_sense_are_refused() -> None:
    for stages in ((range(2),), (range(2), range(3, 4)), (range(0), range(4)), (range(2, 4), range(2))):
        with pytest.raises(ValueError, match="stages are"):
            replace(make_shape(), stages=stages)


@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_devices_hold_as_equal_weights_as_can_be(family: str, count: int) -> None:
    spec = spec_from_config(config_of(family).to_dict(), family)
    stages = stages_of(spec, count)
    sizes = [sum(t.numel for t in spec.groups_by_key[unit.weights].tensors) for unit in spec.units]

    def most(cuts: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in pairwise((0, *cuts, len(sizes))))

    def all_cuts(start: int, left: int) -> Iterator[tuple[int, ...]]:
        if not left:
            yield ()
        for cut in range(start, len(sizes)):
            yield from ((cut, *rest) for rest in all_cuts(cut + 1, left - 1) if left)

    assert [unit for stage in stages for unit in stage] == list(range(len(sizes)))
    assert most(tuple(stage.start for stage in stages[1:])) == min(most(cuts) for cuts in all_cuts(1, count - 1))
    with pytest.raises(UsageError, match="--num-gpus is 99"):
        stages_of(spec, 99)
