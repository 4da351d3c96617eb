"""The checker: every rule can fail, and no single mutation of a sound schedule passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from h2o_flexgen.schedule.tasks import Task, TaskKind, Tick
from h2o_flexgen.schedule.zigzag import zigzag
from tests.oracles.row_by_row import row_by_row
from tests.oracles.schedule import ScheduleError, check
from tests.schedule.shapes import Case, cases, make_shape

FIELDS = ("loads", "stores", "frees")
Place = tuple[int, str, int]  # tick, field, position


def places(ticks: list[Tick]) -> list[Place]:
    return [(t.index, field, at) for t in ticks for field in FIELDS for at in range(len(getattr(t, field)))]


def edited(ticks: list[Tick], index: int, **changes: object) -> list[Tick]:
    return [replace(tick, **changes) if tick.index == index else tick for tick in ticks]


def dropped(ticks: list[Tick], place: Place) -> list[Tick]:
    index, field, at = place
    tasks = getattr(ticks[index], field)
    return edited(ticks, index, **{field: tasks[:at] + tasks[at + 1 :]})


def duplicated(ticks: list[Tick], place: Place) -> list[Tick]:
    index, field, at = place
    tasks = getattr(ticks[index], field)
    return edited(ticks, index, **{field: (*tasks, tasks[at])})


def moved(ticks: list[Tick], place: Place, to: int) -> list[Tick]:
    index, field, at = place
    task = getattr(ticks[index], field)[at]
    ticks = dropped(ticks, place)
    return edited(ticks, to, **{field: (*getattr(ticks[to], field), task)})


def swapped(ticks: list[Tick], one: int, other: int) -> list[Tick]:
    first, second = ticks[one].compute, ticks[other].compute
    return edited(edited(ticks, one, compute=second), other, compute=first)


def sound(case: Case, zigzag_order: bool) -> list[Tick]:
    ticks = list((zigzag if zigzag_order else row_by_row)(case.shape, case.active))
    check(ticks, case.shape, case.record)
    return ticks


def fails(ticks: list[Tick], case: Case) -> bool:
    """With the record of active batches and without it."""
    for record in (case.record, None):
        try:
            check(ticks, case.shape, record)
        except ScheduleError:
            continue
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans(), st.data())
def test_dropping_any_task_is_found(case: Case, order: bool, data: st.DataObject) -> None:
    ticks = sound(case, order)
    assume(places(ticks))
    place = data.draw(st.sampled_from(places(ticks)))
    assert fails(dropped(ticks, place), case)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans(), st.data())
def test_duplicating_any_task_is_found(case: Case, order: bool, data: st.DataObject) -> None:
    ticks = sound(case, order)
    assume(places(ticks))
    place = data.draw(st.sampled_from(places(ticks)))
    assert fails(duplicated(ticks, place), case)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans(), st.data())
def test_moving_any_task_is_found(case: Case, order: bool, data: st.DataObject) -> None:
    """To any other tick; a weights load may be early (while copies last), so it is moved to its use or later."""
    ticks = sound(case, order)
    assume(places(ticks))
    place = data.draw(st.sampled_from(places(ticks)))
    task = getattr(ticks[place[0]], place[1])[place[2]]
    targets = [tick.index for tick in ticks if tick.index != place[0]]
    if task.kind is TaskKind.LOAD_WEIGHTS:
        targets = [index for index in targets if index >= first_use(ticks, case, task, place[0])]
    assume(targets)
    assert fails(moved(ticks, place, data.draw(st.sampled_from(targets))), case)


def first_use(ticks: list[Tick], case: Case, load: Task, loaded: int) -> int:
    keys = [unit.weights for unit in case.shape.units]
    uses = (t.index for t in ticks[loaded:] if t.compute and keys[t.compute.unit] == keys[load.unit])
    return next((i for i in uses if ticks[i].compute.step >= load.step), len(ticks))


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans(), st.data())
def test_computes_out_of_order_are_found(case: Case, order: bool, data: st.DataObject) -> None:
    ticks = sound(case, order)
    computing = [tick.index for tick in ticks if tick.compute]
    one, other = data.draw(st.lists(st.sampled_from(computing), min_size=2, max_size=2, unique=True))
    assert fails(swapped(ticks, one, other), case)
    assert fails(edited(ticks, one, compute=None), case)
    assert fails(edited(ticks, one, compute=ticks[other].compute), case)


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans(), st.data())
def test_a_missing_tick_is_found(case: Case, order: bool, data: st.DataObject) -> None:
    ticks = sound(case, order)
    gone = data.draw(st.integers(0, len(ticks) - 1))
    rest = [replace(tick, index=index) for index, tick in enumerate(ticks[:gone] + ticks[gone + 1 :])]
    assert fails(rest, case)


@settings(max_examples=40, deadline=None)
@given(cases(), st.booleans(), st.data())
def test_a_task_with_a_wrong_index_is_found(case: Case, order: bool, data: st.DataObject) -> None:
    ticks = sound(case, order)
    assume(places(ticks))
    index, field, at = data.draw(st.sampled_from(places(ticks)))
    name = data.draw(st.sampled_from(["step", "unit", "batch"]))
    by = data.draw(st.sampled_from([-2, -1, 1, 2]))
    tasks = list(getattr(ticks[index], field))
    tasks[at] = replace(tasks[at], **{name: getattr(tasks[at], name) + by})
    assert fails(edited(ticks, index, **{field: tuple(tasks)}), case)


def find(ticks: list[Tick], kind: TaskKind, step: int) -> Place:
    def matches(place: Place) -> bool:
        task = getattr(ticks[place[0]], place[1])[place[2]]
        return task.kind is kind and task.step == step

    return next(place for place in places(ticks) if matches(place))


def broken() -> Iterator[tuple[str, list[Tick], str]]:
    """(name, schedule, message) for each rule."""
    ticks = list(zigzag(make_shape(layers=1, steps=3, batches=2)))
    last = ticks[-1].index
    yield "renumbered", [*ticks[:3], *ticks[4:]], "tick 3: form: is numbered 4"
    yield "misplaced", edited(ticks, 1, stores=ticks[1].loads), "tick 1: form: load_hidden .* does not belong there"
    yield "no unit", edited(ticks, 0, loads=(Task(TaskKind.LOAD_WEIGHTS, 0, 9, -1),)), "tick 0: form: .* does not exist"
    yield "hole", edited(ticks, 2, compute=None), "tick 2: form: a tick without a compute"
    yield "swap", swapped(ticks, 4, 5), "tick 4: order: step 0 is neither"
    yield "late load", moved(ticks, (0, "loads", 1), 2), "tick 2: weights: .* whose load only starts"
    yield "no load", dropped(ticks, (0, "loads", 1)), "tick 2: weights: .* needs layers.0.attn, which is not there"
    yield "no free", dropped(ticks, find(ticks, TaskKind.FREE_WEIGHTS, 0)), "tick 2: weights: .* 3 copies of 2"
    yield "never freed", edited(ticks, last, frees=()), r"tick \d+: end: vocab is loaded by .* and never freed"
    cache = dropped(ticks, find(ticks, TaskKind.STORE_CACHE, 0))
    yield "no cache store", cache, "tick 3: cache: what compute .* wrote is not stored"
    cache = dropped(ticks, find(ticks, TaskKind.LOAD_CACHE, 1))
    yield "no cache load", cache, "tick 10: cache: compute step 1 unit 1 batch 0 reads a cache that is not loaded"
    hidden = dropped(ticks, find(ticks, TaskKind.LOAD_HIDDEN, 0))
    yield "no hidden load", hidden, "tick 2: hidden: compute .* needs a hidden state that is parked"


@pytest.mark.parametrize(("ticks", "message"), [pytest.param(t, m, id=name) for name, t, m in broken()])
def test_messages_name_the_tick_and_the_rule(ticks: list[Tick], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(ticks, make_shape(layers=1, steps=3, batches=2))


def test_the_record_of_active_batches_is_compared() -> None:
    shape = make_shape(layers=1, steps=2, batches=2)
    ticks = list(zigzag(shape, [[0, 1], [1]].__getitem__))
    check(ticks, shape, [[0, 1], [1]])
    with pytest.raises(ScheduleError, match=r"tick 8: order: batches \[1\], active are \[0, 1\]"):
        check(ticks, shape, [[0, 1], [0, 1]])
    with pytest.raises(ScheduleError, match="order: 1 steps run, active were 2"):
        check(zigzag(shape, [[0, 1], []].__getitem__), shape, [[0, 1], [1]])


@pytest.mark.parametrize("generator", [zigzag, row_by_row])
def test_a_drain_tick_frees_late_only_what_the_next_step_would_have_used(
    generator: Callable[..., Iterator[Tick]],
) -> None:
    """The head's own weights go with the head; only weights it shares with the embedding wait for the drain tick."""
    shape = make_shape(layers=1, steps=2, batches=1, tied=False)
    ticks = list(generator(shape, [[0], []].__getitem__))
    assert ticks[-1].compute is None
    head = next(p for p in places(ticks) if p[1] == "frees" and getattr(ticks[p[0]], p[1])[p[2]].unit == 3)
    with pytest.raises(ScheduleError, match="is not in the tick of the last use"):
        check(moved(ticks, head, ticks[-1].index), shape)
    tied = make_shape(layers=1, steps=2, batches=1)
    ticks = list(generator(tied, [[0], []].__getitem__))
    check(ticks, tied)
    vocab = next(p for p in places(ticks) if p[:2] == (4, "frees") and getattr(ticks[4], p[1])[p[2]].unit == 3)
    with pytest.raises(ScheduleError, match="frees what the next step may need"):
        check(moved(ticks, vocab, 3), tied)


def test_report_counts() -> None:
    shape = make_shape(layers=2, steps=3, batches=2, lookahead=2)
    report = check(zigzag(shape), shape)
    assert report.steps == 3
    assert report.ticks == 3 * 6 * 2
    assert report.peak_alive == 3
    assert report.loads == {"vocab": 4, **{f"layers.{i}.{kind}": 3 for i in (0, 1) for kind in ("attn", "mlp")}}
    assert report.tasks == {
        TaskKind.COMPUTE: 36,
        TaskKind.LOAD_WEIGHTS: 16,
        TaskKind.FREE_WEIGHTS: 16,
        TaskKind.LOAD_CACHE: 8,
        TaskKind.STORE_CACHE: 8,
        TaskKind.LOAD_HIDDEN: 30,
        TaskKind.STORE_HIDDEN: 30,
    }
