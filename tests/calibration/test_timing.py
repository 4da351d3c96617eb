"""Dividing seconds and taking medians, by a clock that a test moves."""

from __future__ import annotations

import pytest

from h2o_flexgen.calibration.timing import MOST_SAMPLES, SPAN, Sample, TimeBudget, Timer, sample_of


class FakeClock:
    """Stands still until `pass_` is called."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def test_parts_get_their_shares_and_what_is_left_over() -> None:
    clock = FakeClock()
    budget = TimeBudget(10.0, {"a": 1.0, "b": 3.0, "c": 1.0}, clock)
    assert budget.take("a") == pytest.approx(2.0)
    clock.pass_(1.0)  # a second less than its share
    assert budget.take("b") == pytest.approx(9.0 * 3 / 4)
    clock.pass_(6.75)
    assert budget.take("c") == pytest.approx(2.25)
    assert (budget.elapsed, budget.seconds) == (pytest.approx(7.75), 10.0)


def test_what_is_overdrawn_is_taken_from_the_others_but_for_a_tenth() -> None:
    clock = FakeClock()
    budget = TimeBudget(10.0, {"a": 1.0, "b": 3.0, "c": 1.0}, clock)
    budget.take("a")
    clock.pass_(6.0)
    assert budget.take("b") == pytest.approx(4.0 * 3 / 4)
    clock.pass_(30.0)
    assert budget.take("c") == pytest.approx(0.1 * 2.0)


def test_a_part_is_taken_once() -> None:
    budget = TimeBudget(1.0, {"a": 1.0}, FakeClock())
    budget.take("a")
    with pytest.raises(KeyError):
        budget.take("a")


def test_repetitions_end_with_the_time() -> None:
    clock, calls = FakeClock(), []

    def call() -> None:
        calls.append(clock.now)
        clock.pass_(1.0)

    sample = Timer(clock=clock).measure(call, 5.0)
    assert sample == Sample(1.0, 0.0, 4)  # and one call to warm up
    assert len(calls) == 5


def test_a_call_that_takes_all_the_time_to_warm_up_is_not_repeated() -> None:
    clock, calls = FakeClock(), []

    def call() -> None:
        calls.append(None)
        clock.pass_(6.0)

    assert Timer(clock=clock).measure(call, 2.5, per=2) == Sample(3.0, 0.0, 1)
    assert len(calls) == 1


@pytest.mark.parametrize(("seconds", "taken"), [(0.5, 1), (2.0, 2), (3.0, 3)])
def test_one_sample_is_always_taken_and_three_if_half_as_much_time_again_will_do(seconds: float, taken: int) -> None:
    clock = FakeClock()
    assert Timer(clock=clock).measure(lambda: clock.pass_(1.0), seconds).taken == taken


def test_short_calls_are_repeated_within_a_sample() -> None:
    clock, calls = FakeClock(), []

    def call() -> None:
        calls.append(None)
        clock.pass_(SPAN / 10)

    sample = Timer(clock=clock).measure(call, 1e9)
    assert sample.seconds == pytest.approx(SPAN / 10)
    assert (sample.taken, len(calls)) == (MOST_SAMPLES, 2 + 10 * MOST_SAMPLES)


def test_preparing_takes_time_but_is_not_counted() -> None:
    clock = FakeClock()
    sample = Timer(clock=clock).measure(lambda: clock.pass_(1.0), 12.0, per=4, prepare=lambda: clock.pass_(2.0))
    assert sample == Sample(0.25, 0.0, 3)


def test_the_device_is_waited_for() -> None:
    clock = FakeClock()
    queued = []

    def synchronise() -> None:
        clock.pass_(0.5 * len(queued))
        queued.clear()

    assert Timer(synchronise, clock).measure(lambda: queued.append(None), 2.0).seconds == 0.5


def test_medians_and_quartiles() -> None:
    assert sample_of([1.0, 9.0, 2.0, 3.0, 4.0]) == Sample(3.0, pytest.approx(2.0 / 3), 5)
    assert sample_of([2.0]) == Sample(2.0, 0.0, 1)
    assert sample_of([0.0, 0.0]).seconds > 0  # a clock too coarse
