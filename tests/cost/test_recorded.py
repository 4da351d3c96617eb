"""Steps that a GPU records: where the cost model expects them, what they cost, and what the search makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import Curve
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.linear import Programs
from h2o_flexgen.cost.search import search
from h2o_flexgen.cost.simulate import simulate
from h2o_flexgen.schedule.footprint import RECORDED, footprint
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.schedule.tasks import Task, TaskKind
from tests.cost.machines import TINY, asked, model_of, on, profile, ticking

ONE_LAYER = replace(TINY, num_layers=1)
"""4 units."""
GPU = replace(ticking(), graph_tick_s=Curve(((1, 0.25),)))
MACHINE = profile({"cpu": ticking(), "gpu": GPU})
"""A second a tick, a quarter where steps are recorded."""
HERE = on(weights="gpu", cache="gpu", hidden="gpu")


@pytest.mark.parametrize("batches", [1, 2])
def test_where_steps_are_recorded(batches: int) -> None:
    """Where everything that is used stays on the GPU, attention included, and keys are not turned."""
    kinds, rolling = ("weights", "cache", "hidden"), EvictionConfig("streaming", budget=8, rolling_positions=True)
    for homes, on_cpu, eviction in product(
        product(("gpu", "cpu"), repeat=3), (False, True), (EvictionConfig(), rolling)
    ):
        where = dict(zip(kinds, homes, strict=True))
        policy = OffloadPolicy(2, batches, **on(**where), cpu_cache_compute=on_cpu)
        model = model_of(policy, spec=ONE_LAYER, machine=MACHINE, tier="gpu", eviction=eviction)
        used = homes if batches > 1 else homes[:2]  # hidden states of one GPU batch are never parked
        expected = set(used) == {"gpu"} and eviction is not rolling
        assert model.recorded == expected, (where, on_cpu, eviction)
        assert not asked(model, profile=profile(ticking())).recorded, "a machine that is not known to record"


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5, 6, 7, 8, 9, 20, 200])
def test_steps_before_the_first_recorded_one_cost_what_they_ever_did(steps: int, batches: int) -> None:
    """Three as ever, one that warms up, one that is recorded; after the prompts' step."""
    work = Workload(24, steps)
    model = model_of(OffloadPolicy(2, batches, **HERE), spec=ONE_LAYER, machine=MACHINE, tier="gpu", workload=work)
    found = simulate(model)
    as_ever, launched = min(5, steps - 1), max(0, steps - 6)
    assert found.prefill_s == pytest.approx(4 * batches)
    assert found.decode_s == pytest.approx(4 * batches * (as_ever + 0.25 * launched))
    for step in range(steps):
        parts = model.compute.parts(Task(TaskKind.COMPUTE, step, 1, 0))
        assert parts["overhead"] == (0.25 if step > 5 else 1.0)


def test_attention_that_grows_beside_recorded_steps() -> None:
    """Few steps stand for all: as if each were simulated."""
    curve = {kind: Curve(((1, 1e-4), (1e9, 1e5))) for kind in ("plain", "scored")}
    machine = profile({"cpu": ticking(), "gpu": replace(GPU, decode_attention=curve)})
    model = model_of(OffloadPolicy(2, **HERE), spec=ONE_LAYER, machine=machine, tier="gpu", workload=Workload(24, 60))
    each = [sum(model.price(Task(TaskKind.COMPUTE, step, unit, 0)).seconds for unit in range(4)) for step in range(60)]
    assert each[59] > each[6] + 1, "it grows"
    assert simulate(model).decode_s == pytest.approx(sum(each[1:]), rel=1e-3)


def request(machine: HardwareProfile = MACHINE, **caps: int) -> PlanRequest:
    limits = Caps(**{"cpu": 1 << 30, **caps})
    return PlanRequest(TINY, Workload(24, 40, 8), EvictionConfig(), "float16", limits, "gpu", profile=machine)


def test_a_search_knows_of_them() -> None:
    wanted = request(gpu=64 << 20)
    result = search(wanted)
    assert not result.best.moves
    assert result.best.prediction.decode_s == pytest.approx(result.best.prediction.blocks * 6 * (5 + 0.25 * 34))
    assert [item.tier for item in result.best.footprint.items if item.what == RECORDED] == ["gpu"]
    program = Programs(wanted).of(result.best.policy, waits=False)
    shares = {kind: {"gpu": 1.0} for kind in ("weights", "cache", "hidden")}
    assert program.seconds(shares) <= result.best.prediction.block.total_s * (1 + 1e-9), "a bound"


def test_of_plans_that_move_anything_nothing_is_recorded() -> None:
    policy = OffloadPolicy(8, **on(weights="cpu", cache="gpu", hidden="gpu"))
    wanted = request()
    placement = wanted.place(policy)
    assert RECORDED not in {item.what for item in footprint(wanted, policy, placement).items}
    assert RECORDED not in {what for _, what in Programs(wanted)._amounts(replace(policy, **HERE), None)}
    emulated = replace(wanted, caps=replace(wanted.caps, emulated=True))
    resident = replace(policy, **HERE)
    assert RECORDED in {item.what for item in footprint(wanted, resident, wanted.place(resident)).items}
    assert RECORDED not in {item.what for item in footprint(emulated, resident, wanted.place(resident)).items}


def test_json_there_and_back() -> None:
    assert HardwareProfile.from_json(MACHINE.to_json()) == MACHINE
