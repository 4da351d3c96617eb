"""The lower bound: numbers by hand, and below the traffic of every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import TIERS, OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.schedule.footprint import footprint
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.schedule.work import io_lower_bound
from tests.cost.machines import TINY, model_of
from tests.cost.plans import EVICTIONS, plans

LAYER = 4 * 64 * 64 + 2 * 64 * 256 + 4 * 64 + 256 + 64 + 4 * 64  # projections, MLP, their biases, two norms
HEAD = 1000 * 64 + 2 * 64  # the tied table and the last norm; of 130 positions only rows are read
WEIGHTS = 2 * (2 * LAYER + HEAD)
TOKEN = 2 * 2 * 64 * 2  # keys and values of two layers


def bound(caps: dict[str, int | None], tier: str = "cpu", steps: int = 4, **others: object) -> dict[str, int]:
    eviction = others.pop("eviction", EvictionConfig())
    return io_lower_bound(wanted(TINY, steps, caps, tier, eviction), 10, **others)  # type: ignore[arg-type]


def wanted(
    spec: ModelSpec, steps: int, caps: dict[str, int | None], tier: str = "cpu", eviction: object = None
) -> PlanRequest:
    return PlanRequest(spec, Workload(24, steps), eviction or EvictionConfig(), "float16", Caps(**caps), tier)  # type: ignore[arg-type]


def test_by_hand_on_two_tiers() -> None:
    assert bound({}) == bound({"cpu": None}) == {}
    assert bound({"cpu": 1 << 30}) == {}
    held = [10 * TOKEN * tokens for tokens in (0, 24, 25, 26)]
    assert bound({"cpu": WEIGHTS}) == {"disk->cpu": sum(held)}
    cap = 20 * 10 * TOKEN
    expected = {"disk->cpu": 4 * (WEIGHTS - cap) + sum(held), "cpu->disk": held[-1] - cap}
    assert bound({"cpu": cap}) == expected
    evicted = bound({"cpu": cap}, eviction=EvictionConfig("h2o", budget=16))
    assert evicted == {"disk->cpu": 4 * (WEIGHTS - cap) + 3 * 10 * TOKEN * 16}


def test_by_hand_on_three_tiers() -> None:
    held = sum(10 * TOKEN * tokens for tokens in (24, 25, 26))
    caps = {"gpu": 1000, "cpu": 2000}
    found = bound(caps, "gpu")
    assert found["cpu->gpu"] == 4 * (WEIGHTS - 1000) + held
    assert found["disk->cpu"] == 4 * (WEIGHTS - 3000) + held
    assert found["gpu->cpu"] == 10 * TOKEN * 26 - 1000
    assert found["cpu->disk"] == 10 * TOKEN * 26 - 3000
    below = bound(caps, "gpu", cpu_cache_compute=True)
    assert below == {**{link: found[link] for link in ("disk->cpu", "cpu->disk")}, "cpu->gpu": 4 * (WEIGHTS - 1000)}


def test_one_step_keeps_no_caches() -> None:
    assert bound({"cpu": 1000}, steps=1) == {"disk->cpu": WEIGHTS - 1000}


def test_an_embedding_that_is_no_head_costs_nothing() -> None:
    untied = replace(TINY, arch=replace(TINY.arch, tied_head=False))
    found = io_lower_bound(wanted(untied, 1, {"cpu": 0}), 1)
    assert found == {"disk->cpu": WEIGHTS}


def test_windows_bound_what_is_held() -> None:
    windowed = replace(TINY, arch=replace(TINY.arch, window=9, window_layers=(1,)))
    found = io_lower_bound(wanted(windowed, 2, {"cpu": WEIGHTS}), 1)
    assert found == {"disk->cpu": TOKEN // 2 * (24 + 8)}


@settings(max_examples=60, deadline=None)
@given(plans(), EVICTIONS, st.integers(1, 40), st.booleans())
def test_no_plan_moves_less(plan: tuple[OffloadPolicy, str], eviction: EvictionConfig, steps: int, tied: bool) -> None:
    """Within caps of exactly what the plan needs, and so within any larger ones."""
    spec = replace(TINY, arch=replace(TINY.arch, tied_head=tied))
    model = model_of(plan[0], spec=spec, eviction=eviction, workload=Workload(24, steps), tier=plan[1])
    foot = footprint(model.request, model.policy, model.placement)
    moved = model.moves.bytes_moved()
    for spare in (0, 10_000):
        caps = Caps(**{tier: foot.total(tier) + spare for tier in TIERS})
        computing = model.policy.cpu_cache_compute
        found = io_lower_bound(replace(model.request, caps=caps), model.sequences, cpu_cache_compute=computing)
        assert all(nbytes <= moved[link] for link, nbytes in found.items()), (found, moved)


def test_a_plan_that_streams_everything_is_near_its_bound() -> None:
    policy = OffloadPolicy(4, 2, {"disk": 1.0}, {"cpu": 1.0}, {"cpu": 1.0})
    model = model_of(policy, workload=Workload(24, 16))
    found = io_lower_bound(replace(model.request, caps=Caps(cpu=0)), 8)
    caches = sum(8 * TOKEN * (24 + step) for step in range(15))
    assert model.moves.bytes_moved()["disk->cpu"] == pytest.approx(found["disk->cpu"] - caches, rel=0.25)
