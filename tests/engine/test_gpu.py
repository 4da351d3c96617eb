"""What an engine takes of a GPU: its limits, what running out there means, and how its computes are timed."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.engine.limits.plan import _exhausted
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.errors import MemoryRefused, is_out_of_memory
from h2o_flexgen.memory import pinned
from h2o_flexgen.memory.cuda import Stream
from h2o_flexgen.memory.device_copies import BOUNCE_BYTES
from h2o_flexgen.memory.tiers import HostMemory
from h2o_flexgen.schedule.tasks import Task, TaskKind
from tests.memory.fake_cuda import FakeDevice, FakeMark
from tests.tiny import prompts_of

GIB = 1 << 30


def test_a_cap_is_at_most_what_others_leave() -> None:
    """12 of 16 GiB: the rest is the context's, or somebody else's."""
    device = FakeDevice()
    limit = devices.gpu_limit(device, 8 * GIB)
    assert 7.7 * GIB < limit.nbytes < 8 * GIB, "libraries work within what torch may allocate"
    assert limit.why.startswith("--gpu-mem, less ")
    limit = devices.gpu_limit(device, 16 * GIB)
    assert 11.6 * GIB < limit.nbytes < 12 * GIB
    assert "16 GiB" in limit.why
    assert "12 GiB" in limit.why
    assert devices.gpu_limit(device, 8 << 20).nbytes == 0, "less than libraries take"
    assert devices.gpu_limit(device, None).nbytes == int(0.9 * 12 * GIB)
    beside = devices.gpu_limit(device, None, 3 * GIB)
    assert beside.nbytes == int(0.9 * 12 * GIB) - 3 * GIB
    assert beside.why == "90% of 12 GiB free of the 16 GiB on the GPU, less 3 GiB that other engines hold"
    assert devices.gpu_limit(device, 8 << 20, 3 * GIB).nbytes == 0
    assert devices.open_gpu([torch.device("cpu")]) is None


@pytest.mark.parametrize("emulated", [None, "1GiB"])
def test_an_emulated_gpu_cuts_prompts_as_the_cpu_that_it_is(emulated: str | None, checkpoint) -> None:
    with Engine(checkpoint("opt")[1], dtype="float32", emulate_gpu=emulated) as llm:
        llm.generate(prompts_of([5]), max_new_tokens=2)
        assert llm.last_plan.policy.prefill_chunk == llm.last_record.policy["prefill_chunk"] == 2048


@pytest.mark.parametrize("asked", [66, 100, 256, 400, 511, 512, 600, 4096])
def test_libraries_have_room_under_any_cap(asked: int) -> None:
    """Two working buffers of cuBLAS, of 32 MiB each, and 2 % for gaps."""
    limit = devices.gpu_limit(FakeDevice(), asked << 20)
    slack = (asked << 20) - limit.nbytes
    assert slack == (64 << 20) + (asked << 20) // 50
    assert limit.nbytes > 0


UNLIMITED = resource.RLIM_INFINITY
SOME = BOUNCE_BYTES + (1 << 20)


@pytest.mark.parametrize(
    ("soft", "capabilities", "setting", "most"),
    [
        (SOME, "0000000000000000", "1", SOME),
        (SOME, "00000000a80425fb", "1", SOME),  # as containers have them: not that one
        (SOME, "0000000000004000", "1", None),  # CAP_IPC_LOCK
        (SOME, "000001fffeffffff", "1", None),
        (SOME, None, "1", SOME),
        (UNLIMITED, "0000000000000000", "1", None),
        (SOME, "0000000000000000", None, None),
        (64 << 10, "0000000000000000", "1", 64 << 10),
    ],
)
def test_no_more_is_locked_than_the_limit_allows(
    soft: int,
    capabilities: str | None,
    setting: str | None,
    most: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RLIMIT_MEMLOCK, where it is asked for and holds; the buffers that everything goes through come first."""
    status = tmp_path / "status"
    if capabilities is not None:
        status.write_text(f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\nThreads:\t2\n")
    monkeypatch.setattr(pinned, "_STATUS", str(status))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, UNLIMITED))
    monkeypatch.delenv("H2O_FLEXGEN_MEMLOCK", raising=False)
    if setting is not None:
        monkeypatch.setenv("H2O_FLEXGEN_MEMLOCK", setting)
    monkeypatch.setattr(devices, "open_device", lambda device: FakeDevice())
    assert pinned.lockable_memory() == most
    pool = devices.open_gpu([torch.device("cuda")])
    assert pool is not None
    assert pool.limit == (most or pool.limit)
    assert (pool.bounce is None) == (most == 64 << 10)
    block = HostMemory().allocate(2 << 20).tensor
    pool.lock(block, pinned.Pin.IF_ROOM)
    assert pool.device.locked(block) == (most is None)
    pool.close()


@pytest.mark.parametrize(
    ("error", "tier"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 15.00 GiB allowed"), "gpu"),
        (MemoryRefused("the GPU refused 2 GiB"), "gpu"),
        (RuntimeError("CUDA error: out of memory"), "gpu"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "gpu"),
        (MemoryRefused("the system refused 2 GiB of host memory (Cannot allocate memory)"), "cpu"),
        (MemoryError(), "cpu"),
    ],
    ids=str,
)
def test_whose_memory_ran_out(error: Exception, tier: str, checkpoint) -> None:
    with Engine(checkpoint("opt")[1], dtype="float32", emulate_gpu="1GiB") as llm:
        llm.generate(prompts_of([5]), max_new_tokens=2)
        plan = llm.last_plan
    real = replace(plan, request=replace(plan.request, caps=replace(plan.request.caps, emulated=False)))
    assert is_out_of_memory(error)
    assert _exhausted(error, real) == tier


class Late(FakeDevice):
    """Whose computes are through when `through` says so."""

    through = False

    def passed(self, mark: FakeMark) -> bool:
        return self.through

    def synchronize(self, mark: FakeMark) -> None:
        self.through = True
        super().synchronize(mark)


def test_computes_are_timed_by_marks(checkpoint) -> None:
    with Engine(checkpoint("opt")[1], dtype="float32") as llm:
        unit = llm.model.spec.units[1]
    device = Late()
    trace = Trace(enabled=True, devices=[device])
    marks: list[FakeMark] = []
    record = device.record

    def noted(stream: Stream) -> FakeMark:
        marks.append(record(stream))
        marks[-1].time = 10.0 * len(marks)
        return marks[-1]

    device.record = noted  # type: ignore[method-assign]
    for step in range(3):
        with trace.record(Task(TaskKind.COMPUTE, step, unit.index, 0), unit, 0.25):
            pass
    assert device.host_waits == [], "nobody waits before somebody reads"
    assert trace.compute_seconds == {f"prefill.{unit.kind}": 7.5, f"decode.{unit.kind}": 22.5}
    assert len(device.host_waits) == 1
    rows = trace.timeline().rows
    assert [row.task for row in rows] == [f"{unit.name} step {step} batch 0" for step in range(3)]
    assert [row.end - row.start for row in rows] == pytest.approx([10.0] * 3)
    device.capturing = lambda: True  # type: ignore[method-assign]
    with trace.record(Task(TaskKind.COMPUTE, 3, unit.index, 0), unit, 0.0):
        pass
    assert len(marks) == 6, "no marks where work is recorded for later"
