"""The generators: hand-written small schedules, and properties over random shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.schedule.tasks import Task, TaskKind, Tick
from h2o_flexgen.schedule.zigzag import zigzag
from tests.oracles.row_by_row import row_by_row
from tests.oracles.schedule import Schedule, check
from tests.oracles.traffic import expected_loads
from tests.schedule.shapes import Case, cases, make_shape, shapes

EMBED, ATTN, MLP, HEAD = range(4)  # the units of a one-layer model


def words(tick: Tick) -> str:
    """A tick as "stores / loads / compute / frees", each task as a letter pair with its indices."""
    names = {
        TaskKind.LOAD_WEIGHTS: "w",
        TaskKind.FREE_WEIGHTS: "w",
        TaskKind.LOAD_CACHE: "c",
        TaskKind.STORE_CACHE: "c",
        TaskKind.LOAD_HIDDEN: "h",
        TaskKind.STORE_HIDDEN: "h",
        TaskKind.COMPUTE: "x",
    }

    def word(task: Task) -> str:
        return f"{names[task.kind]}{task.step}{task.unit}" + (str(task.batch) if task.batch >= 0 else "")

    parts = (tick.stores, tick.loads, (tick.compute,) if tick.compute else (), tick.frees)
    return " / ".join(" ".join(map(word, part)) for part in parts)


def test_one_batch_tied_weights_by_hand() -> None:
    ticks = list(zigzag(make_shape(layers=1, steps=2, batches=1)))
    assert [words(tick) for tick in ticks] == [
        " / w00 w01 / x000 / w00",
        " / w02 / x010 / w01",
        "c010 / w03 / x020 / w02",
        " / w11 / x030 / ",  # the head's group stays for the next step's embedding
        " / c110 / x100 / w10",
        " / w12 / x110 / w11",
        " / w13 / x120 / w12",  # no cache store in the last step
        " /  / x130 / w13",  # no read-ahead beyond the end
    ]


def test_two_batches_by_hand() -> None:
    shape = make_shape(layers=1, steps=1, batches=2, tied=False, streamed={"layers.0.mlp"})
    assert [words(tick) for tick in zigzag(shape)] == [
        " / w02 / x000 / ",
        "h000 / h010 / x001 / ",
        "h001 / h011 / x010 / ",
        "h010 / h020 / x011 / ",
        "h011 / h021 / x020 / ",
        "h020 / h030 / x021 / w02",
        "h021 / h031 / x030 / ",
        " /  / x031 / ",
    ]


def test_row_by_row_by_hand() -> None:
    shape = make_shape(layers=1, steps=1, batches=2, streamed={"vocab", "layers.0.mlp"})
    assert [words(tick) for tick in row_by_row(shape)] == [
        " / w00 w02 / x000 / w00",
        " / w03 / x010 / ",
        " /  / x020 / w02",
        " / w02 / x030 / ",
        " /  / x001 / w00",  # the head of one batch and the embedding of the next share the load
        " / w03 / x011 / ",
        " /  / x021 / w02",
        " /  / x031 / w03",
    ]


def test_read_ahead_skips_resident_units_and_uses_every_free_copy() -> None:
    shape = make_shape(layers=3, steps=1, streamed={"layers.0.attn", "layers.1.attn", "layers.2.mlp"}, lookahead=1)
    loads = {tick.compute.unit: [task.unit for task in tick.loads] for tick in zigzag(shape) if tick.compute}
    # Two copies from the start; the third group follows in the first tick after the first group is freed.
    assert {unit: where for unit, where in loads.items() if where} == {0: [1, 3], 2: [6]}


def test_next_ticks_state_is_loaded_before_weights_read_ahead() -> None:
    shape = make_shape(layers=1, steps=2, batches=2, tied=False, lookahead=1)
    tick = next(t for t in zigzag(shape) if t.compute == Task(TaskKind.COMPUTE, 1, ATTN, 0))
    assert [task.kind for task in tick.loads] == [TaskKind.LOAD_CACHE, TaskKind.LOAD_HIDDEN, TaskKind.LOAD_WEIGHTS]


def test_one_streamed_group_is_never_alive_twice() -> None:
    shape = make_shape(layers=1, steps=4, streamed={"layers.0.mlp"}, lookahead=3)
    report = check(zigzag(shape), shape)
    assert (report.peak_alive, report.loads) == (1, {"layers.0.mlp": 4})


@pytest.mark.parametrize("generator", [zigzag, row_by_row])
def test_active_is_asked_only_when_the_step_before_is_done(generator: object) -> None:
    shape = make_shape(layers=1, steps=3, batches=2)
    computed: list[Task] = []
    asked = []

    def active(step: int) -> list[int]:
        asked.append(step)
        assert len(computed) == step * len(shape.units) * 2, "asked before the step before was computed"
        return [0, 1]

    for tick in generator(shape, active):
        if tick.compute:
            computed.append(tick.compute)
    assert asked == [0, 1, 2]


def test_a_lone_batch_keeps_its_hidden_state() -> None:
    shape = make_shape(layers=2, steps=3, batches=3)
    steps = [(0, 1, 2), (1,), (1,)]
    moved = {task.step for tick in zigzag(shape, steps.__getitem__) for task in tick.loads if "hidden" in task.kind}
    assert moved == {0}


def test_early_finish_drains_what_was_read_ahead() -> None:
    shape = make_shape(layers=1, steps=5, batches=2, lookahead=2)
    steps = [[0, 1], [1], []]
    ticks = list(zigzag(shape, steps.__getitem__))
    assert words(ticks[-1]) == " /  /  / w13 w21 w22"
    report = check(ticks, shape, steps)
    assert (report.steps, report.unused) == (2, 2)


def test_nothing_active_is_an_empty_schedule() -> None:
    assert list(zigzag(make_shape(), lambda step: [])) == []


@pytest.mark.parametrize("steps", [[[0, 1], [1, 0]], [[0], [0, 1]], [[0, 2]], [[0, 0]]])
def test_active_batches_must_be_an_ascending_subset(steps: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="ascending subset"):
        list(zigzag(make_shape(batches=2), steps.__getitem__))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lookahead": 0}, "lookahead is 0"),
        ({"steps": 0}, "num_steps is 0"),
        ({"streamed": {"layers.9.mlp"}}, "belong to no unit"),
    ],
)
def test_shapes_without_a_schedule_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_shape(**change)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(cases())
def test_zigzag_is_sound_and_in_order(case: Case) -> None:
    ticks = list(zigzag(case.shape, case.active))
    report = check(ticks, case.shape, case.record)
    units = range(len(case.shape.units))
    wanted = [(i, j, k) for i, batches in enumerate(case.record) for j in units for k in batches]
    assert [(t.compute.step, t.compute.unit, t.compute.batch) for t in ticks if t.compute] == wanted
    assert report.peak_alive <= min(case.shape.lookahead + 1, len(case.shape.streamed))
    assert list(zigzag(case.shape, case.active)) == ticks


@settings(max_examples=60, deadline=None)
@given(cases())
def test_row_by_row_is_sound_and_in_order(case: Case) -> None:
    ticks = list(row_by_row(case.shape, case.active))
    report = check(ticks, case.shape, case.record)
    units = range(len(case.shape.units))
    wanted = [(i, j, k) for i, batches in enumerate(case.record) for k in batches for j in units]
    assert [(t.compute.step, t.compute.unit, t.compute.batch) for t in ticks if t.compute] == wanted
    assert not {TaskKind.LOAD_HIDDEN, TaskKind.STORE_HIDDEN} & set(report.tasks)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 4), st.sampled_from([zigzag, row_by_row]))
def test_a_last_step_that_is_known_makes_the_schedule_that_of_a_shorter_shape(
    case: Case, end: int, generator: Schedule
) -> None:
    shorter = replace(case.shape, num_steps=min(case.shape.num_steps, end + 1))
    ticks = list(generator(case.shape, case.active, lambda step: step == end))
    assert ticks == list(generator(shorter, case.active, None))
    check(ticks, shorter, case.record[: end + 1])


def test_whether_a_step_is_the_last_is_asked_after_what_is_active() -> None:
    asked: list[tuple[str, int]] = []

    def active(step: int) -> list[int]:
        asked.append(("active", step))
        return [0]

    def last(step: int) -> bool:
        asked.append(("last", step))
        return step == 1

    list(zigzag(make_shape(steps=9), active, last))
    assert asked == [("active", 0), ("last", 0), ("active", 1), ("last", 1)]


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_each_group_is_read_once_per_pass(shape) -> None:
    assert check(zigzag(shape), shape).loads == expected_loads(shape)
    passes = shape.num_steps * shape.num_batches
    assert check(row_by_row(shape), shape).loads == expected_loads(shape, passes)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_early_finishes_never_add_work(case: Case) -> None:
    def tasks(active) -> Counter:
        return Counter(task for tick in zigzag(case.shape, active) for task in (*tick.loads, *tick.stores))

    assert not tasks(case.active) - tasks(None)


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_streamed_weights_are_requested_at_least_one_unit_ahead(shape) -> None:
    for tick in zigzag(shape):
        for task in tick.loads:
            if task.kind is TaskKind.LOAD_WEIGHTS and tick.index > 0:
                assert (task.step, task.unit) > (tick.compute.step, tick.compute.unit), "the load comes too late"
                assert tick.compute.batch == 0, "not in the first tick of the unit"


def test_units_of_a_step_that_is_done_as_a_whole_have_no_ticks() -> None:
    """Between the first and the last, of the batches that say so behind their first."""
    shape = make_shape(layers=2, steps=3, batches=2, streamed=(), cache_moves=False, hidden_moves=False)
    done: set[tuple[int, int]] = set()
    ticks: list[Tick] = []
    for tick in zigzag(shape, whole=lambda batch: (ticks[-1].compute.step, batch) in done):
        ticks.append(tick)
        if tick.compute.unit == 0 and (tick.compute.step, tick.compute.batch) != (1, 0) and tick.compute.step:
            done.add((tick.compute.step, tick.compute.batch))
    assert [tick.index for tick in ticks] == list(range(len(ticks)))
    found = [(tick.compute.step, tick.compute.unit, tick.compute.batch) for tick in ticks]
    last = len(shape.units) - 1
    everything = [(step, unit, batch) for step in range(3) for unit in range(last + 1) for batch in range(2)]
    assert found == [each for each in everything if (each[0], each[2]) not in done or each[1] in (0, last)]


@given(cases(experts=7), st.data())
def test_chosen_experts_are_read_ahead_and_computed_once_for_all_batches(case: Case, data: st.DataObject) -> None:
    chosen = []

    def choose(step: int, unit: UnitSpec) -> list[int]:
        chosen.append(sorted(data.draw(st.sets(st.integers(0, 6), min_size=1))))
        return chosen[-1]

    early = data.draw(st.sampled_from([None, lambda step, unit: True, lambda step, unit: (step + unit.index) % 3 > 0]))
    ticks = list(zigzag(case.shape, case.active, chosen=choose, ahead=early))
    report = check(ticks, case.shape, case.record)
    units = [unit for active in case.record if active for unit in case.shape.units if unit.experts]
    assert len(units) == len(chosen)
    wanted = Counter(unit.experts[n] for unit, numbers in zip(units, chosen, strict=True) for n in numbers)
    wanted = Counter({key: count for key, count in wanted.items() if key in case.shape.streamed})
    found = Counter({key: count for key, count in report.loads.items() if ".experts." in key})
    assert found >= wanted if early else found == wanted
    done = [(tick.compute.unit, n) for tick in ticks if tick.compute for n in tick.compute.experts]
    assert done == [(unit.index, n) for unit, numbers in zip(units, chosen, strict=True) for n in numbers]
