"""Dividing seconds and taking medians, by a clock that a test moves."""

from __future__ import annotations

from contextlib import suppress

import pytest

from h2o_flexgen.calibration.timing import MOST_SAMPLES, SPAN, Repeats, Sample, TimeBudget, Timer, sample_of


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


def test_a_call_that_takes_all_the_time_twice_is_not_repeated() -> None:
    clock, calls = FakeClock(), []

    def call() -> None:
        calls.append(None)
        clock.pass_(6.0)

    assert Timer(clock=clock).measure(call, 2.5, per=2) == Sample(3.0, 0.0, 1)
    assert len(calls) == 2


def test_what_a_first_call_compiles_is_not_measured() -> None:
    call = Disturbed(100.0)
    assert call.timer.measure(call, 5.0) == Sample(1.0, 0.0, 4)
    assert call.calls == 6  # the compiler, one to warm up, and four


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


class Disturbed:
    """A call that takes 1 second, or what `seconds` says of it, oldest first; and what repeats it."""

    def __init__(self, *seconds: float, most: float = 100.0) -> None:
        self.clock, self.seconds, self.calls = FakeClock(), [*seconds], 0
        self.repeats = Repeats(most, self.clock, self.clock.pass_)
        self.timer = Timer(clock=self.clock, repeats=self.repeats)

    def __call__(self) -> None:
        self.calls += 1
        self.clock.pass_(self.seconds.pop(0) if self.seconds else 1.0)

    def measure(self, **settings: int) -> Sample:
        """One call warms up, four are taken."""
        return self.timer.measure(self, 5.0, **settings)


def test_what_was_disturbed_is_measured_again() -> None:
    call = Disturbed(1.0, 0.5, 1.5, 0.5, 1.5)
    call.clock.pass_(100.0)
    assert call.measure() == Sample(1.0, 0.0, 5)
    assert (call.repeats.count, call.repeats.spent, call.calls) == (1, pytest.approx(5.0), 10)


def test_what_was_not_disturbed_is_not() -> None:
    call = Disturbed(1.0, 1.0, 0.9, 1.0, 0.9)
    call.clock.pass_(100.0)
    assert call.measure() == Sample(pytest.approx(0.95), pytest.approx(0.1 / 0.95), 4)
    assert (call.repeats.count, call.repeats.spent, call.calls) == (0, 0.0, 5)


def test_of_what_stays_disturbed_the_steadiest_is_kept() -> None:
    wide, wider = (0.5, 1.0, 1.5), (0.1, 1.0, 1.9)
    call = Disturbed(1.0, *wider, *wide, *wider, *wider)
    call.clock.pass_(100.0)
    sample = call.timer.measure(call, 4.0)
    assert sample == Sample(1.0, pytest.approx(0.5), 3)
    # Four series in all, a rest before the second and the third repetition.
    assert (call.repeats.count, call.calls) == (3, 13)
    assert call.repeats.spent == pytest.approx(9.0 + 0.3 + 1.0)


@pytest.mark.parametrize(
    ("before", "most", "repeated"),
    [(0.0, 100.0, 0), (0.4, 100.0, 0), (0.6, 100.0, 1), (3.0, 2.9, 0), (3.0, 3.1, 1), (100.0, 3.1, 1), (5.6, 9.9, 2)],
)
def test_repeating_takes_no_more_than_its_share(before: float, most: float, repeated: int) -> None:
    """A series lasts 3 seconds, 4 with the call that warms up; of these and those before two thirds may be repeated."""
    wide = (0.5, 1.0, 1.5)
    call = Disturbed(1.0, *wide, *wide, *wide, *wide, most=most)
    call.clock.pass_(before)
    call.timer.measure(call, 4.0)
    assert call.repeats.count == repeated
    assert call.repeats.spent <= min(most, 2 / 3 * (before + 4.0))


def test_no_more_samples_are_taken_than_there_may_be() -> None:
    wide = (0.5, 1.5) * 10
    call = Disturbed(1.0, *wide)
    call.clock.pass_(100.0)
    assert call.measure(most=10).taken == 4
    assert (call.repeats.count, call.calls) == (1, 9)  # two are left: too few


def test_a_few_samples_are_not_steadier_than_many() -> None:
    """A repetition in which one call takes all the time says nothing."""
    call = Disturbed(1.0, 0.5, 1.5, 0.5, 1.5, 50.0)
    call.clock.pass_(1000.0)
    assert call.measure().taken == 4
    assert call.repeats.count == 0
    assert call.repeats.spent == pytest.approx(50.0)


def test_time_that_is_divided_stands_still_meanwhile() -> None:
    call = Disturbed(1.0, 0.5, 1.5, 0.5, 1.5)
    call.clock.pass_(100.0)
    budget = call.timer.budget(20.0, {"a": 1.0, "b": 1.0})
    budget.take("a")
    call.measure()
    assert call.repeats.count == 1
    assert budget.elapsed == pytest.approx(5.0)
    assert budget.take("b") == pytest.approx(15.0)


def test_nothing_is_repeated_unasked() -> None:
    call = Disturbed(1.0, 0.5, 1.5, 0.5, 1.5)
    call.clock.pass_(100.0)
    Timer(clock=call.clock).measure(call, 5.0)
    assert call.calls == 5


def test_what_is_untimed_takes_nothing_from_what_follows() -> None:
    clock = FakeClock()
    repeats = Repeats(5.0, clock, clock.pass_)
    budget = TimeBudget(10.0, {"a": 1.0, "b": 1.0}, repeats.clock)
    clock.pass_(1.0)
    with repeats.untimed():
        clock.pass_(30.0)
    assert budget.elapsed == pytest.approx(1.0)
    assert budget.take("a") == pytest.approx(4.5)
    with suppress(RuntimeError), repeats.untimed():
        clock.pass_(7.0)
        raise RuntimeError
    assert budget.elapsed == pytest.approx(1.0)
