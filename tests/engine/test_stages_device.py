"""Runs on two GPUs that are not there: every access is checked, and no wait between the two can be left out."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.memory.cuda import Stream
from h2o_flexgen.memory.pinned import PinnedPool
from tests.engine.test_device import stop_at_races
from tests.engine.test_stages import H2O, PLACES
from tests.memory.fake_cuda import FakeDevice, FakeMark
from tests.memory.watch import order_threads, watched
from tests.tiny import prompts_of

pytestmark = pytest.mark.usefixtures("rewriting")

LENGTHS = [23, 40, 12, 31, 8, 19, 5]
SETTINGS: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}


class Pair:
    """Two devices beside each other. `leaves_out(waiting device, stream, mark)`: the waits that are not done."""

    def __init__(self, leaves_out: Any = lambda device, stream, mark: False) -> None:
        self.first = FakeDevice(drops=lambda stream, mark: leaves_out("first ", stream, mark), name="first ")
        self.second = FakeDevice(
            drops=lambda stream, mark: leaves_out("second ", stream, mark), name="second ", first=self.first
        )
        self.races = self.first.races

    def open(self, folder: str, place: str, patch: pytest.MonkeyPatch) -> Engine:
        order_threads(self.first, patch)
        patch.setattr(devices, "open_gpu", lambda _: PinnedPool(self.first, others=[self.second]))
        policy = {**PLACES[place], "gpu_batch_size": 2, "num_gpu_batches": 4}
        return Engine(folder, dtype="float32", eviction=H2O, num_gpus=2, emulate_gpu="1GiB", policy=policy)

    def tokens(self, llm: Engine) -> list[list[int]]:
        with watched(self.first, self.second):
            return [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)]


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[list[int]]:
    with Engine(checkpoint("llama")[1], dtype="float32", eviction=H2O) as llm:
        return [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["resident", "all on cpu", "three tiers", "attention on the host"])
def test_the_same_tokens_and_no_races(place: str, checkpoint, expected, monkeypatch) -> None:
    pair = Pair()
    with pair.open(checkpoint("llama")[1], place, monkeypatch) as llm:
        for chance in (0.0, 0.4):  # as late as they may be, and at any time
            pair.first.chance = pair.second.chance = chance
            pair.second.copied.clear()
            assert pair.tokens(llm) == expected
            across = [copy for copy in pair.second.copied if copy.stream is Stream.ACROSS]
            assert sum(copy.dst.numel() for copy in across) == llm.last_record.bytes_moved["gpu->gpu"]
    assert pair.races.found == []
    assert pair.races.accesses > 1000
    assert all(pair.first.owns(copy.src) and pair.second.owns(copy.dst) for copy in across)
    assert not pair.first._locked, "all is unlocked at the end"


NEEDED = [
    ("second ", Stream.ACROSS, "first ", Stream.COMPUTE),  # what is sent has to be computed
    ("second ", Stream.ACROSS, "second ", Stream.COMPUTE),  # where it lands somebody may still read
    ("second ", Stream.COMPUTE, "second ", Stream.ACROSS),  # it has to be there
    ("first ", Stream.COMPUTE, "second ", Stream.ACROSS),  # where it was sent from the next is written
]


@pytest.mark.parametrize(("device", "stream", "other", "behind"), NEEDED)
def test_no_wait_between_two_gpus_can_be_left_out(device, stream, other, behind, checkpoint, monkeypatch) -> None:
    def leaves_out(waiting: str, queue: Stream | None, mark: FakeMark) -> bool:
        return (waiting, queue, mark.device.name, mark.stream) == (device, stream, other, behind)

    pair = Pair(leaves_out=leaves_out)
    with pair.open(checkpoint("llama")[1], "resident", monkeypatch) as llm, suppress(Exception):
        llm.on_progress = lambda *_: stop_at_races(pair.races)
        pair.tokens(llm)
    assert pair.races.found


@pytest.mark.slow
def test_the_thread_that_computes_waits_for_no_device_while_it_runs(checkpoint, monkeypatch) -> None:
    """However many steps, as often: at the end of the block, when buffers are given back."""
    waits = []
    for steps in (3, 12):
        with monkeypatch.context() as patch:
            pair = Pair()
            with pair.open(checkpoint("llama")[1], "all on cpu", patch) as llm:
                llm.generate(prompts_of(LENGTHS), max_new_tokens=steps, ignore_eos=True)
            waits.append(len(pair.first.host_waits) + len(pair.second.host_waits))
    assert waits[0] == waits[1]


@pytest.mark.slow
def test_each_gpu_is_capped_and_pageable_memory_has_buffers_of_its_own(checkpoint, expected, monkeypatch) -> None:
    pair = Pair()
    pair.first.lockable = 200_000
    with pair.open(checkpoint("llama")[1], "all on cpu", monkeypatch) as llm:
        object.__setattr__(llm.config, "gpu_mem", 2 << 30)
        assert pair.tokens(llm) == expected
        assert pair.first.capped == pair.second.capped == [2 << 30]
    assert pair.first.capped == pair.second.capped == [2 << 30, None]
    assert pair.races.found == []
