"""The linear program against a grid of placements, HiGHS against CBC, and what breaks ties."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest

from h2o_flexgen.config.placement import KINDS
from h2o_flexgen.cost.lp import Charge, PassTimes, Program, solve, tidy
from h2o_flexgen.errors import UsageError
from tests.cost.solvers import needs_cbc
from tests.oracles.program import bytes_on
from tests.seeds import python_random

TIERS = ("gpu", "cpu", "disk")
RESOURCES = ("cpu->gpu", "disk->cpu", "compute")
GB = 10**9
GRID = [
    {"gpu": g / 4, "cpu": c / 4, "disk": (4 - g - c) / 4} for g in range(5) for c in range(5 - g)
]  # of one kind, in quarters


def some_program(seed: int) -> Program:
    """Sizes, rates, buffers and caps such that some placements fit and some do not."""
    source = python_random(seed)
    size = {kind: source.uniform(1, 20) * GB for kind in KINDS}
    homes = [(kind, tier) for kind in KINDS for tier in TIERS[1:]]

    def slope(kind: str, tier: str) -> dict[str, float]:
        seconds = {"cpu->gpu": size[kind] / 10e9, "compute": source.choice([0.0, 0.3, -0.1])}
        return seconds | ({"disk->cpu": size[kind] / 2e9} if tier == "disk" else {})

    phases = tuple(
        PassTimes(name, times, {"compute": source.uniform(0.5, 3)}, {home: slope(*home) for home in homes})
        for name, times in (("prefill", 1), ("decode", source.choice([3, 31])))
    )
    grows = {(kind, tier): {"gpu": -size[kind], tier: size[kind]} for kind, tier in homes}
    charges = [Charge(kind, tier, "gpu", f"{kind} buffers", 0.1 * size[kind]) for kind, tier in homes]
    charges += [Charge(kind, "disk", "cpu", f"{kind} staging", 0.07 * size[kind]) for kind in KINDS]
    whole = sum(size.values())
    caps = {"gpu": source.uniform(0.2, 1.1) * whole, "cpu": source.uniform(0.2, 1) * whole, "disk": whole}
    return Program(TIERS, caps, phases, {"gpu": whole + GB, "cpu": GB, "disk": 0.0}, grows, tuple(charges))


@cache
def on_grid(seed: int) -> float | None:
    """Seconds of the fastest placement in quarters that fits `some_program`."""
    program, best = some_program(seed), None
    for shares in itertools.product(GRID, repeat=3):
        placed = dict(zip(KINDS, shares, strict=True))
        if all(nbytes <= program.caps[tier] for tier, nbytes in bytes_on(program, placed).items()):
            seconds = program.seconds(placed)
            best = seconds if best is None or seconds < best else best
    return best


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_on_a_grid_is_faster(seed: int) -> None:
    """And the program's own is as fast as it says, and fits: together that is the optimum."""
    program = some_program(seed)
    best, found = on_grid(seed), solve(program)
    if found is None:
        assert best is None
        return
    assert best is None or found.seconds <= best * (1 + 1e-9)
    rounding = 1e-4 * sum(  # of shares
        phase.times * max(sum(abs(slope.get(resource, 0)) for slope in phase.slope.values()) for resource in RESOURCES)
        for phase in program.phases
    )
    assert program.seconds(found.shares) == pytest.approx(found.seconds, rel=1e-6, abs=rounding)
    for tier, nbytes in bytes_on(program, found.shares).items():
        assert nbytes <= program.caps[tier] + 1e-4 * sum(program.held.values())


@pytest.mark.slow
def test_the_seeds_say_something() -> None:
    fitting = [on_grid(seed) is not None for seed in range(12)]
    assert True in fitting
    mixed = [solve(some_program(seed)) for seed in range(12)]
    assert any(len(found.shares[kind]) > 1 for found in mixed if found for kind in KINDS)


@needs_cbc
@pytest.mark.turns
@pytest.mark.parametrize("seed", range(16))
def test_both_solvers_place_alike(seed: int) -> None:
    highs, cbc = (solve(some_program(seed), solver) for solver in ("highs", "cbc"))
    assert (highs is None) == (cbc is None)
    if highs and cbc:
        assert highs.seconds == pytest.approx(cbc.seconds, rel=1e-5)
        for kind in KINDS:
            for tier in TIERS:
                assert highs.shares[kind][tier] == pytest.approx(cbc.shares[kind][tier], abs=2e-4)


@pytest.mark.parametrize("seed", range(12))
def test_the_relaxation_bounds_the_program(seed: int) -> None:
    quick, found = solve(some_program(seed), relaxed=True), solve(some_program(seed))
    assert found is None or (quick is not None and quick.seconds <= found.seconds * (1 + 1e-9))


@needs_cbc
def test_of_equally_fast_placements_the_one_with_least_on_slow_tiers_is_taken() -> None:
    """Compute hides every transfer here: without the second program all shares would be as good."""
    slope = {(kind, tier): {"cpu->gpu": 0.1} for kind in KINDS for tier in TIERS[1:]}
    grows = {(kind, tier): {"gpu": -4.0 * GB, tier: 4.0 * GB} for kind in KINDS for tier in TIERS[1:]}
    phase = PassTimes("decode", 10, {"compute": 1.0}, slope)
    program = Program(TIERS, {"gpu": 9 * GB, "cpu": 2 * GB}, (phase,), {"gpu": 12.0 * GB}, grows)
    for solver in ("highs", "cbc"):
        found = solve(program, solver)
        assert found is not None
        assert found.shares["cache"] == found.shares["hidden"] == {"gpu": 1.0}, "weights are the first to go"
        assert found.shares["weights"] == {"gpu": 0.25, "cpu": 0.5, "disk": 0.25}


def test_buffers_are_charged_once_or_not_at_all() -> None:
    grows = {("weights", "cpu"): {"gpu": -10.0 * GB, "cpu": 10.0 * GB}}
    slope = {("weights", "cpu"): {"cpu->gpu": 1.0}}
    phase = PassTimes("decode", 1, {"compute": 0.1}, slope)
    charge = Charge("weights", "cpu", "gpu", "weight buffers", 1.0 * GB)
    program = Program(("gpu", "cpu"), {"gpu": 10 * GB}, (phase,), {"gpu": 10.0 * GB}, grows, (charge,))
    stays = solve(program)
    assert stays is not None
    assert stays.shares["weights"] == {"gpu": 1.0}
    tight = solve(replace(program, caps={"gpu": 9 * GB}))
    assert tight is not None
    assert tight.shares["weights"] == {"gpu": 0.8, "cpu": 0.2}, "one for the cap, one for the buffers"
    assert tight.seconds == pytest.approx(0.2)


def test_fixed_shares_and_banned_homes() -> None:
    program = some_program(1)
    caps = dict.fromkeys(TIERS, 1e12)
    fixed = {"cache": {"cpu": 0.3, "disk": 0.7}}
    found = solve(replace(program, caps=caps, fixed=fixed))
    assert found is not None
    assert found.shares["cache"] == {"cpu": 0.3, "disk": 0.7}
    small = {**caps, "gpu": 0.4 * program.held["gpu"]}
    banned = solve(replace(program, caps=small, banned=frozenset({("cache", "disk"), ("weights", "cpu")})))
    assert banned is not None
    assert "disk" not in banned.shares["cache"]
    assert "cpu" not in banned.shares["weights"]


@needs_cbc
def test_nothing_fits() -> None:
    program = replace(some_program(3), caps={"gpu": GB / 2, "cpu": GB / 2, "disk": GB})
    assert solve(program) is None
    assert solve(program, relaxed=True) is None
    assert solve(program, "cbc") is None


def test_without_overlap_times_add_up() -> None:
    slope = {("weights", "cpu"): {"cpu->gpu": 1.0}}
    phase = PassTimes("decode", 2, {"compute": 3.0}, slope, summed=True)
    program = Program(("gpu", "cpu"), {}, (phase,), {}, {}, fixed={"weights": {"cpu": 1.0}})
    found = solve(program)
    assert found is not None
    assert found.seconds == pytest.approx(8.0)


def test_resources_that_disturb_each_other() -> None:
    """One disk: reading for 3 s and writing for 1 s takes 4. A copy thread on a core of the compute: half as much."""
    phase = PassTimes(
        "decode", 1, {"disk->cpu": 3.0, "cpu->disk": 1.0, "compute": 2.0}, {("cache", "disk"): {"cpu->disk": 1.0}}
    )
    both = {"disk->cpu": {"cpu->disk": 2.0}, "cpu->disk": {"disk->cpu": 2.0}, "compute": {"disk->cpu": 2.0}}
    mixed = phase.contended(both)
    assert mixed.base == {"disk->cpu": 4.0, "cpu->disk": 4.0, "compute": 3.5}
    assert mixed.slope["cache", "disk"] == {"cpu->disk": 1.0, "disk->cpu": 1.0}
    assert phase.contended({}) == phase


def test_solvers_by_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'highs'"):
        solve(some_program(0), "higs")


def test_a_solver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import pulp

    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    with pytest.raises(UsageError, match=r"highs is not installed.*pip install highspy"):
        solve(some_program(0))
    monkeypatch.setattr(pulp.COIN_CMD, "available", lambda self: False)
    with pytest.raises(UsageError, match="cbc is not installed"):
        solve(some_program(0), "cbc")


def test_tidy_shares_sum_to_one() -> None:
    assert tidy({"gpu": 1 / 3, "cpu": 2 / 3, "disk": 1e-9}) == {"gpu": 0.333333, "cpu": 0.666667}
    assert tidy({"gpu": 0.33333, "cpu": 0.66667, "disk": 0.00001}, 4) == {"gpu": 0.3333, "cpu": 0.6667}
