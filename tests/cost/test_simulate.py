"""The simulation: timelines worked out by hand, and what must hold for every plan."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import LinkRate
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import Placement
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.simulate import Simulation, predict, simulate
from h2o_flexgen.schedule.tasks import NO_BATCH, Task, TaskKind
from h2o_flexgen.schedule.zigzag import zigzag
from tests.cost.machines import LINKS, TINY, asked, known, model_of, on, profile, ticking
from tests.cost.plans import EVICTIONS, machines, plans
from tests.oracles.traffic import planned_bytes

THIRDS = {"gpu": 1 / 3, "cpu": 1 / 3, "disk": 1 / 3}
UNTIED = replace(TINY, num_layers=1, arch=replace(TINY.arch, tied_head=False))


def seconds_each(**seconds: float) -> HardwareProfile:
    """Ticks of a second, and transfers that take `seconds` by link whatever they move: disk_cpu=3 is disk->cpu."""
    links = {name.replace("_", "->"): LinkRate(1e40, latency_s=latency) for name, latency in seconds.items()}
    return profile(ticking(), links=links)


def timed(
    policy: OffloadPolicy, steps: int, *, spec: ModelSpec = UNTIED, tier: str = "cpu", **links: float
) -> CostModel:
    return model_of(policy, spec=spec, workload=Workload(24, steps), machine=seconds_each(**links), tier=tier)


def spans(found: Simulation, resource: str) -> list[tuple[str, float, float]]:
    rows = [row for row in found.timeline.rows if row.resource == resource]
    return [(row.task, pytest.approx(row.start), pytest.approx(row.end)) for row in rows]


# ---- by hand: units embed, attn, mlp, head of one layer, a second each


def test_one_streamed_group_is_read_while_others_are_computed() -> None:
    model = timed(OffloadPolicy(), 2, disk_cpu=3)
    weights = {**model.placement.weights, "layers.0.mlp": "disk"}
    found = simulate(replace(model, placement=replace(model.placement, weights=weights)))
    assert spans(found, "disk->cpu") == [
        ("load_weights layers.0.mlp step 0", 0, 3),
        ("load_weights layers.0.mlp step 1", 4, 7),  # issued once the only use of the first is over
    ]
    assert spans(found, "compute") == [
        ("embed step 0 batch 0", 0, 1),
        ("layers.0.attn step 0 batch 0", 1, 2),
        ("layers.0.mlp step 0 batch 0", 3, 4),
        ("head step 0 batch 0", 4, 5),
        ("embed step 1 batch 0", 5, 6),
        ("layers.0.attn step 1 batch 0", 6, 7),
        ("layers.0.mlp step 1 batch 0", 7, 8),
        ("head step 1 batch 0", 8, 9),
    ]
    assert (found.prefill_s, found.decode_s) == (pytest.approx(5), pytest.approx(4))
    assert found.busy == pytest.approx({"compute": 8, "disk->cpu": 6})
    assert found.bound[:2] == ("prefill", "compute")


def test_a_link_that_is_slower_than_the_compute_never_idles() -> None:
    """Two buffers: what is read third waits for the first to be used; from then on reads follow each other."""
    found = simulate(timed(OffloadPolicy(**on(weights="disk")), 3, disk_cpu=3))
    reads = [(start, end) for _, start, end in spans(found, "disk->cpu")]
    assert reads == [(3 * i, 3 * i + 3) for i in range(12)]
    assert (found.prefill_s, found.decode_s) == (pytest.approx(13), pytest.approx(24))
    assert found.bound == ("decode", "disk->cpu", pytest.approx(36))


def test_without_overlap_everything_waits_for_every_transfer() -> None:
    found = simulate(timed(OffloadPolicy(**on(weights="disk"), overlap=False), 2, disk_cpu=3))
    assert (found.prefill_s, found.decode_s) == (pytest.approx(5 * 3 + 4), pytest.approx(3 * 3 + 4))
    assert found.timeline.overlap == 0


def test_parked_hidden_states_go_through_three_buffers() -> None:
    policy = OffloadPolicy(1, 2, {"gpu": 1.0}, {"gpu": 1.0}, {"cpu": 1.0})
    found = simulate(timed(policy, 1, tier="gpu", cpu_gpu=2, gpu_cpu=2))
    computes = [(start, end) for _, start, end in spans(found, "compute")]
    # A batch's hidden states leave in the next tick, and come back for the one after it; the second load of all waits
    # for a buffer until the first store is over.
    assert computes == [(0, 1), (1, 2), (5, 6), (7, 8), (10, 11), (12, 13), (15, 16), (17, 18)]
    assert spans(found, "gpu->cpu")[:2] == [
        ("store_hidden embed step 0 batch 0", 1, 3),
        ("store_hidden embed step 0 batch 1", 3, 5),
    ]
    assert spans(found, "cpu->gpu")[:2] == [
        ("load_hidden layers.0.attn step 0 batch 0", 3, 5),
        ("load_hidden layers.0.attn step 0 batch 1", 5, 7),
    ]


def test_a_cache_on_disk_is_read_after_it_was_written_and_not_written_at_every_step() -> None:
    found = simulate(timed(OffloadPolicy(**on(cache="disk")), 3, disk_cpu=2, cpu_disk=3))
    assert spans(found, "cpu->disk") == [("store_cache layers.0.attn step 0 batch 0", 2, 5)]
    assert spans(found, "disk->cpu") == [
        ("load_cache layers.0.attn step 1 batch 0", 5, 7),
        ("load_cache layers.0.attn step 2 batch 0", 10, 12),
    ]
    assert (found.prefill_s, found.decode_s) == (pytest.approx(4), pytest.approx(11))


def test_slow_writes_of_caches_hold_the_prompt_up_once_three_buffers_are_full() -> None:
    found = simulate(
        timed(OffloadPolicy(**on(cache="disk")), 2, spec=replace(UNTIED, num_layers=5), disk_cpu=1, cpu_disk=10)
    )
    attention = [start for task, start, _ in spans(found, "compute") if "attn step 0" in task]
    assert attention == [1, 3, 5, 12, 22]
    assert found.prefill_s == pytest.approx(25)


def test_between_disk_and_gpu_a_transfer_follows_the_other() -> None:
    policy = OffloadPolicy(1, 1, {"disk": 1.0}, {"gpu": 1.0}, {"gpu": 1.0})
    found = simulate(timed(policy, 1, tier="gpu", disk_cpu=2, cpu_gpu=3))
    assert [(start, end) for _, start, end in spans(found, "disk->cpu")] == [(0, 2), (2, 4), (6, 8), (9, 11)]
    assert [(start, end) for _, start, end in spans(found, "cpu->gpu")] == [(2, 5), (5, 8), (8, 11), (11, 14)]


# ---- every plan


@settings(max_examples=30, deadline=None)
@given(plans(), EVICTIONS, st.integers(1, 40))
def test_bytes_are_those_of_the_schedule(plan: tuple[OffloadPolicy, str], eviction: EvictionConfig, steps: int) -> None:
    model = model_of(plan[0], eviction=eviction, workload=Workload(24, steps), tier=plan[1])
    planned = planned_bytes(
        zigzag(model.shape),
        model.shape,
        model.placement,
        compute_tier=model.compute_tier,
        group_bytes=model.moves.group_bytes,
        state_bytes=model.moves.state_bytes,
        exchanged=model.moves.exchanged,
    )
    assert simulate(model).bytes_moved == {link: nbytes for link, nbytes in planned.items() if nbytes}


@settings(max_examples=30, deadline=None)
@given(plans(), EVICTIONS, st.integers(1, 5), machines())
def test_what_is_used_is_there_and_no_more_copies_than_stated(
    plan: tuple[OffloadPolicy, str], eviction: EvictionConfig, steps: int, machine: HardwareProfile
) -> None:
    model = model_of(plan[0], eviction=eviction, workload=Workload(24, steps), tier=plan[1], machine=machine)
    found, keys = simulate(model, steps=steps), [unit.weights for unit in model.spec.units]
    computes = [(task, start, end) for task, start, end, where in found.spans if where == "compute"]
    assert all(one[2] <= other[1] for one, other in pairwise(computes)), "one at a time, in order"
    # The second half of a unit whose attention the host computes has what it needs of the weights in a copy.
    computes = list({compute[0]: compute for compute in reversed(computes)}.values())
    loads: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for task, start, end, link in found.spans:
        if task.kind is TaskKind.LOAD_WEIGHTS and link.endswith(f"->{model.compute_tier}"):
            loads[keys[task.unit]].append((start, end))
    edges = []
    for key, moves in loads.items():
        uses = [(start, end) for task, start, end in computes if keys[task.unit] == key]
        for number, (start, there) in enumerate(moves):
            following = moves[number + 1][0] if number + 1 < len(moves) else float("inf")
            mine = [use for use in uses if start <= use[0] < following]
            assert all(there <= use[0] for use in mine)
            edges += [(start, 1), (max((use[1] for use in mine), default=there), -1)]
    alive = 0
    for _, change in sorted(edges):
        alive += change
        assert alive <= model.policy.lookahead + 1


def _slow_links(**bytes_per_s: float) -> dict[str, LinkRate]:
    return {name.replace("_", "->"): LinkRate(speed, latency_s=1e-5) for name, speed in bytes_per_s.items()}


# Reads ahead that share their links with caches: a last step that still makes them takes longer by more than they do.
@example(
    (OffloadPolicy(2, 4, {"gpu": 0.5, "disk": 0.5}, {"gpu": 0.5, "disk": 0.5}, THIRDS, lookahead=2), "gpu"),
    EvictionConfig("h2o", budget=10),
    26,
    profile(
        links=_slow_links(cpu_gpu=1e6, gpu_cpu=1e7, cpu_disk=1e8, disk_cpu=1e6),
        slowdown={
            "compute": {"disk->cpu": 1.2, "cpu->disk": 1.4},
            "disk->cpu": {"compute": 1.1, "cpu->disk": 1.7},
        },
    ),
)
@example(
    (OffloadPolicy(1, 4, THIRDS, {"disk": 1.0}, {"gpu": 0.2, "cpu": 0.6, "disk": 0.2}, lookahead=3), "gpu"),
    EvictionConfig("h2o", budget=10),
    18,
    profile(
        links=_slow_links(cpu_gpu=1e6, gpu_cpu=1e8, cpu_disk=1e7, disk_cpu=1e6),
        slowdown={"cpu->disk": {"disk->cpu": 2.0}, "gpu->cpu": {"cpu->gpu": 1.3}},
    ),
)
@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(plans(), EVICTIONS, st.integers(5, 60), machines())
def test_few_steps_say_what_all_would(
    plan: tuple[OffloadPolicy, str], eviction: EvictionConfig, steps: int, machine: HardwareProfile
) -> None:
    model = model_of(plan[0], eviction=eviction, workload=Workload(24, steps), tier=plan[1], machine=machine)
    few, every = simulate(model), simulate(model, steps=steps)
    assert few.prefill_s == pytest.approx(every.prefill_s)
    # The last step of all reads no weights ahead, which a step in the middle does.
    loads = [Task(TaskKind.LOAD_WEIGHTS, 0, unit.index, NO_BATCH) for unit in model.spec.units]
    longest = max((move.seconds for load in loads for move in model.price(load).transfers), default=0.0)
    ahead = (model.policy.lookahead + 1) * longest
    assert few.decode_s == pytest.approx(every.decode_s, rel=0.02, abs=ahead)
    for resource in every.busy:
        assert few.busy[resource] == pytest.approx(every.busy[resource], rel=0.02, abs=2 * ahead)


@given(st.integers(1, 5), st.integers(1, 4), EVICTIONS, st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_nothing_but_compute_is_the_sum_of_its_compute(
    rows: int, batches: int, eviction: EvictionConfig, steps: int
) -> None:
    model = model_of(OffloadPolicy(rows, batches), eviction=eviction, workload=Workload(24, steps))
    found = simulate(model)
    sums = [
        sum(
            model.price(Task(TaskKind.COMPUTE, step, unit.index, batch)).seconds
            for unit in model.spec.units
            for batch in range(batches)
        )
        for step in range(steps)
    ]
    assert found.prefill_s == pytest.approx(sums[0])
    assert found.decode_s == pytest.approx(sum(sums[1:]))
    assert found.busy == pytest.approx({"compute": sum(sums)})
    assert found.bytes_moved == {}


@settings(max_examples=30, deadline=None)
@given(plans(), EVICTIONS, machines(disturbed=False), st.sampled_from(LINKS), st.floats(1.0, 50.0))
def test_a_faster_link_is_never_slower(
    plan: tuple[OffloadPolicy, str], eviction: EvictionConfig, machine: HardwareProfile, link: str, factor: float
) -> None:
    model, slow = model_of(plan[0], eviction=eviction, tier=plan[1]), machine.links
    fast = {**slow, link: LinkRate(slow[link].bytes_per_s * factor)}
    total = [simulate(asked(model, profile=profile(links=links))).total_s for links in (fast, slow)]
    assert total[0] <= total[1] * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(plans(), EVICTIONS, machines(disturbed=False))
def test_overlap_never_costs_and_resources_bound_the_total(
    plan: tuple[OffloadPolicy, str], eviction: EvictionConfig, machine: HardwareProfile
) -> None:
    model = model_of(plan[0], eviction=eviction, tier=plan[1], machine=machine)
    found = simulate(model, steps=model.steps)
    serial = simulate(replace(model, policy=replace(plan[0], overlap=False)), steps=model.steps)
    assert found.total_s <= serial.total_s * (1 + 1e-9)
    for resource, seconds in found.busy.items():
        assert seconds <= found.total_s * (1 + 1e-9)
        assert found.timeline.busy(resource) >= seconds * (1 - 1e-9) or resource == "compute"


def test_a_slow_link_is_all_that_counts() -> None:
    model = model_of(OffloadPolicy(2, 2, **on(weights="disk")), workload=Workload(24, 50))
    slow = LinkRate(1e6)
    found = simulate(asked(model, profile=profile(links={**model.machine.links, "disk->cpu": slow})))
    assert found.total_s == pytest.approx(slow.seconds(found.bytes_moved["disk->cpu"]), rel=0.02)


def test_disturbance_costs_what_it_says() -> None:
    model = model_of(OffloadPolicy(2, 2, **on(weights="disk")), workload=Workload(24, 50))
    slow = {**model.machine.links, "disk->cpu": LinkRate(1e6)}
    alone = simulate(asked(model, profile=profile(links=slow)))
    disturbed = simulate(asked(model, profile=profile(links=slow, slowdown={"compute": {"disk->cpu": 2.0}})))
    assert disturbed.busy["compute"] == pytest.approx(2 * alone.busy["compute"], rel=0.05)
    assert disturbed.total_s == pytest.approx(alone.total_s, rel=0.02)


def test_caches_are_bounded_by_the_budget() -> None:
    policy = OffloadPolicy(2, 2, **on(cache="disk"))
    times: dict[str, list[float]] = {"full": [], "h2o": []}
    for length in (30, 60, 90):
        for name, config in (("full", EvictionConfig()), ("h2o", EvictionConfig("h2o", budget=16))):
            found = simulate(model_of(policy, eviction=config, workload=Workload(length, 20)))
            times[name].append(found.bytes_moved["disk->cpu"] / 19)
    assert times["h2o"][0] == times["h2o"][1] == times["h2o"][2] < times["full"][0] < times["full"][1]
    assert simulate(model_of(policy)).model.placement.cache[0, 0] == "disk"


def test_a_call_is_the_sum_of_its_blocks() -> None:
    """Eleven sequences in blocks of 2 x 2: two whole ones, and one of 2 and 1."""
    model = model_of(OffloadPolicy(2, 2, **on(weights="disk")))
    call = predict(asked(model, workload=replace(model.request.workload, num_sequences=11)))
    whole, rest = simulate(replace(model, batches=(2, 2))), simulate(replace(model, batches=(2, 1)))
    assert call.blocks == 3
    assert call.prefill_s == pytest.approx(2 * whole.prefill_s + rest.prefill_s)
    assert call.decode_s == pytest.approx(2 * whole.decode_s + rest.decode_s)
    assert call.bytes_moved == {"disk->cpu": 3 * whole.bytes_moved["disk->cpu"]}
    assert (call.sequences, call.prompt_tokens, call.generated_tokens) == (11, 11 * 24, 11 * 8)
    assert call.to_json()["gen_throughput"] == pytest.approx(88 / (call.prefill_s + call.decode_s))
    assert call.to_json()["bound"]["resource"] == call.bound.resource


def test_more_gpu_batches_share_the_weights() -> None:
    spec = known("opt-1.3b")
    found = [
        simulate(model_of(OffloadPolicy(8, batches, **on(weights="disk")), spec=spec, workload=Workload(16, 64)))
        for batches in (1, 4)
    ]
    assert found[0].bytes_moved == found[1].bytes_moved
    assert (found[1].gen_throughput or 0) > 2 * (found[0].gen_throughput or 0)


def test_placements_of_absent_batches_do_not_matter() -> None:
    model = model_of(OffloadPolicy(2, 3, **on(weights="disk", cache="disk")))
    shorter = Placement(
        model.placement.weights, {p: t for p, t in model.placement.cache.items() if p[1] < 2}, {0: "cpu", 1: "cpu"}
    )
    few = replace(model, batches=(2, 1))
    assert simulate(few).spans == simulate(replace(few, placement=shorter)).spans
