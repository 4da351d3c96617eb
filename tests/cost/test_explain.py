"""What is said about a policy, and that it is true."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.explain import bound_text, cache_row, explain, least_traffic, to_json
from h2o_flexgen.cost.search import SearchResult, search
from h2o_flexgen.errors import PlanError
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.schedule.work import io_lower_bound
from h2o_flexgen.units import GIB
from tests.cost.machines import known, profile, rates


@pytest.fixture(scope="module")
def result() -> SearchResult:
    """OPT-1.3B with a fifth of its weights in memory: disk reads are what takes the time."""
    request = PlanRequest(
        spec=known("opt-1.3b"),
        workload=Workload(64, 16, 20),
        eviction=EvictionConfig("h2o", ratio=0.25),
        dtype="float16",
        caps=Caps(cpu=GIB, disk=8 * GIB),
        compute_tier="cpu",
        profile=profile(),
    )
    return search(request)


def lines_of(result: SearchResult) -> dict[str, str]:
    return {line[:12].strip(): line[12:] for line in explain(result).splitlines()}


def test_the_bound_is_what_takes_the_time(result: SearchResult) -> None:
    said = bound_text(result.best.prediction)
    found = re.fullmatch(r"disk reads: ([0-9.]+) GB per step, busy for (\d+)% of the run", said)
    assert found, said
    model = result.best.prediction.block.model
    steps = range(1, model.steps)
    moved = sum(each.nbytes for (link, _), each in model.moves.traffic(steps).items() if link == "disk->cpu")
    assert float(found[1]) == pytest.approx(moved / len(steps) / 1e9, rel=0.01)
    assert int(found[2]) >= 80
    assert lines_of(result)["bound"] == said


def test_computing_is_explained_by_its_largest_part(result: SearchResult) -> None:
    request = dataclasses.replace(result.best.request, caps=Caps(cpu=64 * GIB))
    said = bound_text(search(request).best.prediction)
    assert re.fullmatch(
        r"computing: .+ (per step|for the prompts), .+ of it for [a-z]+: .+; busy for 100% of the run", said
    )


def test_every_line_is_there(result: SearchResult) -> None:
    lines = lines_of(result)
    assert list(lines) == [
        *("model", "work", "block", "weights", "cache", "hidden", "prefill", "decode", "throughput", "bound"),
        *("traffic", "memory", "binding", "runner-up", "1 GiB more", "searched"),
    ]
    assert lines["work"] == "20 sequences, 64 + 16 tokens; h2o keeps 20 tokens per head"
    assert lines["binding"] == "--cpu-mem, the cpu tier's cap"
    assert all("(predicted)" in lines[name] for name in ("prefill", "decode", "throughput"))
    assert re.search(r"cpu \+[0-9.e+]+ tokens/s, disk \+0 tokens/s", lines["1 GiB more"])
    assert "of 1 GiB" in lines["memory"]


def test_traffic_is_never_below_the_least(result: SearchResult) -> None:
    least = least_traffic(result)
    assert least
    for link, nbytes in least.items():
        assert result.best.prediction.bytes_moved[link] >= nbytes
    (found,) = re.findall(r"disk->cpu [0-9.]+ GB, ([0-9.]+) times the least", lines_of(result)["traffic"])
    assert float(found) == pytest.approx(result.best.prediction.bytes_moved["disk->cpu"] / least["disk->cpu"], abs=0.01)
    block = result.best.prediction.block
    one = io_lower_bound(result.best.request, block.sequences)
    assert least["disk->cpu"] == one["disk->cpu"] * (20 // block.sequences)


def test_the_entry_is_plain_json(result: SearchResult) -> None:
    entry = json.loads(json.dumps(to_json(result)))
    assert entry["policy"] == result.best.policy.to_json()
    assert entry["predicted"]["gen_throughput"] == pytest.approx(result.best.prediction.gen_throughput)
    assert entry["predicted"]["gen_throughput"] == pytest.approx(
        20 * 16 / (entry["predicted"]["prefill_s"] + entry["predicted"]["decode_s"])
    )
    assert entry["binding"] == "cpu"
    assert entry["projected"] is True
    assert entry["peak_bytes"]["cpu"] <= entry["caps"]["cpu"]
    assert entry["runner_up"]["gen_throughput"] > 0
    assert entry["eviction"]["tokens"] == 20


def test_of_one_plan_alone_there_is_no_runner_up(result: SearchResult) -> None:
    policy = result.best.policy
    fixed = {item.name: getattr(policy, item.name) for item in dataclasses.fields(policy)}
    alone = search(dataclasses.replace(result.best.request, fixed=fixed))
    assert "runner-up" not in lines_of(alone)
    assert to_json(alone)["runner_up"] is None


@pytest.mark.slow
def test_attention_on_the_cpu_beside_a_gpu() -> None:
    """A GPU behind a slow link, and a CPU that attends as fast: caches stay on the CPU, and the reader is told."""
    slow = profile({"gpu": rates(), "cpu": rates()}, links={**profile().links})
    links = {name: dataclasses.replace(rate, bytes_per_s=2e8) for name, rate in slow.links.items()}
    request = PlanRequest(
        spec=known("opt-125m"),
        workload=Workload(512, 32),
        eviction=EvictionConfig(),
        dtype="float16",
        caps=Caps(gpu=GIB, cpu=8 * GIB, disk=0),
        compute_tier="gpu",
        profile=dataclasses.replace(slow, links=links),
        fixed={"gpu_batch_size": 32, "num_gpu_batches": 8},
        endless=True,
    )
    found = search(request)
    assert found.best.policy.cpu_cache_compute
    assert found.best.policy.cache["cpu"] > 0.5
    assert lines_of(found)["attention"] == "of caches on the CPU is computed there"
    assert lines_of(found)["work"].startswith("one block of as many as there are")


def test_what_a_smaller_cache_buys(result: SearchResult) -> None:
    """As many sequences as a search accepts where everything has to stay on the compute tier, and none more."""
    full = dataclasses.replace(result.best.request, caps=Caps(cpu=4 * GIB, disk=8 * GIB), eviction=EvictionConfig())
    small = dataclasses.replace(full, eviction=EvictionConfig("h2o", ratio=0.25), endless=True)
    none = dataclasses.replace(full, caps=Caps(cpu=GIB // 8, disk=GIB // 8))
    rows = [cache_row(request, "highs") for request in (full, small, none)]
    for request, row in zip((full, small), rows, strict=False):
        stays = {"weights": {"cpu": 1.0}, "cache": {"cpu": 1.0}, "hidden": {"cpu": 1.0}, "num_gpu_batches": 1}
        for sequences, fits in ((row["most_sequences"], True), (row["most_sequences"] + 1, False)):
            fixed = dataclasses.replace(request, endless=True, fixed={**stays, "gpu_batch_size": sequences})
            if fits:
                assert search(fixed).best.prediction.block.sequences == sequences
            else:
                with pytest.raises(PlanError):
                    search(fixed)
    assert rows[1]["most_sequences"] > rows[0]["most_sequences"] > 1
    assert (rows[1]["sequences"], rows[1]["gen_throughput"]) == (
        (best := search(small).best.prediction).block.sequences,
        best.gen_throughput,
    )
    assert (rows[2]["most_sequences"], rows[2]["sequences"], rows[2]["gen_throughput"]) == (0, None, None)
    assert json.loads(json.dumps(rows)) == rows
