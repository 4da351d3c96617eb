"""Experts are measured as they are computed, and belong to the ticks that chose them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.compute import EXPERT_ROWS, expert_curves
from h2o_flexgen.calibration.ticks import _short_run
from h2o_flexgen.calibration.timing import Sample
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import Curve
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.units import MIB
from tests.cost.machines import profile, rates

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_from_config({**(known_config("olmoe-1b-7b") or {}), **SIZES}, "tiny")


def test_an_experts_time_is_its_share_of_a_call(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all four together, in the dtype and packed; the arena is as it was afterwards."""

    def measure(bench: Bench, figure: str, call: Callable[[], object], seconds: float) -> Sample:
        call()
        return Sample(2.0, 0.0, 3)

    monkeypatch.setattr(Bench, "measure", measure)
    with Bench(spec, "bfloat16", CPU, MIB) as bench:
        before = bench.arena.clone()
        found = expert_curves(bench, spec.with_bits(4, 64), 1e9)
        assert torch.equal(bench.arena, before)
    assert found == dict.fromkeys(("16", "4"), Curve(tuple((rows, 0.5) for rows in EXPERT_ROWS)))


def test_experts_belong_to_the_tick_that_chose_them(spec: ModelSpec) -> None:
    """Every unit has one tick in a step, and its price contains the experts that tokens are expected to choose."""
    with Bench(spec, "bfloat16", CPU, MIB) as bench, _short_run(bench) as run:
        ticks = [(unit.name, step) for unit, step, _ in run.ticks(3, 4)]
        assert ticks == [(unit.name, step) for step in range(4) for unit in run.units][:-1]
        known = run.priced(rates(experts={"16": Curve(((1.0, 100.0),))}), 1)
        assert known(run.units[2], 1) > 200 > known(run.units[1], 1)


def test_rates_of_experts_are_kept(spec: ModelSpec) -> None:
    machine = profile(rates(experts={"4": Curve(((1.0, 2.0), (8.0, 3.0)))}))
    assert HardwareProfile.from_json(machine.to_json()) == machine
    assert spec.expert_bits == "16"
    assert spec.with_bits(4, 64).expert_bits == "4"
