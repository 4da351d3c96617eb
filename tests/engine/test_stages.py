"""Several GPUs: the tokens of one, whatever moves and however batches and layers are divided; bytes and refusals.

The GPUs are emulated in host memory.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution.stages import ActivationTransfer
from h2o_flexgen.engine.state.backing import HiddenStore
from h2o_flexgen.errors import PlanError, UsageError
from tests.tiny import prompts_of

pytestmark = pytest.mark.usefixtures("rewriting")

LENGTHS = [23, 40, 12, 40, 31, 8, 19, 27, 5, 33]
NEW = 9  # more than the steps after which a moving cache is rewritten
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
GPU, CPU, DISK = {"gpu": 1.0}, {"cpu": 1.0}, {"disk": 1.0}
THREE = {"gpu": 0.3, "cpu": 0.3, "disk": 0.4}
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"weights": GPU, "cache": GPU, "hidden": GPU},
    "weights on cpu": {"weights": CPU, "cache": GPU, "hidden": GPU},
    "all on cpu": {"weights": CPU, "cache": CPU, "hidden": CPU},
    "all on disk": {"weights": DISK, "cache": DISK, "hidden": DISK, "lookahead": 2},
    "three tiers": {"weights": THREE, "cache": THREE, "hidden": THREE},
    "no overlap": {"weights": CPU, "cache": DISK, "hidden": CPU, "overlap": False},
    "attention on the host": {"weights": CPU, "cache": CPU, "hidden": GPU, "cpu_cache_compute": True},
}
FULL, H2O = EvictionConfig("full"), EvictionConfig("h2o", ratio=0.3)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Tokens of one device, one prompt at a time, by model and policy."""
    made: dict[tuple[str, str], list[list[int]]] = {}

    def make(model: str, eviction: EvictionConfig) -> list[list[int]]:
        key = model, eviction.name
        if key not in made:
            with Engine(checkpoint(model)[1], dtype="float32", eviction=eviction, policy={"gpu_batch_size": 1}) as llm:
                made[key] = [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)]
        return made[key]

    return make


def several(folder: str, gpus: int, place: str, block: tuple[int, int], **settings: Any) -> Engine:
    policy = {**PLACES[place], "gpu_batch_size": block[0], "num_gpu_batches": block[1]}
    engine = {"dtype": "float32", "eviction": H2O, "emulate_gpu": "1GiB", **settings}
    return Engine(folder, num_gpus=gpus, policy=policy, **engine)


CASES = [
    ("opt", FULL, 2, "resident", (5, 2)),
    ("opt", H2O, 3, "resident", (2, 5)),
    ("opt", H2O, 2, "resident", (4, 1)),
    ("llama", H2O, 2, "resident", (3, 3)),
    ("opt-untied", H2O, 3, "resident", (3, 2)),
    ("llama-tied", FULL, 3, "weights on cpu", (2, 3)),
    ("llama", FULL, 2, "all on cpu", (2, 5)),
    ("llama-tied", H2O, 2, "all on disk", (2, 3)),
    ("opt-untied", FULL, 3, "three tiers", (2, 5)),
    ("opt", H2O, 2, "three tiers", (2, 4)),
    ("opt", H2O, 2, "no overlap", (2, 4)),
    ("llama", H2O, 2, "attention on the host", (2, 4)),
    ("gpt-neox", H2O, 3, "all on cpu", (2, 4)),
    ("opt", H2O, 8, "weights on cpu", (1, 8)),
]


@pytest.mark.turns
@pytest.mark.parametrize(("model", "eviction", "gpus", "place", "block"), CASES, ids=str)
def test_the_tokens_of_one_device(model, eviction, gpus, place, block, checkpoint, expected) -> None:
    """Ten prompts in fewer places: some wait for others to finish, or for the block after the first."""
    with several(checkpoint(model)[1], gpus, place, block, eviction=eviction) as llm:
        outputs = llm.generate(prompts_of(LENGTHS), **SETTINGS)
        assert [output.token_ids for output in outputs] == expected(model, eviction)
        record, plan = llm.last_record, llm.last_plan
    assert record.policy["num_gpus"] == gpus
    peaks = [stage["peak_bytes"] for stage in record.policy["stages"]]
    assert record.peak_bytes["gpu"] == max(peaks) <= plan.footprint.total("gpu")
    assert min(peaks) > 0
    assert (record.peak_bytes["cpu"] or 0) <= plan.footprint.total("cpu") - plan.request.baseline
    assert (record.peak_bytes["disk"] or 0) <= plan.footprint.total("disk")
    assert record.bytes_moved["gpu->gpu"] > 0


@pytest.mark.slow
def test_rows_that_finish_make_room_in_their_own_group(checkpoint) -> None:
    """Lengths that differ by far, few places: groups change at different times, and end at different times."""
    new = [3, 17, 5, 2, 11, 1, 7, 16, 4, 9]
    prompts = prompts_of(LENGTHS)
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in new]
    folder = checkpoint("opt")[1]
    with Engine(folder, dtype="float32", eviction=H2O, policy={"gpu_batch_size": 1}) as llm:
        alone = [output.token_ids for output in llm.generate(prompts, params)]
    for gpus, place, block in ((2, "resident", (2, 2)), (3, "all on cpu", (1, 4)), (2, "weights on cpu", (2, 1))):
        with several(folder, gpus, place, block) as llm:
            assert [output.token_ids for output in llm.generate(prompts, params)] == alone
            assert llm.last_record.generated_tokens == sum(new)


@pytest.mark.slow
def test_prompts_with_a_common_beginning_share_it_within_a_group(checkpoint) -> None:
    header = prompts_of([40])[0]
    prompts = [[*header, 10 + i, *tail[2:]] for i, tail in enumerate(prompts_of([6, 10, 4, 8], seed=1))]
    folder = checkpoint("llama")[1]
    with Engine(folder, dtype="float32", eviction=H2O) as llm:
        alone = [output.token_ids for output in llm.generate(prompts, **SETTINGS)]
    with several(folder, 2, "all on cpu", (1, 4)) as llm:
        assert [output.token_ids for output in llm.generate(prompts, **SETTINGS)] == alone
        record = llm.last_record
    # Once for each of two groups instead of once for each of four prompts.
    assert record.computed_prompt_tokens == record.prompt_tokens - 2 * len(header)


def test_a_plan_by_rule_divides_the_work_and_each_gpu_has_its_cap(checkpoint, expected) -> None:
    folder = checkpoint("opt")[1]
    with Engine(folder, dtype="float32", eviction=H2O, num_gpus=2, emulate_gpu="1GiB") as llm:
        assert [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)] == expected("opt", H2O)
        plan, record = llm.last_plan, llm.last_record
    assert (plan.policy.gpu_batch_size, plan.policy.num_gpu_batches) == (5, 2)
    assert record.policy["weights"] == GPU
    one, two = (Engine(folder, dtype="float32", num_gpus=n, emulate_gpu="1GiB") for n in (1, 2))
    workload = Workload(100, 20, 64)
    with one, two:
        held = [{i.what: i.nbytes for i in llm.plan(workload).footprint.items if i.tier == "gpu"} for llm in (one, two)]
        assert held[0]["weights"] / 2 < held[1]["weights"] < held[0]["weights"]
        needed = two.plan(workload).footprint.total("gpu")
        policy = {**PLACES["resident"], **two.plan(workload).policy.to_json()}
    engine: dict[str, Any] = {"dtype": "float32", "num_gpus": 2, "policy": policy}
    with Engine(folder, emulate_gpu=needed, **engine) as llm:
        assert llm.plan(workload).footprint.total("gpu") == needed
    with Engine(folder, emulate_gpu=needed - 1, **engine) as llm, pytest.raises(PlanError, match="on the gpu tier"):
        llm.plan(workload)


@pytest.mark.parametrize("gpus", [2, 3, 7])
def test_hidden_states_that_are_parked_are_counted(gpus: int, checkpoint, monkeypatch) -> None:
    """What the engine notes for a roofline, beside what its stores were given."""
    stored = []
    inner = HiddenStore.store

    def store(self: HiddenStore, gpu_batch: Any) -> None:
        stored.append(gpu_batch.hidden.numel() * gpu_batch.hidden.itemsize)
        inner(self, gpu_batch)

    monkeypatch.setattr(HiddenStore, "store", store)
    with several(checkpoint("opt")[1], gpus, "all on cpu", (1, 2 * gpus)) as llm:
        llm.generate(prompts_of([9] * 2 * gpus), max_new_tokens=4, ignore_eos=True)
        phases = llm.last_work.phases.values()
    assert sum(work.moved["gpu->cpu", "hidden"] for work in phases) == pytest.approx(sum(stored))


@pytest.mark.parametrize(("gpus", "batches"), [(2, 5), (8, 8)])
def test_buffers_between_gpus_are_what_was_planned(gpus: int, batches: int, checkpoint, monkeypatch) -> None:
    what, held = "hidden states between GPUs", set()
    inner = ActivationTransfer.send

    def send(self: ActivationTransfer, gpu_batch: Any) -> None:
        held.update(stage.tiers.compute.items.get(what, 0) for stage in llm._loaded.stages)
        inner(self, gpu_batch)

    monkeypatch.setattr(ActivationTransfer, "send", send)
    with several(checkpoint("opt")[1], gpus, "resident", (1, batches)) as llm:
        llm.generate(prompts_of([40] * batches), max_new_tokens=2, ignore_eos=True)
        planned = {item.what: item.nbytes for item in llm.last_plan.footprint.items if item.tier == "gpu"}
    assert planned[what] in held, "planned are those of the fullest GPU, which need not have most"
    assert planned[what] > 0


def test_the_caps_of_a_later_plan_hold_on_every_gpu(checkpoint) -> None:
    with several(checkpoint("opt")[1], 2, "three tiers", (1, 2)) as llm:
        llm.generate(prompts_of([9] * 2), max_new_tokens=2, ignore_eos=True)
        loaded, request = llm._loaded, llm.last_plan.request
        caps = replace(request.caps, gpu=3 << 20, cpu=request.baseline + (5 << 20), disk=None)
        loaded.recap(replace(llm.last_plan, request=replace(request, caps=caps)))
        for stage in loaded.stages:
            tiers = stage.tiers.gpu, stage.tiers.cpu, stage.tiers.disk
            assert [tier.capacity for tier in tiers] == [3 << 20, 5 << 20, None]


def test_the_timeline_tells_the_devices_apart(checkpoint) -> None:
    with several(checkpoint("opt")[1], 2, "all on cpu", (2, 4), trace=True) as llm:
        llm.generate(prompts_of(LENGTHS), max_new_tokens=3, ignore_eos=True)
        resources = set(llm.timeline.resources)
    assert {"compute", "compute 1", "cpu->gpu", "cpu->gpu 1", "gpu->gpu 1"} <= resources


def test_too_many_gpus_are_refused(checkpoint) -> None:
    folder = checkpoint("opt")[1]
    with pytest.raises(UsageError, match="--num-gpus is 2, and this run computes on the CPU"):
        Engine(folder, num_gpus=2, device="cpu")
    with (
        pytest.raises(UsageError, match=r"--num-gpus is 9, and .* has 8 units"),
        Engine(folder, num_gpus=9, emulate_gpu="1GiB") as llm,
    ):
        llm.generate(prompts_of([5]), max_new_tokens=2)
    with pytest.raises(UsageError, match=r"num_gpus is 0. needed at least 1"):
        Engine(folder, num_gpus=0)


@pytest.fixture(autouse=True)
def _nothing_runs_on():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("h2o-")]
