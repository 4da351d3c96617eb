"""The executor's trace: the order of the schedule, every resource that worked, and overlap that can be switched off."""

from __future__ import annotations

import json
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.memory.cuda import Device, Stream
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.schedule.tasks import ScheduleShape, Task, TaskKind
from h2o_flexgen.schedule.zigzag import zigzag
from tests.cost.machines import TINY
from tests.memory.fake_cuda import FakeDevice
from tests.tiny import prompts_of

NEW = 4
DISK = {"weights": {"disk": 1.0}, "cache": {"disk": 1.0}, "gpu_batch_size": 2, "num_gpu_batches": 2}


@pytest.fixture(scope="module")
def traced(checkpoint):
    with LLM(checkpoint("opt")[1], dtype="float32", policy=DISK, trace=True) as llm:
        llm.generate(prompts_of([9, 9, 9, 9]), max_new_tokens=NEW, ignore_eos=True)
        return llm.timeline, llm.model.spec


def test_computes_are_traced_in_the_order_of_the_generator(traced) -> None:
    timeline, spec = traced
    shape = ScheduleShape(spec.units, NEW, 2, frozenset(), frozenset(), frozenset())
    expected = [
        f"{spec.units[tick.compute.unit].name} step {tick.compute.step} batch {tick.compute.batch}"
        for tick in zigzag(shape)
        if tick.compute is not None
    ]
    rows = sorted((row for row in timeline.rows if row.resource == "compute"), key=lambda row: row.start)
    assert [row.task for row in rows] == expected


def test_every_link_that_moved_bytes_is_there(traced) -> None:
    timeline, _ = traced
    assert {"compute", "disk->cpu", "cpu->disk"} <= set(timeline.resources)
    assert all(row.end >= row.start for row in timeline.rows)


def test_what_tiers_and_process_hold_is_there(traced) -> None:
    timeline, _ = traced
    held = {tier: [level.nbytes for level in timeline.memory if level.tier == tier] for tier in ("cpu", "process")}
    assert max(held["cpu"]) > 0
    assert min(held["process"]) > max(held["cpu"])
    assert all(len(levels) < 3 or before != now for levels in held.values() for before, now in pairwise(levels))
    assert [level.at for level in timeline.memory] == sorted(level.at for level in timeline.memory)


def test_the_file_opens_as_a_chrome_trace(traced, tmp_path: Path) -> None:
    timeline, _ = traced
    path = tmp_path / "trace.json"
    timeline.write_chrome_trace(path)
    data = json.loads(path.read_text())
    events = data["traceEvents"] if isinstance(data, dict) else data
    assert sum(event["ph"] == "X" for event in events) == len(timeline.rows)


def test_without_trace_nothing_is_kept(checkpoint) -> None:
    with LLM(checkpoint("opt")[1], dtype="float32") as llm:
        llm.generate(prompts_of([5]), max_new_tokens=2)
        assert llm.timeline.rows == ()


def test_marks_are_given_back_once_they_are_booked() -> None:
    """So that a run of many units needs few of them."""
    device = FakeDevice()
    trace = Trace(devices=[device])
    for step in range(5):
        with trace.record(Task(TaskKind.COMPUTE, step, 1, 0), TINY.units[1], 0.0):
            pass
    assert trace.compute_seconds["decode.attn"] >= 0
    assert len(device.released) == 10


def test_a_mark_that_was_given_back_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)

        def record(self, stream: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = Device.__new__(Device)
    device._side, device._spare = {Stream.UP: object()}, deque()  # type: ignore[dict-item]
    first, second = device.record(Stream.UP), device.record(Stream.UP)
    device.release(first)
    assert device.record(Stream.UP) is first
    assert device.record(Stream.UP) not in (first, second)
    assert len(made) == 3
