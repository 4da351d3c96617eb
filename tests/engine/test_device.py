"""Whole runs on a GPU that is not there: copies as late as they may be, every access checked, the schedule as planned.

The gpu tier is host memory behind `tests.memory.fake_cuda`; torch computes on it as on any other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution import block
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.engine.metrics.trace import Trace
from h2o_flexgen.engine.state.backing import HiddenStore
from h2o_flexgen.engine.state.kv_store import CacheStore
from h2o_flexgen.engine.state.weights import WeightStore
from h2o_flexgen.memory.cuda import Stream
from h2o_flexgen.memory.pinned import PinnedPool
from h2o_flexgen.schedule.tasks import NO_BATCH, ScheduleShape, Task, TaskKind, Tick
from tests.memory.fake_cuda import FakeDevice
from tests.memory.races import Races
from tests.memory.watch import order_threads, watched
from tests.oracles.schedule import check
from tests.tiny import prompts_of

NEW = 9  # more than the steps after which a moving cache is rewritten
pytestmark = pytest.mark.usefixtures("rewriting")

LENGTHS = [23, 40, 12, 40, 31, 8]
FEW = 4
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
ENGINE: dict[str, Any] = {"dtype": "float32", "eviction": EvictionConfig("h2o", ratio=0.3)}
BLOCK = {"gpu_batch_size": 2, "num_gpu_batches": 3}
CPU, DISK, GPU, THREE = {"cpu": 1.0}, {"disk": 1.0}, {"gpu": 1.0}, {"gpu": 0.3, "cpu": 0.3, "disk": 0.4}
MIXED = {"cpu": 0.5, "disk": 0.5}
PLACES: dict[str, dict[str, Any]] = {
    "weights on cpu": {"weights": CPU, "cache": GPU, "hidden": GPU},
    "cache on cpu": {"weights": GPU, "cache": CPU, "hidden": GPU},
    "all on cpu": {"weights": CPU, "cache": CPU, "hidden": CPU},
    "all on disk": {"weights": DISK, "cache": DISK, "hidden": DISK},
    "cache and weights on both": {"weights": MIXED, "cache": MIXED, "hidden": CPU},
    "three tiers": {"weights": THREE, "cache": THREE, "hidden": THREE},
    "far ahead": {"weights": DISK, "cache": CPU, "hidden": CPU, "lookahead": 3},
    "no overlap": {"weights": DISK, "cache": DISK, "hidden": DISK, "overlap": False},
    "attention on the host": {"weights": GPU, "cache": CPU, "hidden": GPU, "cpu_cache_compute": True},
    "some attention on the host": {"weights": CPU, "cache": THREE, "hidden": CPU, "cpu_cache_compute": True},
}


@pytest.fixture
def open_llm(checkpoint, monkeypatch: pytest.MonkeyPatch):
    """An engine whose GPU is `device`; the policy is one of PLACES."""

    def make(device: FakeDevice, place: str, **settings: Any) -> Engine:
        monkeypatch.setattr(devices, "open_gpu", lambda _: PinnedPool(device))
        policy = {**PLACES[place], **BLOCK}
        return Engine(checkpoint("opt")[1], policy=policy, emulate_gpu="1GiB", **{**ENGINE, **settings})

    return make


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict[int, list[list[int]]]:
    """By how many tokens are generated."""
    with Engine(checkpoint("opt")[1], policy=BLOCK, **ENGINE) as llm:
        return {new: tokens(llm, FakeDevice(), new) for new in (NEW, FEW)}


def tokens(llm: Engine, device: FakeDevice, new: int = NEW) -> list[list[int]]:
    with watched(device):
        outputs = llm.generate(prompts_of(LENGTHS), max_new_tokens=new, ignore_eos=True)
        return [output.token_ids for output in outputs]


@pytest.mark.turns
@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("weights on cpu", "cache on cpu")])
def test_the_same_tokens_and_no_races(place: str, open_llm, expected, monkeypatch) -> None:
    device = FakeDevice()
    order_threads(device, monkeypatch)
    with open_llm(device, place) as llm:
        assert tokens(llm, device) == expected[NEW], "copies as late as they may be"
        assert llm.last_record.bytes_moved["cpu->gpu"] > 0
        device.chance = 0.4
        assert tokens(llm, device, FEW) == expected[FEW], "at any time, into buffers that were used before"
    assert device.races.found == []
    assert device.races.accesses > 1000
    assert not device._locked, "all is unlocked at the end"


@pytest.mark.slow
def test_pageable_memory_and_a_gpu_that_is_capped(open_llm, expected, caplog, monkeypatch) -> None:
    device = FakeDevice(lockable=200_000)
    order_threads(device, monkeypatch)
    with open_llm(device, "all on cpu", gpu_mem="2GiB") as llm:
        assert tokens(llm, device, FEW) == expected[FEW]
        assert device.capped == [2 << 30]
    assert device.capped == [2 << 30, None]
    assert device.races.found == []
    assert len([record for record in caplog.records if "page-locked" in record.message]) == 1


def stop_at_races(races: Races) -> None:
    """Ends a run in which there is nothing more to be seen."""
    if races.found:
        raise InterruptedError


NEEDED: list[tuple[Stream | None, Stream, str]] = [
    (Stream.UP, Stream.COMPUTE, "weights on cpu"),
    (Stream.COMPUTE, Stream.UP, "weights on cpu"),
    (Stream.DOWN, Stream.COMPUTE, "all on cpu"),
    (Stream.COMPUTE, Stream.DOWN, "all on cpu"),
    (Stream.UP, Stream.DOWN, "all on cpu"),
    (None, Stream.UP, "all on disk"),
    (None, Stream.DOWN, "all on disk"),
    (Stream.DOWN, Stream.COMPUTE, "attention on the host"),
    (None, Stream.DOWN, "attention on the host"),
]


@pytest.mark.parametrize(("waiting", "behind", "place"), NEEDED, ids=str)
def test_no_wait_can_be_left_out(waiting, behind, place: str, open_llm, monkeypatch) -> None:
    """Nothing else puts these in an order: the checker would see a wait that is missing."""
    device = FakeDevice(drops=lambda stream, mark: (stream, mark.stream) == (waiting, behind))
    order_threads(device, monkeypatch)
    with open_llm(device, place) as llm, suppress(Exception):
        llm.on_progress = lambda *_: stop_at_races(device.races)
        tokens(llm, device)
    assert device.races.found


def test_the_thread_that_computes_waits_for_the_device_once_per_block(open_llm, checkpoint) -> None:
    """However many steps: only at the end, when buffers are given back."""
    waits = []
    for steps in (3, 12):
        device = FakeDevice()
        with open_llm(device, "all on cpu") as llm:
            llm.generate(prompts_of(LENGTHS), max_new_tokens=steps, ignore_eos=True)
        waits.append(device.host_waits.count(threading.current_thread().name))
    assert waits[0] == waits[1]


class Recorded:
    """What an engine did, in order: what its stores were asked to do, and what it computed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[TaskKind, Any]] = []
        self.shapes: list[ScheduleShape] = []
        for owner, name, kind in (
            (WeightStore, "load", TaskKind.LOAD_WEIGHTS),
            (WeightStore, "free", TaskKind.FREE_WEIGHTS),
            (CacheStore, "load", TaskKind.LOAD_CACHE),
            (CacheStore, "store", TaskKind.STORE_CACHE),
            (HiddenStore, "load", TaskKind.LOAD_HIDDEN),
            (HiddenStore, "store", TaskKind.STORE_HIDDEN),
        ):
            self._note(patch, owner, name, kind)
        self._note(patch, Trace, "record", TaskKind.COMPUTE)
        zigzag = block.zigzag

        def shaped(shape: ScheduleShape, *questions: Any) -> Any:
            self.shapes.append(shape)
            return zigzag(shape, *questions)

        patch.setattr(block, "zigzag", shaped)

    def _note(self, patch: pytest.MonkeyPatch, owner: Any, name: str, kind: TaskKind) -> None:
        inner = getattr(owner, name)

        def call(store: Any, *what: Any) -> Any:
            self.events.append((kind, what))
            return inner(store, *what)

        patch.setattr(owner, name, call)

    def ticks(self) -> list[Tick]:
        """Tasks have no names here: each is named after the compute that it turned out to be for."""
        units = self.shapes[0].units
        parts: list[tuple[list[Task], list[Task], list[Task], list[Task]]] = [([], [], [], [])]
        for at, (kind, what) in enumerate(self.events):
            place = _PLACE[kind]
            computed, freed = parts[-1][2:]
            if place < 3 and (computed or freed):
                parts.append(([], [], [], []))
            parts[-1][place].append(self._task(at, kind, what, units))
        return [
            Tick(
                index=index,
                stores=tuple(stores),
                loads=tuple(loads),
                compute=compute[0] if compute else None,
                frees=tuple(frees),
            )
            for index, (stores, loads, compute, frees) in enumerate(parts)
        ]

    def _task(self, at: int, kind: TaskKind, what: Any, units: tuple[UnitSpec, ...]) -> Task:
        if kind is TaskKind.COMPUTE:
            return what[0]
        ahead = kind in (TaskKind.LOAD_WEIGHTS, TaskKind.LOAD_CACHE, TaskKind.LOAD_HIDDEN)
        events = self.events[at:] if ahead else reversed(self.events[:at])
        for task in (other[0] for which, other in events if which is TaskKind.COMPUTE):
            unit = units[task.unit]
            if kind in (TaskKind.LOAD_WEIGHTS, TaskKind.FREE_WEIGHTS):
                if unit.weights == what[0]:
                    return Task(kind, task.step, task.unit, NO_BATCH)
            elif kind in (TaskKind.LOAD_CACHE, TaskKind.STORE_CACHE):
                if unit.kind == "attn" and (unit.layer, task.batch) == what:
                    return Task(kind, task.step, task.unit, task.batch)
            elif task.batch == what[0].index:
                return Task(kind, task.step, task.unit, task.batch)
        raise AssertionError(f"{kind} {what} is for no compute")


_PLACE = {
    TaskKind.STORE_CACHE: 0,
    TaskKind.STORE_HIDDEN: 0,
    TaskKind.LOAD_WEIGHTS: 1,
    TaskKind.LOAD_CACHE: 1,
    TaskKind.LOAD_HIDDEN: 1,
    TaskKind.COMPUTE: 2,
    TaskKind.FREE_WEIGHTS: 3,
}


@pytest.mark.parametrize("place", ["all on cpu", "all on disk", "three tiers"])
def test_what_was_done_is_a_sound_schedule(place: str, open_llm, monkeypatch) -> None:
    """And its loads and stores are the copies that the device saw."""
    device = FakeDevice(0.2)
    recorded = Recorded(monkeypatch)
    with open_llm(device, place, trace=True) as llm:
        llm.generate(prompts_of([24] * 6), **SETTINGS)
        timeline, moved = llm.timeline, llm.last_record.bytes_moved
    (shape,) = recorded.shapes
    report = check(recorded.ticks(), shape)
    assert report.steps == NEW
    streams = Counter(copy.stream for copy in device.copied)
    count = report.tasks
    assert streams[Stream.UP] == sum(
        count[kind] for kind in (TaskKind.LOAD_WEIGHTS, TaskKind.LOAD_CACHE, TaskKind.LOAD_HIDDEN)
    )
    # a cache is written home in full at first and in the 7th step, else its new tokens wait on the device
    assert streams[Stream.DOWN] == count[TaskKind.STORE_HIDDEN] + 2 * len(shape.cache_moves)
    assert sum(copy.dst.numel() for copy in device.copied) == moved["cpu->gpu"] + moved["gpu->cpu"]
    rows = Counter(row.resource for row in timeline.rows)
    assert (rows["cpu->gpu"], rows["gpu->cpu"]) == (streams[Stream.UP], streams[Stream.DOWN])
    assert rows["compute"] == count[TaskKind.COMPUTE]
    assert rows["compute"] == sum(tick.compute is not None for tick in recorded.ticks())


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("h2o-")]
