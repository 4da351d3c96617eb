"""How far ahead of their use a search has weights read."""

from __future__ import annotations

import dataclasses

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.rates import Curve
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost import search as searching
from h2o_flexgen.cost.search import search
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.units import GIB
from tests.cost.machines import known, profile, rates


def uneven_ticks(**changes: object) -> PlanRequest:
    """Weights stream to a GPU whose attention takes long and whose MLP is short: with one read ahead it waits."""
    quick = rates(gemm_flops=Curve(((1, 1e13),)), memory_bytes_per_s=1e12, elementwise_bytes_per_s=1e12)
    asked = PlanRequest(
        spec=known("opt-1.3b"),
        workload=Workload(512, 32, 64),
        eviction=EvictionConfig(),
        dtype="float16",
        caps=Caps(gpu=8 * GIB, cpu=64 * GIB, disk=1 << 42),
        compute_tier="gpu",
        profile=profile(quick),
        fixed={"weights": {"cpu": 1.0}, "gpu_batch_size": 64, "num_gpu_batches": 1},
    )
    return dataclasses.replace(asked, **changes)


def test_the_chosen_block_is_tried_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where its bound calls one read ahead good enough."""
    usual = search(uneven_ticks())
    assert usual.best.policy.lookahead > 1
    monkeypatch.setattr(searching, "_WAITS", 1e9)
    easily_content = search(uneven_ticks())
    assert easily_content.best.policy.lookahead > 1
    assert easily_content.best.seconds <= searching.GOOD_ENOUGH * usual.best.seconds
    monkeypatch.setattr(searching._PlanSearch, "_farther", lambda self, best: best)
    assert search(uneven_ticks()).best.policy.lookahead == 1


def test_what_is_fixed_stays() -> None:
    request = uneven_ticks()
    for fixed in ({"lookahead": 1}, {"overlap": False}):
        assert search(uneven_ticks(fixed={**request.fixed, **fixed})).best.policy.lookahead == 1
