"""The clock: queues, predecessors and mutual disturbance, by hand."""

from __future__ import annotations

import pytest

from h2o_flexgen.cost.executor import SimulatedClock
from h2o_flexgen.schedule.tasks import NO_BATCH, Task, TaskKind

MOVES = [Task(TaskKind.LOAD_WEIGHTS, 0, unit, NO_BATCH) for unit in range(5)]
WORK = Task(TaskKind.COMPUTE, 0, 0, 0)


def shown(clock: SimulatedClock) -> list[tuple[int, float, float]]:
    return [(task.unit, pytest.approx(start), pytest.approx(end)) for task, start, end, where in clock.spans]


def test_a_link_works_in_order_while_the_thread_computes() -> None:
    clock = SimulatedClock({})
    first, second = (clock.submit(task, "a", 2.0) for task in MOVES[:2])
    clock.compute(WORK, 3.0)
    assert first.done
    assert not second.done
    clock.wait(second)
    assert clock.now == pytest.approx(4)
    assert dict(clock.busy) == pytest.approx({"a": 4, "compute": 3})
    assert shown(clock) == [(0, 0, 2), (0, 0, 3), (1, 2, 4)]


def test_what_has_to_wait_for_another_link_is_passed_and_then_preferred() -> None:
    clock = SimulatedClock({})
    write = clock.submit(MOVES[0], "b", 1.0)
    blocked = clock.submit(MOVES[1], "a", 2.0, write)
    free = clock.submit(MOVES[2], "a", 3.0)
    clock.wait(blocked)
    assert clock.now == pytest.approx(3)  # the free one ran for a second, and goes on afterwards
    clock.wait(free)
    assert clock.now == pytest.approx(5)
    assert free.started == 0


def test_drain_waits_for_all() -> None:
    clock = SimulatedClock({})
    before = None
    for task, link in zip(MOVES, "ababa", strict=True):
        before = clock.submit(task, link, 1.0, before)
    clock.drain()
    assert clock.now == pytest.approx(5)
    clock.wait(before)
    clock.wait(None)
    assert clock.now == pytest.approx(5)


def test_disturbance_stretches_both_while_both_are_busy() -> None:
    """Alone: 4 s of computing, 1 s of link. Together each takes twice as long: after 2 s the link is done."""
    clock = SimulatedClock({"compute": {"a": 2.0}, "a": {"compute": 2.0}})
    move = clock.submit(MOVES[0], "a", 1.0)
    clock.compute(WORK, 4.0)
    assert move.done
    assert shown(clock) == [(0, 0, 2), (0, 0, 5)]
    assert dict(clock.busy) == pytest.approx({"a": 2, "compute": 5})


def test_a_waiting_thread_disturbs_nobody() -> None:
    clock = SimulatedClock({"a": {"compute": 3.0, "b": 1.5}, "compute": {"a": 3.0}})
    one, other = clock.submit(MOVES[0], "a", 2.0), clock.submit(MOVES[1], "b", 6.0)
    clock.wait(one)
    assert clock.now == pytest.approx(3)
    clock.wait(other)
    assert clock.now == pytest.approx(6)


def test_several_disturbances_multiply() -> None:
    clock = SimulatedClock({"compute": {"a": 2.0, "b": 1.5}})
    for task, link in zip(MOVES, "ab", strict=False):
        clock.submit(task, link, 100.0)
    clock.compute(WORK, 1.0)
    assert clock.now == pytest.approx(3)


def test_a_wait_that_cannot_end_is_an_error() -> None:
    clock = SimulatedClock({})
    never = SimulatedClock({}).submit(MOVES[0], "a", 1.0)
    job = clock.submit(MOVES[1], "a", 1.0, never)
    with pytest.raises(RuntimeError, match="never start"):
        clock.wait(job)


def test_transfers_of_no_time_and_of_much() -> None:
    clock = SimulatedClock({})
    clock.compute(WORK, 1e6)
    jobs = [clock.submit(MOVES[0], "a", 0.0), clock.submit(MOVES[1], "a", 1e6), clock.submit(MOVES[2], "b", 1e-9)]
    clock.drain()
    assert all(job.done for job in jobs)
    assert clock.now == pytest.approx(2e6)
