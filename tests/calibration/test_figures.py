"""How figures follow from samples: latency and bandwidth, general rates, factors of contention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.compute import general_rate
from h2o_flexgen.calibration.links import COMPUTE, Contest, Disk, Link, link_rate
from h2o_flexgen.calibration.ticks import MOST_STEPS, ShortRun, recorded_ticks
from h2o_flexgen.calibration.timing import Sample, Spreads, Timer
from h2o_flexgen.config.hardware.rates import Curve, GemmShape
from h2o_flexgen.config.model.spec import Product
from h2o_flexgen.engine.metrics.recorder import BlockTotals
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED
from h2o_flexgen.units import MIB
from tests.calibration.test_timing import FakeClock
from tests.cost.machines import KINDS, TINY, ticking


def test_latency_and_bandwidth() -> None:
    rate = link_rate((10_000, 1.1), (1_000, 0.2))
    assert (rate.bytes_per_s, rate.latency_s) == (pytest.approx(10_000), pytest.approx(0.1))
    assert rate.seconds(10_000) == pytest.approx(1.1)


@pytest.mark.parametrize("small", [(1_000, 2.0), (10_000, 1.0), (20_000, 0.5)])
def test_small_transfers_that_tell_nothing(small: tuple[int, float]) -> None:
    rate = link_rate((10_000, 1.0), small)
    assert (rate.bytes_per_s, rate.latency_s) == (10_000, 0.0)


def test_latency_is_never_negative() -> None:
    assert link_rate((10_000, 1.0), (1_000, 0.01)).latency_s == 0.0


def test_the_general_rate_is_that_of_a_layer() -> None:
    shapes = (
        GemmShape(10, 20, Curve(((1, 1.0), (4, 2.0)))),
        GemmShape(30, 10, Curve(((1, 3.0), (4, 3.0)))),
        GemmShape(999, 10, Curve(((1, 1e-9),))),  # the head
    )
    curve = general_rate(shapes, (Product(10, 20), Product(30, 10)))
    assert curve.points == ((1, 2 * 500 / 4.0), (4, 4 * 2 * 500 / 5.0))


def test_spreads_are_typical_ones() -> None:
    spreads = Spreads()
    for spread in (0.1, 0.3, 0.2):
        spreads.note("a", Sample(1.0, spread, 5))
    spreads.note("b", Sample(1.0, 0.0, 1))
    spreads.said["a"] = "in a way"
    assert spreads.typical == {"a": 0.2}
    assert spreads.sources() == {
        "a": "measured; in a way; quartiles 20% apart",
        "b": "measured; too few repetitions for a spread",
    }


def test_what_a_recorded_step_takes_beyond_is_divided_by_its_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 units, 10 ms a step and row, of which choosing tokens is known to take 1; steps before the first that is only
    launched take longer and do not count."""
    clock, blocks = FakeClock(), list[int]()

    def run_block(run: ShortRun, rows: int, steps: int, trace: Trace, on_step: Callable) -> BlockTotals:
        assert not trace.enabled, "steps that are traced are not recorded"
        blocks.append(rows)
        for step in range(steps):
            on_step(0)
            clock.pass_(5.0 if step < FIRST_REPLAYED else 0.01 * rows)
        return BlockTotals(graph_launches=replayed)

    monkeypatch.setattr(ShortRun, "block", run_block)
    known = dataclasses.replace(ticking(**dict.fromkeys(KINDS, 0.0)), sample_s=1e-3)
    with Bench(TINY, "float32", torch.device("cpu"), 1 << 20) as bench:
        bench.timer = Timer(clock=clock)
        replayed = MOST_STEPS - FIRST_REPLAYED + 1
        curve = recorded_ticks(bench, known, 1.0)
        assert blocks == [1, 8, 32]
        assert "cpu recorded steps" in bench.spreads.found
        replayed = 0
        assert recorded_ticks(bench, known, 1.0) is None
    assert curve is not None
    assert curve.points == tuple((rows, pytest.approx(0.009 * rows / 6)) for rows in (1, 8, 32))


class Told(Contest):
    """Everything is done 10 times per second alone, links 4 times beside each other, 9.8 times beside computing."""

    rounds = 0

    def rates(self, names: tuple[str, ...], seconds: float) -> dict[str, float]:
        self.rounds += 1
        rate = 10.0 if len(names) == 1 else 9.8 if COMPUTE in names else 4.0
        return dict.fromkeys(names, rate)


def test_resources_that_disturb_each_other() -> None:
    """Two links that share something, and a computation that nothing disturbs by more than noise."""
    with CopyEngine() as copies:
        idle = Link("", 1, lambda: copies.run(lambda: None, "", 0))
        told = Told({"cpu->disk": idle, "cpu->gpu": idle}, lambda: None)
        factors = told.slowdown(1.0)
    assert factors == {"cpu->disk": {"cpu->gpu": 2.5}, "cpu->gpu": {"cpu->disk": 2.5}}
    assert told.rounds == 2 * (3 + 3)


def test_all_are_kept_busy_at_once() -> None:
    """However short the time, each is seen to be done with something, and rates are of what was done."""
    ran = {"cpu->disk": 0, "cpu->gpu": 0, COMPUTE: 0}

    def count(name: str) -> None:
        ran[name] += 1

    with CopyEngine() as copies:

        def link(name: str) -> Link:
            return Link(name, 1, lambda: copies.run(lambda: count(name), name, 1))

        contest = Contest({name: link(name) for name in ("cpu->disk", "cpu->gpu")}, lambda: count(COMPUTE))
        rates = contest.rates(tuple(ran), 0.0)
    assert set(rates) == set(ran)
    assert min(ran.values()) >= 3
    assert min(rates.values()) > 0


def test_the_disk_is_read_in_random_order_and_only_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    whole = CopyEngine.read_extents

    def watched(self: CopyEngine, extents: object, *args: object, **settings: object) -> object:
        (extent,) = extents  # type: ignore[misc]
        read.append(extent.file_offset)
        return whole(self, extents, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(CopyEngine, "read_extents", watched)
    with Disk(tmp_path / "offload", MIB, 16 * MIB) as disk:
        assert (disk.unit, disk.blocks) == (MIB, 16)
        disk.fresh_writes().queue(12)
        disk.settle()
        disk.reads(MIB).queue(12)
    assert sorted(read) == [i * MIB for i in range(12)]
    assert read != sorted(read)


def test_an_arena_is_gone_through_before_anything_comes_again() -> None:
    with Bench(TINY, "bfloat16", torch.device("cpu"), 1 << 20) as bench:
        weights = bench.matrices(256, 64)  # 32 KiB each
        starts = [next(weights).data_ptr() for _ in range(33)]
        assert len(set(starts)) == 32
        assert starts[32] == starts[0]
        assert bench.arena.view(torch.bfloat16).float().std() > 0.01
        with pytest.raises(ValueError, match="do not fit"):
            bench.places(2 << 20)


def test_the_smallest_weights_are_not_made_by_the_million() -> None:
    with Bench(TINY, "bfloat16", torch.device("cpu"), 4 << 20) as bench:
        weights = bench.matrices(4, 4)
        starts = [next(weights).data_ptr() for _ in range((1 << 15) + 1)]
        assert len(set(starts)) == 1 << 15
        assert starts[-1] == starts[0]
