"""Calls of several blocks, and many steps said by few."""

from __future__ import annotations

from dataclasses import replace

import pytest

from h2o_flexgen.config.hardware.rates import LinkRate
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.simulate import predict, simulate
from tests.cost.machines import LINKS, TINY, asked, model_of, profile, rates

CACHE = 24576  # bytes of a layer for 3 rows of 24 + 8 tokens


def call(sequences: int, **of_machine: float) -> CostModel:
    """So many sequences in blocks of three."""
    model = model_of(OffloadPolicy(3), machine=profile(rates(**of_machine)))
    return asked(model, workload=Workload(24, 8, num_sequences=sequences))


@pytest.mark.parametrize("sequences", [3, 9, 11])
def test_only_the_first_block_of_a_call_writes_to_new_memory(sequences: int) -> None:
    usual, slow = predict(call(sequences)), predict(call(sequences, fresh_bytes_per_s=1e6))
    assert slow.blocks == usual.blocks == -(-sequences // 3)
    assert slow.prefill_s - usual.prefill_s == pytest.approx(TINY.num_layers * CACHE / 1e6)
    assert slow.decode_s == pytest.approx(usual.decode_s)


def test_a_block_among_endless_ones_writes_to_none() -> None:
    later = replace(call(9, fresh_bytes_per_s=1e6), later=True)
    assert predict(later).prefill_s == pytest.approx(predict(call(9)).prefill_s)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
@pytest.mark.parametrize("steps", [13, 40])
def test_reads_several_units_ahead_take_steps_to_get_into_their_rhythm(lookahead: int, steps: int) -> None:
    """A disk just faster than the products: with two units ahead the second decode step is no typical one yet."""
    links = {name: LinkRate(1e7 if name == "disk->cpu" else 1e6, 1e-5) for name in LINKS}
    slowdown = {
        "compute": {"disk->cpu": 1.2, "cpu->disk": 1.4},
        "disk->cpu": {"compute": 1.1, "cpu->disk": 1.7},
    }
    policy = OffloadPolicy(1, 3, {"cpu": 0.5, "disk": 0.5}, lookahead=lookahead)
    machine = profile(links=links, slowdown=slowdown)
    model = model_of(policy, workload=Workload(24, steps), machine=machine)
    few, every = simulate(model), simulate(model, steps=steps)
    load = every.bytes_moved["disk->cpu"] / 1e7 / steps  # what the last step does not read ahead any more
    assert few.decode_s == pytest.approx(every.decode_s, abs=load / 2)
    assert few.busy["disk->cpu"] == pytest.approx(every.busy["disk->cpu"], rel=0.02, abs=2 * load)


def test_links_are_busy_with_all_their_bytes() -> None:
    """A disk that is hardly faster than the products fills its buffers for longer than any steps that stand apart."""
    links = {name: LinkRate(1e7 if name == "disk->cpu" else 1e6, 1e-5) for name in LINKS}
    policy = OffloadPolicy(1, 3, {"cpu": 0.5, "disk": 0.5}, lookahead=2)
    model = model_of(policy, workload=Workload(24, 34), machine=profile(links=links))
    alone = sum(traffic.seconds for (link, _), traffic in model.moves.traffic(range(34)).items() if link == "disk->cpu")
    assert simulate(model).busy["disk->cpu"] == pytest.approx(alone)
