"""What the linear program says of placements in whole units, beside what footprints and prices say of them."""

from __future__ import annotations

import dataclasses

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.rates import UNIT_KINDS, Curve
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import KINDS, Placement
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.linear import Programs
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.simulate import simulate
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.schedule.footprint import footprint
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.schedule.tasks import Task, TaskKind
from h2o_flexgen.schedule.workspace import HOST_ATTENTION
from tests.cost.machines import known, on, profile, rates
from tests.oracles.program import bytes_on
from tests.seeds import python_random

MODELS = ("opt-6.7b", "mistral-7b-v0.1", "qwen2.5-0.5b", "pythia-160m")


def request_for(spec: ModelSpec, tier: str = "gpu", eviction: EvictionConfig | None = None) -> PlanRequest:
    work = Workload(256, 40)
    evicting = eviction or EvictionConfig("h2o", ratio=0.3)
    return PlanRequest(spec, work, evicting, "float16", Caps(), tier, profile=profile(), endless=True)


def scattered(request: PlanRequest, policy: OffloadPolicy, seed: int, embeddings: str) -> Placement:
    """Every layer, cache and GPU batch anywhere; embeddings, which are of another size, where they are told."""
    source, tiers = python_random(seed), request.tiers
    halves = {layer: source.choice(tiers) for layer in range(request.spec.num_layers)}
    weights = {
        key: halves[int(key.split(".")[1])] if key.startswith("layers.") else embeddings
        for key in request.spec.groups_by_key
    }
    batches = range(policy.num_gpu_batches)
    return Placement(
        weights=weights,
        cache={(layer, batch): source.choice(tiers) for layer in halves for batch in batches},
        hidden={batch: source.choice(tiers) for batch in batches},
    )


@pytest.mark.parametrize("computing", [False, True])
@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_footprint(name: str, batches: int, computing: bool) -> None:
    request = request_for(known(name))
    policy = OffloadPolicy(3, batches, cpu_cache_compute=computing)
    program = Programs(request).of(policy)
    for seed in range(4):
        placement = scattered(request, policy, seed, "gpu")
        if batches == 1:
            placement = dataclasses.replace(placement, hidden={0: "gpu"})
        foot = footprint(request, policy, placement)
        for tier, nbytes in bytes_on(program, _by_bytes(request, placement)).items():
            assert nbytes == pytest.approx(foot.total(tier), rel=2e-3, abs=1e6), (seed, tier)


def test_embeddings_on_the_way_are_taken_as_favourably_as_layers() -> None:
    request = request_for(known("opt-6.7b"))
    policy = OffloadPolicy(3, 2)
    placement = scattered(request, policy, 0, "disk")
    foot = footprint(request, policy, placement)
    said = bytes_on(Programs(request).of(policy), _by_bytes(request, placement))
    assert said["gpu"] < foot.total("gpu"), "the vocabulary's buffer is larger than a layer's"
    assert said["gpu"] > 0.6 * foot.total("gpu")


@pytest.mark.parametrize("computing", [False, True])
@pytest.mark.parametrize(("tier", "batches"), [("gpu", 1), ("gpu", 4), ("cpu", 3)])
def test_seconds_are_those_of_the_tasks(tier: str, batches: int, computing: bool) -> None:
    request = request_for(known("opt-1.3b"), tier)
    policy = OffloadPolicy(4, batches, cpu_cache_compute=computing)
    program = Programs(request).of(policy)
    placement = scattered(request, policy, 7, tier)
    if batches == 1:
        placement = dataclasses.replace(placement, hidden={0: tier})
    model, shares = CostModel(request, policy, placement), _by_bytes(request, placement)
    steps = request.workload.gen_len
    for phase, passes in zip(program.phases, (range(1), range(1, steps)), strict=True):
        said, moved = phase.seconds(shares), dict.fromkeys(request.machine.links, 0.0)
        parked = dict.fromkeys(moved, 0.0)
        for (link, what), traffic in model.moves.traffic(passes).items():
            moved[link] += traffic.seconds / len(passes)
            parked[link] += traffic.seconds / len(passes) * (what == "hidden")
        for link, seconds in moved.items():
            # Which hidden states wait for attention on the host depends on two shares: that is taken favourably.
            least = seconds - parked[link] / 2 if model.shape.host_attends and phase.name == "decode" else seconds
            assert 0.99 * least - 1e-4 <= said.get(link, 0.0) <= 1.01 * seconds + 1e-4, (phase.name, link)
        middle = passes[len(passes) // 2]
        ticks = [(unit.index, batch) for unit in model.spec.units for batch in range(batches)]
        computing_s = sum(model.price(Task(TaskKind.COMPUTE, middle, *tick)).seconds for tick in ticks)
        attending = sum(model.price(Task(TaskKind.COMPUTE, middle, *tick)).host for tick in ticks)
        assert said.get(HOST_ATTENTION, 0.0) == pytest.approx(attending, rel=0.01)
        assert (attending > 0) == (computing and tier == "gpu" and (phase.name == "prefill" or batches > 1))
        issuing = 0.02 * computing_s  # what is copied aside for stores comes on top
        assert computing_s * 0.999 <= said["compute"] <= computing_s + issuing + 0.02


def test_without_overlap_every_second_counts_once() -> None:
    request = request_for(known("opt-1.3b"))
    policy = OffloadPolicy(8, 2, overlap=False)
    placement = scattered(request, policy, 3, "gpu")
    said = Programs(request).of(policy).seconds(_by_bytes(request, placement))
    assert simulate(CostModel(request, policy, placement)).total_s == pytest.approx(said, rel=0.03)


def test_what_a_short_lookahead_waits_for() -> None:
    """Everything streamed with two buffers, attention long and the MLP short: weights of attention come late."""
    fast = rates(gemm_flops=Curve(((1, 1e13),)), memory_bytes_per_s=1e12, elementwise_bytes_per_s=1e12)
    quick = dataclasses.replace(fast, tick_s=dict.fromkeys(UNIT_KINDS, 1e-4))
    request = dataclasses.replace(request_for(known("opt-1.3b"), eviction=EvictionConfig()), profile=profile(quick))
    shares = on(weights="cpu", cache="gpu", hidden="gpu")
    near, far = (OffloadPolicy(64, 1, **shares, lookahead=ahead) for ahead in (1, 3))
    times = [simulate(CostModel(request, policy, request.place(policy))).total_s for policy in (near, far)]
    assert times[0] > 1.1 * times[1]
    programs = Programs(request)
    assert programs.of(near).seconds(shares) == pytest.approx(times[0], rel=0.05)
    assert programs.of(far).seconds(shares) == pytest.approx(times[1], rel=0.05)
    assert programs.of(near, waits=False).seconds(shares) == pytest.approx(programs.of(far).seconds(shares))


@pytest.mark.parametrize("eviction", [EvictionConfig(), EvictionConfig("h2o", ratio=0.2)], ids=lambda each: each.name)
@pytest.mark.parametrize("tier", ["gpu", "cpu"])
def test_nothing_simulated_is_faster_than_the_program_says(tier: str, eviction: EvictionConfig) -> None:
    request = request_for(known("opt-1.3b"), tier, eviction)
    for seed, batches in ((1, 1), (2, 2), (3, 4)):
        policy = OffloadPolicy(8, batches)
        placement = scattered(request, policy, seed, tier)
        if batches == 1:
            placement = dataclasses.replace(placement, hidden={0: tier})
        said = Programs(request).of(policy).seconds(_by_bytes(request, placement))
        simulated = simulate(CostModel(request, policy, placement)).total_s
        assert 0.97 * said <= simulated <= 1.6 * said, (seed, batches)


@pytest.mark.parametrize(("rows", "batches", "tier"), [(4, 8, "cpu"), (64, 2, "cpu"), (1, 1, "disk"), (16, 4, "disk")])
def test_experts_of_a_block_are_those_that_its_tokens_choose(rows: int, batches: int, tier: str) -> None:
    """However many GPU batches they come from: priced once, and read as far as they are chosen."""
    few = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    spec = spec_from_config({**(known_config("olmoe-1b-7b") or {}), **few}, "few")
    taken = {"4": Curve(((1.0, 1e-4), (64.0, 2e-3)))}
    machine = profile(rates(experts=taken))
    request = dataclasses.replace(request_for(spec.with_bits(4, 64), "cpu", EvictionConfig()), profile=machine)
    request = dataclasses.replace(request, workload=Workload(1, 40))
    policy = OffloadPolicy(rows, batches, **on(weights=tier))
    said = Programs(request).of(policy, waits=False).seconds(on(weights=tier))
    simulated = simulate(CostModel(request, policy, request.place(policy))).total_s
    assert 0.95 * said <= simulated <= 1.6 * said


def _by_bytes(request: PlanRequest, placement: Placement) -> dict[str, dict[str, float]]:
    shares = placement.achieved(request.spec, request.dtype)
    return {kind: shares[kind] for kind in KINDS}
