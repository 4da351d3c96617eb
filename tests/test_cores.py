"""Who used the cores, by a /proc/stat that is made up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from h2o_flexgen.cores import CoreCount, CoreTimes, core_times, sharing_warning

STAT = """cpu  9999 9999 9999 9999 9999 9999 9999 9999 9999 9999
cpu0 100 20 30 1000 50 5 6 40 7 8
cpu1 200 0 0 500 0 0 0 0 0 0
cpu2 9999 0 0 9999 0 0 0 0 0 0
intr 12345 0 0
ctxt 6789
"""


def reader(*moments: tuple[float, float, float, float]) -> Callable[[], CoreTimes]:
    """Gives these one after the other: (clock, own, busy, idle)."""
    left: Iterator[CoreTimes] = iter([CoreTimes(*moment) for moment in moments])
    return lambda: next(left)


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc/stat of three cores, two of which may be used, with a hundred ticks a second."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    path = tmp_path / "stat"
    path.write_text(STAT)
    return path


def test_only_cores_that_may_be_used_count_and_steal_does(stat: Path) -> None:
    times = core_times(stat)
    assert times is not None
    assert times.busy == pytest.approx((100 + 20 + 30 + 5 + 6 + 40 + 200) / 100)
    assert times.idle == pytest.approx((1000 + 50 + 500) / 100)


@pytest.mark.parametrize("text", [None, "cpu0 what is this"])
def test_where_the_kernel_does_not_say(text: str | None, stat: Path) -> None:
    if text is None:
        stat.unlink()
    else:
        stat.write_text(text)
    count = CoreCount(lambda: core_times(stat))
    count.start()
    count.stop()
    assert count.shared is None


def test_a_sandbox_that_shows_zeros(stat: Path) -> None:
    stat.write_text("cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n")
    times = core_times(stat)
    assert times is not None
    count = CoreCount(reader(times, times._replace(clock=times.clock + 10)))
    count.start()
    count.stop()
    assert count.shared is None


def test_stretches_add_up() -> None:
    count = CoreCount(reader((0, 0, 0, 0), (10, 12, 17, 3), (100, 100, 100, 100), (110, 104, 105, 115)))
    for _ in range(2):
        count.start()
        count.stop()
    assert count.shared == {"seconds": 20, "cores": 2, "own": 0.8, "others": pytest.approx(0.3), "idle": 0.9}
    assert CoreCount().shared is None


def test_clocks_that_differ_by_a_tick_make_no_others_of_less_than_none() -> None:
    count = CoreCount(reader((0, 0, 0, 0), (10, 10.02, 10.0, 10.0)))
    count.start()
    count.stop()
    assert count.shared is not None
    assert count.shared["others"] == 0


@pytest.mark.parametrize(
    ("seconds", "own", "others", "warns"),
    [
        (10, 1.9, 0.18, False),
        (10, 1.9, 0.2, True),
        (10, 0.1, 0.09, False),  # of one core at least
        (10, 0.1, 0.11, True),
        (0.9, 1.0, 1.0, False),  # too short to tell
    ],
)
def test_when_a_warning_is_due(seconds: float, own: float, others: float, warns: bool) -> None:
    said = sharing_warning({"seconds": seconds, "cores": 2, "own": own, "others": others, "idle": 0.0})
    assert (said is not None) == warns
    assert said is None or said.startswith(f"others used {others:.2f} of the 2 cores while this used {own:.2f}: ")


def test_nothing_known_is_no_warning() -> None:
    assert sharing_warning(None) is None
