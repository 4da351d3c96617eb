"""Attention on the host beside the GPU, priced: by hand, and beside a second account of who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import Curve, LinkRate
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.explain import bound_text
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.simulate import predict, simulate
from h2o_flexgen.schedule.tasks import NO_BATCH, Task, TaskKind
from h2o_flexgen.schedule.workspace import HOST_ATTENTION
from tests.cost.machines import LINKS, TINY, asked, model_of, profile, rates, ticking

GPU, CPU = {"gpu": 1.0}, {"cpu": 1.0}


def machine(attends: float, down: float, up: float, **ticks: float) -> HardwareProfile:
    """Ticks of a second on the GPU unless said otherwise; on the host a step of a cache takes `attends`."""
    curve = Curve(((1e30, attends),))
    host = rates(decode_attention={"plain": curve, "scored": curve})
    links = {name: LinkRate(1e40, latency_s=1e-9) for name in ("disk->cpu", "cpu->disk")}
    links |= {"gpu->cpu": LinkRate(1e40, latency_s=down), "cpu->gpu": LinkRate(1e40, latency_s=up)}
    return profile({"gpu": ticking(**ticks), "cpu": host}, links=links)


def of(policy: OffloadPolicy, where: HardwareProfile, layers: int = 1, steps: int = 2) -> CostModel:
    spec = replace(TINY, num_layers=layers, arch=replace(TINY.arch, tied_head=False))
    return model_of(policy, spec=spec, workload=Workload(24, steps), machine=where, tier="gpu")


def spans(model: CostModel, resource: str) -> list[tuple[str, object, object]]:
    rows = [row for row in simulate(model).timeline.rows if row.resource == resource and "step 1" in row.task]
    return [(row.task.replace(" step 1 batch", ""), pytest.approx(row.start), pytest.approx(row.end)) for row in rows]


def test_the_gpu_goes_on_while_the_host_attends() -> None:
    model = of(OffloadPolicy(1, 2, GPU, CPU, GPU, cpu_cache_compute=True), machine(5, down=0.5, up=0.25))
    # After the prompt's pass of eight ticks, beside which its keys and values go down.
    assert spans(model, HOST_ATTENTION) == [("layers.0.attn 0", 11.5, 16.5), ("layers.0.attn 1", 16.5, 21.5)]
    assert [span for span in spans(model, "compute") if "attn" not in span[0]] == [
        ("embed 0", 8, 9),
        ("embed 1", 9, 10),
        ("layers.0.mlp 0", 16.75, 17.75),  # while the host attends for the other
        ("layers.0.mlp 1", 21.75, 22.75),
        ("head 0", 22.75, 23.75),
        ("head 1", 23.75, 24.75),
    ]
    assert [span[:2] for span in spans(model, "gpu->cpu")] == [("layers.0.attn 0", 11), ("layers.0.attn 1", 12)]
    assert [span[1] for span in spans(model, "cpu->gpu")] == [16.5, 21.5]
    found = simulate(model)
    assert found.busy[HOST_ATTENTION] == pytest.approx(10, abs=1e-4)


@pytest.mark.parametrize("changes", [{"overlap": False}, {"num_gpu_batches": 1}], ids=str)
def test_one_after_the_other_where_nothing_could_go_on(changes: dict[str, int]) -> None:
    policy = OffloadPolicy(**{"gpu_batch_size": 1, "num_gpu_batches": 2, **changes}, cpu_cache_compute=True)
    model = of(replace(policy, weights=GPU, cache=CPU, hidden=GPU), machine(5, down=0.5, up=0.25))
    found = simulate(model)
    assert not spans(model, HOST_ATTENTION)
    # Queries, keys and values one by one, and the answer.
    assert found.decode_s == pytest.approx(policy.num_gpu_batches * (4 + 5 + 3 * 0.5 + 0.25))


def account(model: CostModel) -> float:
    """Seconds of all decode steps, from prices of halves and of the host: nothing moves but for attention."""
    prices, batches = model.compute, range(len(model.batches))
    device = host = link = 0.0
    buffers, filled = [0.0, 0.0], dict[tuple[int, int], float]()
    for unit in model.spec.units:
        for batch in batches:
            task = Task(TaskKind.COMPUTE, 0, unit.index, batch)
            if unit.kind == "attn" and model.placement.cache[unit.layer or 0, batch] == "cpu":
                device = max(device, buffers[0]) + sum(prices.parts(task).values())
                link = max(link, device) + model.price(task).transfers[0].seconds
                host = filled[unit.layer or 0, batch] = max(host, link) + model.price(task).host
                buffers = [buffers[1], host]
            else:
                device += sum(prices.parts(task).values())
    prompts = device
    for step in range(1, model.steps):
        ready = dict.fromkeys(batches, 0.0)
        late: dict[int, Task] = {}
        for unit in model.spec.units:
            for batch in batches:
                if batch in late:
                    device = max(device, ready[batch]) + model.price(late.pop(batch)).finish
                task = Task(TaskKind.COMPUTE, step, unit.index, batch)
                seconds = sum(prices.parts(task).values())
                if unit.kind != "attn" or model.placement.cache[unit.layer or 0, batch] != "cpu":
                    device += seconds
                    continue
                device = max(device, filled[unit.layer or 0, batch]) + seconds - model.price(task).finish
                link = max(link, device) + model.price(task).transfers[0].seconds
                host = max(host, link) + model.price(task).host
                ready[batch], late[batch] = host, task
    return device - prompts


TIMES = st.sampled_from([1e-3, 0.1, 0.7, 1.0, 3.0, 11.0])


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 3), TIMES, TIMES, TIMES, TIMES, TIMES)
def test_who_waits_for_whom(
    batches: int, layers: int, on_cpu: int, attends: float, down: float, up: float, attn: float, mlp: float
) -> None:
    cache = {"cpu": on_cpu / 3, "gpu": 1 - on_cpu / 3}
    policy = OffloadPolicy(2, batches, GPU, {tier: share for tier, share in cache.items() if share}, GPU)
    where = machine(attends, down, up, attn=attn, mlp=mlp)
    model = of(replace(policy, cpu_cache_compute=True), where, layers, steps=5)
    found = simulate(model, steps=5)
    assert found.decode_s == pytest.approx(account(model))
    serial = simulate(replace(model, policy=replace(model.policy, overlap=False)), steps=5)
    assert found.decode_s <= serial.decode_s * (1 + 1e-9)
    if model.shape.host_attends:
        assert found.decode_s >= found.busy[HOST_ATTENTION] * (1 - 1e-9)


@pytest.mark.parametrize("batches", [1, 3])
def test_prompts_are_filled_in_beside_the_next_unit(batches: int) -> None:
    """Four prompts of 24 tokens, two at a time: the third part waits for the first to be filled in."""
    host = rates(fresh_bytes_per_s=2 * 4 * 32 * 64 * 2 / 8.0)  # eight seconds for a cache
    links = {name: LinkRate(1e40, latency_s=0.5) for name in LINKS}
    policy = OffloadPolicy(4, batches, GPU, CPU, GPU, cpu_cache_compute=True, prefill_chunk=48)
    model = of(policy, profile({"gpu": ticking(), "cpu": host}, links=links), steps=8)
    rows = [row for row in simulate(model).timeline.rows if "step 0" in row.task and "attn" in row.task]
    filled = [(row.start, row.end) for row in rows if row.resource == HOST_ATTENTION]
    first = batches + 0.5  # a tick's compute in two parts, each followed by its copy
    assert filled[:2] == [
        (pytest.approx(first + 0.5, abs=1e-3), pytest.approx(first + 4.5, abs=1e-3)),
        (pytest.approx(first + 4.5, abs=1e-3), pytest.approx(first + 8.5, abs=1e-3)),
    ]
    computed = [(row.start, row.end) for row in rows if row.resource == "compute"]
    assert computed[0] == (pytest.approx(batches, abs=1e-3), pytest.approx(batches + 1, abs=1e-3))
    if batches > 1:  # both buffers are in use: the second part waits for the second fill
        assert computed[1] == (pytest.approx(batches + 1, abs=1e-3), pytest.approx(first + 9, abs=1e-3))
    moved = model.moves.traffic(range(1))["gpu->cpu", "prompts"].nbytes
    assert moved == batches * 4 * 24 * 2 * 64 * 2


def test_hidden_states_that_wait_for_the_host_are_not_parked() -> None:
    """Weights stream and hidden states are parked: what the attention unit leaves stays, all else comes and goes."""
    policy = OffloadPolicy(2, 3, CPU, CPU, CPU, cpu_cache_compute=True)
    model = of(policy, profile(), layers=2, steps=3)
    hidden = 2 * 64 * 2
    pages = -(-hidden // 4096) * 4096
    moved = {
        what: traffic.nbytes for (link, what), traffic in model.moves.traffic(range(1, 2)).items() if "gpu->" in link
    }
    assert moved == {"hidden": 3 * 3 * pages, "queries": 2 * 3 * 3 * hidden}  # embed, mlp, mlp; q, k, v
    assert model.price(Task(TaskKind.FREE_WEIGHTS, 1, 1, NO_BATCH)).seconds > 0


def test_terms_say_what_the_host_does() -> None:
    model = of(OffloadPolicy(1, 2, GPU, CPU, GPU, cpu_cache_compute=True), machine(5, down=0.5, up=0.25))
    filling, term = (term for term in model.terms() if term.resource == HOST_ATTENTION)
    assert (filling.phase, filling.name) == ("prefill", "attn: filling caches")
    assert (term.phase, term.unit, term.value) == ("decode", "s", pytest.approx(10))
    assert term.name == "attn: attention of 1 rows over 25 tokens"
    busiest = asked(model, profile=machine(20, down=0.5, up=0.25))
    said = bound_text(predict(busiest))
    assert said.startswith("attention on the CPU: 40 s per step, 40 s of it for attn: attention of 1 rows"), said
    # One GPU batch, and caches that are slow to be written: the host has no part in decode steps.
    slow = profile({"gpu": ticking(), "cpu": rates(fresh_bytes_per_s=1.0)})
    alone = of(OffloadPolicy(1, 1, GPU, CPU, GPU, cpu_cache_compute=True), slow, steps=3)
    assert bound_text(predict(alone)).startswith("attention on the CPU: ")
