"""Rooflines at round rates, worked out by hand; and beside what the cost model predicts of the same work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import Curve, GemmShape
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.schedule.work import HERE, CountedWork, peak_flops, rooflines
from tests.cost.machines import TINY, profile, rates

RAN = PlanRequest(TINY, Workload(24, 8, 4), EvictionConfig("h2o", budget=10), "float16", Caps(), "cpu")
SECONDS = {"prefill": 2.0, "decode": 4.0}
MATRICES = 2 * (4 * 64 * 64 + 2 * 64 * 256)
"""Numbers in the matrices of both layers."""


def ran(**moved: int) -> CountedWork:
    """Four rows: seven decode steps, and their prompts; `moved` in decode, weights from disk to the host."""
    work = CountedWork()
    for phase, steps, rows in ((work.prefill, 1, 96), (work.decode, 7, 4)):
        phase.steps = steps
        for kind in ("attn", "mlp"):
            phase.products[kind, rows] = 2 * steps
    work.prefill.prompt_pairs[None, 24] = 4 * 24 * 24
    work.decode.cache_tokens[None, "cpu"] = 7 * 2 * 4 * 11
    work.decode.cache_calls[None, "cpu"] = 7 * 2
    for nbytes in moved.values():
        work.decode.moved["disk->cpu", "weights"] = nbytes
    return work


def priced(
    work: CountedWork,
    machine: HardwareProfile | None,
    bandwidth: dict[str, float | None] | None = None,
    of: PlanRequest = RAN,
) -> dict[str, Any]:
    return rooflines(work, dataclasses.replace(of, profile=machine), SECONDS, bandwidth)  # type: ignore[arg-type]


def test_without_rates_there_are_amounts_alone() -> None:
    found = priced(ran(disk=1000), None)
    decode = found["decode"]
    assert (decode["steps"], decode["measured_s"]) == (7, 4.0)
    assert decode["resources"] == {
        "memory reads": {
            "bytes": {"weights": 7 * 2 * MATRICES, "cache": 7 * 2 * 4 * 11 * 256}, "rate": None, "of": None,
            "seconds": None,
        },
        "disk->cpu": {"bytes": {"weights": 1000}, "rate": None, "of": None, "seconds": None},
        "arithmetic": {
            "flops": {"products": 7 * 2 * 4 * MATRICES, "attention": 7 * 2 * 4 * 11 * 4 * 64}, "rate": None, "of": None,
            "seconds": None,
        },
    }  # fmt: skip
    assert decode["kernels_s"] is decode["bound"] is decode["achieved"] is None


def test_the_rate_of_a_link_in_the_run_serves_where_there_is_no_other() -> None:
    found = priced(ran(disk=1000), None, {"disk->cpu": 500.0})["decode"]
    assert found["resources"]["disk->cpu"] == {"bytes": {"weights": 1000}, "rate": 500.0, "of": HERE, "seconds": 2.0}
    assert found["bound"] is None, "nobody knows how long computing takes"
    known = priced(ran(disk=1000), profile(), {"disk->cpu": 500.0})["decode"]["resources"]["disk->cpu"]
    assert (known["rate"], known["of"]) == (1e9, "test")


def test_few_rows_wait_for_weights_and_many_for_arithmetic() -> None:
    """One TFLOP/s and 10 GB/s: a matrix of 16-bit numbers is read as slowly as 100 rows of it are computed."""
    found = priced(ran(), profile())
    products = {"prefill": 2 * MATRICES / 1e10, "decode": 7 * 2 * MATRICES / 1e10}
    attention = {
        "prefill": 2 * 4 * 24 * 24 * 4 * 64 / 5e11,  # scored: column sums are made
        "decode": 14 * 2e-4,  # by the curve: calls this small take as long as one of a megabyte
    }
    for phase in ("prefill", "decode"):
        assert found[phase]["kernels_s"] == pytest.approx({"products": products[phase], "attention": attention[phase]})
        assert found[phase]["bound"] == {
            "resource": "memory reads",
            "seconds": pytest.approx(products[phase] + attention[phase]),
        }
        assert found[phase]["achieved"] == pytest.approx((products[phase] + attention[phase]) / SECONDS[phase])
    many = ran()
    many.prefill.products.clear()
    many.prefill.products["attn", 1000] = 2
    numbers = 2 * 4 * 64 * 64
    prefill = priced(many, profile())["prefill"]
    assert prefill["kernels_s"]["products"] == pytest.approx(2 * 1000 * numbers / 1e12)
    assert prefill["bound"]["resource"] == "arithmetic"
    assert prefill["resources"]["arithmetic"]["rate"] == 1e12


def test_the_full_cache_is_priced_without_scores() -> None:
    full = dataclasses.replace(RAN, eviction=EvictionConfig())
    assert priced(ran(), profile(), of=full)["decode"]["kernels_s"]["attention"] == pytest.approx(14 * 1e-4)


def test_the_slowest_of_what_overlaps_is_the_bound() -> None:
    found = priced(ran(disk=10**10), profile())["decode"]
    assert found["bound"] == {"resource": "disk->cpu", "seconds": 10.0}
    assert found["achieved"] == 2.5
    assert found["resources"]["memory reads"]["seconds"] < found["kernels_s"]["products"] + 1


def test_curves_of_a_shape_go_before_the_general_rate() -> None:
    shape = GemmShape(192, 64, Curve(((4, 1e-3), (96, 2e-3))))
    found = priced(ran(), profile(rates(shapes=(shape,))))
    others = 2 * (64 * 64 + 2 * 64 * 256) * 2 / 1e10
    assert found["decode"]["kernels_s"]["products"] == pytest.approx(7 * (2 * 1e-3 + others))
    assert found["prefill"]["kernels_s"]["products"] == pytest.approx(2 * 2e-3 + others)
    assert peak_flops(rates(shapes=(GemmShape(10, 10, Curve(((1, 1e-12),))),))) == pytest.approx(2e14)


def test_attention_on_another_device_needs_its_rates() -> None:
    work = ran()
    work.decode.cache_tokens[None, "gpu"] = work.decode.cache_tokens.pop((None, "cpu"))
    both = priced(work, profile())["decode"]
    assert both["resources"]["memory reads of the gpu"]["rate"] == 1e10
    one = priced(work, profile({"cpu": rates()}))["decode"]
    assert one["resources"]["memory reads of the gpu"]["rate"] is None
    assert one["bound"] is None


def test_nothing_done_has_no_bound() -> None:
    assert priced(CountedWork(), profile())["decode"]["bound"] is None
