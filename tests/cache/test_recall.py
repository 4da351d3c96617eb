"""Recall: what is evicted comes back when a query looks for it, as the oracle says, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.recall import DiskShelves, Recall, RecallCounts
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.packing import CacheBits
from h2o_flexgen.config.model.tensors import PAGE
from h2o_flexgen.config.recall import RATED, is_rated, looks
from h2o_flexgen.kernels.ranks import NativeRecall
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import DiskTier, HostMemory, Tier
from tests.cache.conftest import by_torch
from tests.cache.harness import CLOSE, CacheRun, OracleRun, make_stream
from tests.oracles.packed import rounding
from tests.oracles.policies import RecallOracle

pytestmark = pytest.mark.turns


@pytest.fixture(params=["memory", "disk"])
def shelves(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskShelves | None]:
    """Room on disk for one row of 50 tokens of a page each, two of which move at once; None: in memory."""
    if request.param == "memory":
        yield None
        return
    with (
        OffloadDir(tmp_path) as offload,
        closing(DiskTier(None, offload)) as disk,
        closing(Tier("cpu", None, HostMemory())) as memory,
    ):
        region = disk.allocate(50 * PAGE, "evicted tokens")
        room = DiskShelves(disk, region, [PAGE], 50, memory.allocate(2 * PAGE, "buffer").tensor)
        yield room
        room.close()
        assert disk.used == region.nbytes


@pytest.mark.parametrize(
    ("kv_heads", "group", "d", "window", "sinks", "rates", "bits"),
    [
        (2, 1, 4, None, 4, 1, 16),
        (1, 3, 8, None, 0, 8, 16),
        (1, 2, 64, 24, 2, 1, 16),
        (1, 2, 96, 24, 1, 8, 16),
        (1, 1, 136, None, 1, 1, 16),
        (2, 2, 16, None, 1, 1, (4, 3)),
        (1, 2, 64, 24, 2, 8, 8),
    ],
)
def test_recall_equals_the_oracle(
    kernel: str,
    kv_heads: int,
    group: int,
    d: int,
    window: int | None,
    sinks: int,
    rates: int,
    bits: CacheBits,
    shelves: DiskShelves | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest row has a file of its own on disk. Shelves hold 16 bits of what caches pack."""
    monkeypatch.setattr(Recall, "rates", rates)
    if kernel == "torch":
        monkeypatch.setattr(NativeRecall, "serves", lambda like: False)
    steps = 26
    # The second row has a budget that leaves nothing to choose, the third one begins with fewer tokens than its budget.
    streams = [make_stream(prompt, steps, kv_heads, group, d, seed=prompt) for prompt in (40, 9, 11)]
    config = EvictionConfig("h2o", budget=18, sinks=sinks)
    budgets = [config.resolve(stream.prompt, steps).within(window) for stream in streams]
    budgets[1] = EvictionConfig().resolve(9, steps).within(window)
    counts = RecallCounts()
    recall = Recall([stream.prompt + steps for stream in streams], 4, counts, logs=True, disk=shelves)
    run = CacheRun(streams, budgets, make_policy(config), window=window, recall=recall, bits=bits)
    oracles = [
        OracleRun(stream, budget, rounding(RecallOracle, bits), layer=0, row_id=row, seed=0, window=window)
        for row, (stream, budget) in enumerate(zip(streams, budgets, strict=True))
    ]
    compared = 0
    for step in range(steps):
        out, wanted = run.step(), torch.stack([oracle.step() for oracle in oracles])
        error, kept = (out - wanted).abs().unflatten(1, (kv_heads, group)).amax((-1, -2)), run.kept()
        for row, each in enumerate(oracles):
            for head, oracle in enumerate(each.oracles):
                if oracle.closest > CLOSE:
                    assert kept[row][head] == sorted(oracle.kept), f"row {row} head {head} step {step}"
                    assert error[row, head] < 1e-5
                    compared += 1
    assert compared > 0.9 * steps * 3 * kv_heads
    looked = [look for each in oracles for oracle in each.oracles for look in oracle.looked]
    if compared == steps * 3 * kv_heads:
        assert counts.recalled == sum(moved for moved, *_ in looked) > 10
        assert counts.looks == len(looked)
        looks = [oracle.looked for each in oracles for oracle in each.oracles if oracle.looked]
        rated = looked if rates == 1 else [own[at] for own in looks for at in (0, 8)]
        assert counts.held == pytest.approx(sum(held for _, held, _ in rated), rel=1e-4)
        assert counts.best == pytest.approx(sum(best for *_, best in rated), rel=1e-4)
    tokens = sum(stream.prompt + steps for stream, budget in zip(streams, budgets, strict=True) if budget.scored)
    vector = 2 * d * 4
    if shelves is None:
        assert (counts.written, counts.read) == (tokens * kv_heads * vector, counts.recalled * vector)
    else:  # heads that want the same token read it once
        assert (counts.written, counts.read % PAGE) == (tokens * PAGE, 0)
        assert counts.recalled / kv_heads <= counts.read / PAGE <= counts.recalled
    recall.leave([1, 2])
    returns = [recall.returns(row) for row in range(3)]
    assert [heads is None for heads in returns] == [not budget.scored for budget in budgets]
    assert sum(times for heads in returns for head in heads or [] for _, times in head) == counts.recalled


def test_one_look_of_eight_is_rated() -> None:
    assert [taken for taken in range(80) if looks(taken, 4) and is_rated(taken, 4, RATED)] == [0, 8, 32, 64]


@by_torch
@pytest.mark.parametrize("d", [64, 96, 256])
def test_both_kernels_bring_back_the_same(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a vector's lanes, bfloat16, a soft cap, rows that differ in length."""
    steps, found = 12, []
    streams = [make_stream(prompt, steps, 2, 2, d, seed=prompt) for prompt in (150, 333)]
    config = EvictionConfig("h2o", budget=60, sinks=2)
    budgets = [config.resolve(stream.prompt, steps) for stream in streams]
    for native in (True, False):
        if not native:
            monkeypatch.setattr(NativeRecall, "serves", lambda like: False)
        counts = RecallCounts()
        recall = Recall([stream.prompt + steps for stream in streams], 2, counts)
        run = CacheRun(streams, budgets, make_policy(config), dtype=torch.bfloat16, recall=recall)
        run.logits = run.logits._replace(soft_cap=5.0)
        run.steps(1)
        found.append((run.kept(), run.cache.k, run.cache.v, counts))
    (kept, *held, counts), (others, *theirs, expected) = found
    assert counts.recalled == expected.recalled > 20
    assert counts.held == pytest.approx(expected.held, abs=1e-3)
    assert counts.best == pytest.approx(expected.best, abs=1e-3)
    for row, other in zip(kept, others, strict=True):
        for own, its in zip(row, other, strict=True):
            assert len(set(own) ^ set(its)) <= 2, "two that are wanted alike may change places"
    if kept == others:
        assert all(torch.equal(x.sort(2).values, y.sort(2).values) for x, y in zip(held, theirs, strict=True))
