"""What a search finds: within the caps, no slower than a grid of plans, the same every time; and if nothing fits."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from functools import cache as cached
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h2o_flexgen.cli.arguments import parse_arguments
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import Curve
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost import search as searching
from h2o_flexgen.cost.candidate import place
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.search import SearchResult, search
from h2o_flexgen.cost.simulate import predict, simulate
from h2o_flexgen.engine.limits.plan import make_plan
from h2o_flexgen.errors import PlanError
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.units import GIB, MIB, parse_bytes
from tests.cost.machines import TINY, known, profile, rates, ticking
from tests.cost.solvers import OTHER

AMPLE = {"gpu": 64 * GIB, "cpu": 64 * GIB, "disk": 1 << 42}
TIGHT = {"gpu": 8 * MIB, "cpu": 12 * MIB, "disk": GIB}
SMALL = dataclasses.replace(
    TINY, num_layers=4, vocab_size=4000, hidden_size=256, ffn_size=1024, embed_dim=256, head_dim=64
)


def ask(tier: str = "cpu", caps: dict[str, int] | None = None, **changes: Any) -> PlanRequest:
    usual: dict[str, Any] = {
        "spec": SMALL,
        "workload": Workload(24, 8, 24),
        "eviction": EvictionConfig(),
        "dtype": "float16",
        "caps": Caps(**(AMPLE if caps is None else caps)),
        "compute_tier": tier,
        "profile": profile(),
    }
    return PlanRequest(**{**usual, **changes})


@pytest.mark.turns
@pytest.mark.parametrize("tier", ["cpu", "gpu"])
def test_with_ample_memory_everything_stays_on_the_compute_tier(tier: str) -> None:
    result = search(ask(tier))
    for shares in (result.best.policy.weights, result.best.policy.cache, result.best.policy.hidden):
        assert shares == {tier: 1.0}
    assert result.best.policy.block_size == 24
    assert result.best.prediction.bytes_moved == {}
    assert result.binding is None
    assert not result.best.policy.cpu_cache_compute


def test_moving_data_must_win_by_more_than_predictions_err(monkeypatch: pytest.MonkeyPatch) -> None:
    """First writes to memory that are slower than a disk: a cache on disk looks a little faster, and is not taken."""
    slow_memory = ask(profile=profile(rates(fresh_bytes_per_s=1e9)))
    best = search(slow_memory)
    assert best.best.prediction.bytes_moved == {}
    assert best.runner_up is not None
    monkeypatch.setattr(searching, "RESIDENT", 1.0)
    assert search(slow_memory).best.prediction.bytes_moved == {}  # within 1 %
    monkeypatch.setattr(searching, "GOOD_ENOUGH", 1.0)
    moving = search(slow_memory)
    assert moving.best.prediction.bytes_moved != {}
    assert moving.best.seconds < best.best.seconds < 1.05 * moving.best.seconds


def products_only(*points: tuple[float, float]) -> HardwareProfile:
    """Nothing but products and links takes time worth a word; FLOP/s over rows as in `points`."""
    return profile(
        dataclasses.replace(
            ticking(embed=0.0, attn=0.0, mlp=0.0, head=0.0), gemm_flops=Curve(points), memory_bytes_per_s=1e30
        )
    )


def test_of_plans_that_are_alike_one_of_equal_blocks_is_taken() -> None:
    """32 sequences as 20 + 12 are the fastest by a trifle, 16 + 16 not even close: all 32 at once are taken."""
    bumps = products_only((11, 5e9), (12, 1e10), (16, 9.5e9), (20, 1e10), (22, 9.5e9), (31, 9.5e9), (32, 9.95e9))
    result = search(ask(profile=bumps, workload=Workload(1, 8, 32)))
    assert (result.best.policy.gpu_batch_size, result.best.policy.num_gpu_batches) == (32, 1)
    fastest = place(result.best.request, dataclasses.replace(result.best.policy, gpu_batch_size=20))
    assert fastest.seconds < result.best.seconds < 1.01 * fastest.seconds


def test_of_equal_blocks_that_are_alike_the_smallest_is_taken() -> None:
    flat = products_only((8, 5e9), (15, 9e9), (16, 9.95e9), (17, 9.96e9), (32, 1e10))
    result = search(ask(profile=flat, workload=Workload(1, 8, 32)))
    assert (result.best.policy.gpu_batch_size, result.best.policy.num_gpu_batches) == (16, 1)


def test_of_plans_that_are_alike_one_of_fewer_gpu_batches_is_taken() -> None:
    """All weights come from disk at every step, which takes longest; products of four rows are a little faster."""
    slow = dataclasses.replace(products_only((4, 1e11), (8, 9e10)), links=profile().links)
    result = search(ask(profile=slow, workload=Workload(1, 8, 8), fixed={"weights": {"disk": 1.0}}))
    assert (result.best.policy.gpu_batch_size, result.best.policy.num_gpu_batches) == (8, 1)
    other = place(result.best.request, dataclasses.replace(result.best.policy, gpu_batch_size=4, num_gpu_batches=2))
    assert other.seconds < result.best.seconds < 1.01 * other.seconds


def test_of_plans_that_are_alike_one_that_moves_fewer_bytes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic takes longest; smaller blocks take as long, and read all weights more often."""
    slow = dataclasses.replace(products_only((1, 1e8)), links=profile().links)
    request = ask(profile=slow, workload=Workload(1, 8, 32), fixed={"weights": {"disk": 1.0}})
    assert search(request).best.policy.block_size == 32
    monkeypatch.setattr(searching, "MORE_BYTES", 1e9)
    assert search(request).best.policy.block_size < 32


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@example("gpu", 3, 3, EvictionConfig())  # the solver finds nothing as fast as what it has just found
@example("gpu", 4, 6, EvictionConfig("h2o", ratio=0.4))
@given(
    tier=st.sampled_from(["cpu", "gpu"]),
    fast=st.integers(1, 24),
    slow=st.integers(2, 40),
    eviction=st.sampled_from([EvictionConfig(), EvictionConfig("h2o", ratio=0.4)]),
)
def test_no_cap_is_ever_exceeded(tier: str, fast: int, slow: int, eviction: EvictionConfig) -> None:
    caps = {"gpu": fast * MIB, "cpu": (slow if tier == "gpu" else fast) * MIB, "disk": 64 * MIB}
    try:
        result = search(ask(tier, caps, eviction=eviction))
    except PlanError:
        return
    assert_engine_agrees(result.best.request, result.best.policy)
    assert result.best.footprint.total(tier) <= caps[tier]


def assert_engine_agrees(request: PlanRequest, policy: OffloadPolicy) -> None:
    """The engine's own plan of the policy fits, and takes what the search said."""
    work = request.workload if not request.endless else dataclasses.replace(request.workload, num_sequences=1 << 20)
    plan = make_plan(dataclasses.replace(request, workload=work), policy)
    assert plan.shortage() is None
    assert plan.footprint == place(request, policy).footprint


def grid(request: PlanRequest) -> float:
    """Seconds per sequence of the best of many plans: nine shapes, placements in quarters, and all that is resident."""
    best = float("inf")
    quarters = [{"cpu": n / 4, "disk": 1 - n / 4} for n in range(5)]
    ends = [{"cpu": 1.0}, {"disk": 1.0}]
    for rows, batches in ((1, 1), (4, 1), (8, 1), (24, 1), (8, 3), (4, 6), (12, 2), (6, 4), (2, 12)):
        # Hidden states of one GPU batch stay where they are.
        for weights, cache, hidden in itertools.product(quarters, quarters, ends if batches > 1 else ends[:1]):
            found = place(request, OffloadPolicy(rows, batches, weights, cache, hidden))
            if not found.over:
                done = predict(CostModel(request, found.policy, found.placement))
                best = min(best, (done.prefill_s + done.decode_s) / done.sequences)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("cap", [5, 12])
def test_no_plan_on_a_grid_is_much_faster(cap: int) -> None:
    request = ask(caps={"cpu": cap * MIB, "disk": GIB})
    result = search(request)
    assert result.best.seconds <= 1.03 * grid(request)


@cached
def three_tiers() -> SearchResult:
    return search(ask("gpu", TIGHT))


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "sequences"), [("cpu", 5), ("gpu", 24)])
def test_the_same_question_has_the_same_answer(tier: str, sequences: int) -> None:
    request = ask(tier, TIGHT, workload=Workload(24, 8, sequences))
    first = three_tiers() if tier == "gpu" else search(request)
    second, cbc = search(request), search(request, OTHER)
    assert first.best.policy == second.best.policy == cbc.best.policy
    assert first.runner_up is not None
    assert second.runner_up is not None
    assert first.runner_up.policy == second.runner_up.policy
    assert first.more == second.more


@pytest.mark.turns
@pytest.mark.parametrize(
    "fixed",
    [
        {"gpu_batch_size": 3},
        {"num_gpu_batches": 3},
        {"gpu_batch_size": 2, "num_gpu_batches": 2},
        {"weights": {"cpu": 0.25, "disk": 0.75}},
        {"cache": {"disk": 1.0}, "hidden": {"disk": 1.0}},
        {"overlap": False, "lookahead": 2, "prefill_chunk": 64},
        {"cpu_cache_compute": True, "weights": {"gpu": 0.5, "cpu": 0.5}},
        {"gpu_batch_size": 100},
    ],
    ids=lambda fixed: "+".join(fixed),
)
@pytest.mark.parametrize("tier", ["cpu", "gpu"])
def test_what_is_fixed_stays(tier: str, fixed: dict[str, Any]) -> None:
    wanted = OffloadPolicy(**fixed)
    wanted = wanted.with_gpu_as_cpu() if tier == "cpu" else wanted
    caps, work = {"gpu": 16 * MIB, "cpu": 32 * MIB, "disk": GIB}, Workload(24, 8, 8)
    found = search(ask(tier, caps, fixed=fixed, workload=work)).best.policy
    for name in fixed:
        expected = getattr(wanted, name)
        if name == "gpu_batch_size":
            expected = min(expected, 8)  # never more than there are, as the engine has it
        assert getattr(found, name) == expected


def test_a_whole_policy_is_priced_as_it_is() -> None:
    policy = OffloadPolicy(4, 3, {"cpu": 0.5, "disk": 0.5}, {"disk": 1.0}, {"cpu": 1.0}, prefill_chunk=64)
    fixed = {item.name: getattr(policy, item.name) for item in dataclasses.fields(policy)}
    request = ask(fixed=fixed)
    result = search(request)
    assert result.best.policy == policy
    assert result.best.prediction.decode_s == predict(CostModel(request, policy, request.place(policy))).decode_s
    assert result.runner_up is None


@pytest.mark.slow
def test_a_policy_file_goes_through_run(tmp_path: Path) -> None:
    result = three_tiers()
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({**result.best.policy.to_json(), "made_for": {"model": "small"}}))
    assert parse_arguments(["--policy", str(path)], {}).engine.policy == result.best.policy
    assert_engine_agrees(result.best.request, result.best.policy)


@pytest.mark.slow
def test_a_large_model_in_three_tiers() -> None:
    """Every tier is used up to its cap, and the parts of the answer fit together."""
    caps = {"gpu": 800 * MIB, "cpu": 1000 * MIB, "disk": 64 * GIB}
    spec = dataclasses.replace(known("opt-1.3b"), num_layers=12)
    request = ask("gpu", caps, spec=spec, workload=Workload(512, 32), endless=True)
    result = search(request)
    assert_engine_agrees(request, result.best.policy)
    assert result.best.footprint.total("gpu") > 0.85 * caps["gpu"]
    assert result.best.footprint.total("cpu") > 0.85 * caps["cpu"]
    assert result.best.seconds >= 0.97 * min(c.seconds for c in (result.best, result.runner_up) if c)
    assert result.binding in ("gpu", "cpu")
    assert set(result.more) == {"gpu", "cpu", "disk"}
    assert all(gain >= 0 for gain in result.more.values())
    assert result.best.prediction.sequences == result.best.policy.block_size


@pytest.mark.slow
def test_more_memory_buys_about_what_is_said() -> None:
    """With a gigabyte more, the search finds a plan about as much faster as the linear program said."""
    caps = {"cpu": 4 * GIB, "disk": 64 * GIB}
    asked = ask("cpu", caps, spec=known("opt-6.7b"), workload=Workload(128, 32, 16))
    before = search(asked)
    after = search(asked.with_caps(cpu=5 * GIB))
    gained = (after.best.prediction.gen_throughput or 0) - (before.best.prediction.gen_throughput or 0)
    assert gained > 0
    assert before.more["cpu"] == pytest.approx(gained, rel=0.6)
    assert before.more["disk"] == pytest.approx(0, abs=0.01 * (before.best.prediction.gen_throughput or 0))


@pytest.mark.slow
def test_long_schedules_are_estimated_well() -> None:
    """Ranking by a model of fewer layers comes to nearly the time of all."""
    caps = {"gpu": 6 * GIB, "cpu": 16 * GIB, "disk": 256 * GIB}
    request = ask("gpu", caps, spec=known("opt-30b"), workload=Workload(128, 16), endless=True)
    shares = {"cpu": 0.25, "disk": 0.75}
    found = place(request, OffloadPolicy(8, 24, shares, shares, {"cpu": 1.0}))
    assert found.shrunk is not None
    exact = found.prediction
    assert found.seconds == pytest.approx((exact.prefill_s + exact.decode_s) / exact.sequences, rel=0.02)


def test_experts_that_are_read_count_as_work_of_a_search() -> None:
    spec = dataclasses.replace(known("qwen3-30b-a3b"), num_layers=12)
    request = ask("cpu", {"cpu": 16 * GIB, "disk": 256 * GIB}, spec=spec, workload=Workload(32, 4), endless=True)
    found = place(request, OffloadPolicy(64, 1, {"disk": 1.0}))
    walked = sum(where == "compute" for *_, where in found.prediction.block.spans)
    assert found.shrunk is None
    assert found.ticks == pytest.approx(walked, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "caps", "named"),
    [
        ("cpu", {"cpu": 400 * MIB, "disk": 64 * GIB}, {"--cpu-mem"}),
        ("cpu", {"cpu": 620 * MIB, "disk": 620 * MIB}, {"--cpu-mem", "--nvme-mem"}),
        ("gpu", {"gpu": 100 * MIB, "cpu": 32 * GIB, "disk": 64 * GIB}, {"--gpu-mem"}),
        ("gpu", {"gpu": 100 * MIB, "cpu": 200 * MIB, "disk": 64 * GIB}, {"--gpu-mem", "--cpu-mem"}),
    ],
)
def test_nothing_fits(tier: str, caps: dict[str, int], named: set[str]) -> None:
    """The error names caps, and with these, and only with these, there is a plan."""
    spec = dataclasses.replace(known("opt-1.3b"), num_layers=8)
    request = ask(tier, caps, spec=spec, workload=Workload(512, 32, 2), baseline=GIB // 4)
    with pytest.raises(PlanError) as caught:
        search(request)
    assert caught.value.exit_code == 5
    ways = re.findall(r"--[a-z]+-mem [0-9.]+[GM]iB(?: and --[a-z]+-mem [0-9.]+[GM]iB)*", caught.value.needed)
    assert {flag for way in ways for flag in re.findall(r"--[a-z]+-mem", way)} == named
    tiers = {"--gpu-mem": "gpu", "--cpu-mem": "cpu", "--nvme-mem": "disk"}
    for way in ways:
        sizes = {tiers[flag]: parse_bytes(size) for flag, size in re.findall(r"(--[a-z]+-mem) (\S+)", way)}
        assert search(request.with_caps(**sizes)).best.policy
        last = next(reversed(sizes))
        with pytest.raises(PlanError):
            search(request.with_caps(**{**sizes, last: int(0.97 * sizes[last])}))


def test_a_fixed_placement_that_does_not_fit() -> None:
    fixed = {"weights": {"cpu": 1.0}}
    request = ask("cpu", {"cpu": 8 * GIB, "disk": 64 * GIB}, spec=known("opt-6.7b"), fixed=fixed)
    with pytest.raises(PlanError, match=r"the cpu cap is too small.*--cpu-mem 1[0-9.]+GiB") as caught:
        search(request)
    assert "--nvme-mem" not in caught.value.needed
    assert "fewer fixed placement flags" in str(caught.value)


def test_an_emulated_gpu_has_its_own_flag() -> None:
    request = ask("gpu", {"gpu": MIB, "cpu": 64 * MIB, "disk": MIB, "emulated": True})
    with pytest.raises(PlanError, match="--emulate-gpu"):
        search(request)


def test_left_over_memory_holds_experts_of_every_layer_alike() -> None:
    """The block comes first, and experts take what it leaves, as many of each layer: with the first layers whole as
    many bytes are read, later, as the disk has nothing to do beside these and too much beside the others."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    spec = spec_from_config({**(known_config("olmoe-1b-7b") or {}), **sizes}, "few").with_bits(4, 64)
    products = {"4": Curve(((1.0, 2e-5), (64.0, 1e-4)))}
    machine = profile(rates(experts=products, tick_s=dict.fromkeys(("embed", "attn", "mlp", "head"), 1e-5)))
    work = {"spec": spec, "workload": Workload(32, 32, 256), "dtype": "bfloat16", "profile": machine}
    cap = 90 * MIB
    request = ask(caps={"gpu": 0, "cpu": cap, "disk": 1 << 42}, eviction=EvictionConfig("h2o", ratio=0.2), **work)
    best = search(request).best
    experts = {key: group.nbytes("bfloat16") for key, group in spec.groups_by_key.items() if ".experts." in key}
    held = [key for key in experts if best.placement.weights[key] == "cpu"]
    layers = Counter(key.split(".")[1] for key in held)
    assert best.policy.block_size == 256
    assert len(layers) == 6
    assert max(layers.values()) - min(layers.values()) <= 1 < min(layers.values())
    assert cap - best.footprint.total("cpu") < 2 * max(experts.values())
    whole = dict.fromkeys(experts, "disk") | dict.fromkeys(list(experts)[: len(held)], "cpu")
    uneven = dataclasses.replace(best.placement, weights={**best.placement.weights, **whole})
    alike, first = (simulate(CostModel(request, best.policy, each)) for each in (best.placement, uneven))
    assert alike.bytes_moved == first.bytes_moved
    assert alike.total_s < 0.95 * first.total_s
