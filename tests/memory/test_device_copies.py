"""Copies to and from a GPU, on a device that copies as late as it may: data, order, errors and books."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from h2o_flexgen.errors import MemoryRefused, ModelError
from h2o_flexgen.memory import device_copies
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.cuda import Stream
from h2o_flexgen.memory.handle import Extent
from h2o_flexgen.memory.pinned import Pin, PinnedPool
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import DeviceMemory, HostMemory, Tiers, make_tiers
from h2o_flexgen.memory.transfers import Ticket
from tests.memory.fake_cuda import FakeDevice, FakeMark
from tests.memory.watch import order_threads, watched

PAGE = 4096


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def tiers(device: FakeDevice, tmp_path: Path) -> Iterator[Tiers]:
    cpu, pins = torch.device("cpu"), PinnedPool(device)
    with (
        OffloadDir(tmp_path / "off") as folder,
        make_tiers(None, None, None, False, folder, device=cpu, pins=pins) as made,
    ):
        yield made


def noise(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what `tensor` is filled with."""
    return tensor.random_(0, 256).clone()


def done(ticket: Ticket) -> bool:
    """Whether the GPU is through with it."""
    assert isinstance(ticket, device_copies.DeviceTicket)
    return ticket.issued() and (ticket.end is None or ticket._device.passed(ticket.end))


def test_a_copy_is_queued_at_once_and_nobody_waits(device: FakeDevice, tiers: Tiers) -> None:
    up, source = tiers.compute.allocate(3 * PAGE, "a").tensor, tiers.cpu.allocate(3 * PAGE, "a").tensor
    expected = noise(source)
    with CopyEngine(device=device) as engine:
        ticket = engine.copy(up, source, "cpu->gpu")
        assert ticket.issued()
        assert not done(ticket)
        assert int(up.sum()) == 0, "as late as it may"
        assert engine.bytes_moved == {}, "what is under way is not counted"
        ticket.wait_on_device()
        assert device.host_waits == []
        assert torch.equal(up, expected)
        down = tiers.cpu.allocate(3 * PAGE, "b").tensor
        back = engine.copy(down, up, "gpu->cpu", after=ticket)
        assert device.waits[-1] == (Stream.DOWN, Stream.UP)
        back.wait()
        assert len(device.host_waits) == 1
        assert torch.equal(down, expected)
        assert done(ticket)
        assert engine.bytes_moved == {"cpu->gpu": 3 * PAGE, "gpu->cpu": 3 * PAGE}
        assert set(engine.busy_seconds) == {"cpu->gpu", "gpu->cpu"}
        assert ticket.seconds >= 0
    assert device.races.found == []


def test_books_and_rows_are_made_without_waiting(device: FakeDevice, tiers: Tiers) -> None:
    rows = []
    up, source = tiers.compute.allocate(PAGE, "a").tensor, tiers.cpu.allocate(PAGE, "a").tensor
    with CopyEngine(device=device, trace=lambda *row: rows.append(row)) as engine:
        for label in ("first", "second"):
            engine.copy(up, source, "cpu->gpu", label=label)
        assert rows == []
        engine.drain()
        assert [(row[0], row[3]) for row in rows] == [("first", "cpu->gpu"), ("second", "cpu->gpu")]
        assert rows[0][1] <= rows[0][2] <= rows[1][1] <= rows[1][2]
        assert engine.bytes_moved == {"cpu->gpu": 2 * PAGE}
        engine.copy(up, source, "cpu->gpu").wait()
        engine.copy(up, source, "cpu->gpu", label="last")
        assert len(rows) == 3, "a new copy books those that are done"
    assert len(rows) == 4, "closing waits for what is under way"
    with pytest.raises(RuntimeError, match="closed"):
        engine.copy(up, source, "cpu->gpu")


def test_from_disk_through_the_host_and_back(device: FakeDevice, tiers: Tiers, tmp_path: Path, monkeypatch) -> None:
    """Read, copied up by the thread, computed on, copied down, written: the caller waits once, at the end."""
    order_threads(device, monkeypatch)
    data = os.urandom(5 * PAGE)
    (tmp_path / "f").write_bytes(data)
    stage, up = tiers.cpu.allocate(5 * PAGE, "stage").tensor, tiers.compute.allocate(5 * PAGE, "up").tensor
    region, again = tiers.disk.allocate(5 * PAGE, "region"), tiers.cpu.allocate(5 * PAGE, "again").tensor
    extent = (Extent(str(tmp_path / "f"), 0, 5 * PAGE, 0, "w"),)
    with CopyEngine(device=device) as engine, watched(device):
        read = engine.read_extents(extent, stage)
        copied = engine.copy(up, stage, "cpu->gpu", after=read)
        copied.wait_on_device()
        up.add_(1)
        down = engine.copy(stage, up, "gpu->cpu", after=copied)
        written = engine.write(region, stage, after=down)
        engine.read_region(region, again, after=(written, None)).wait()
    assert bytes((again - 1).tolist()) == data
    assert device.races.found == []
    assert device.races.accesses > 6
    assert set(device.host_waits[:1]) == {"h2o-disk-write-0"}


def test_reading_again_waits_for_the_copy_out_of_the_buffer(device: FakeDevice, tiers: Tiers, tmp_path: Path) -> None:
    data = os.urandom(8 * PAGE)
    (tmp_path / "f").write_bytes(data)
    stage = tiers.cpu.allocate(PAGE, "stage").tensor
    ups = [tiers.compute.allocate(PAGE, "up").tensor for _ in range(8)]
    with CopyEngine(device=device) as engine:
        last = None
        for number, up in enumerate(ups):
            extents = (Extent(str(tmp_path / "f"), number * PAGE, PAGE, 0, "w"),)
            last = engine.copy(up, stage, "cpu->gpu", after=engine.read_extents(extents, stage, after=last))
        engine.drain()
    assert b"".join(bytes(up.tolist()) for up in ups) == data
    assert device.races.found == [], "threads are not told of here: the copies alone are in order"


def test_errors_surface_at_the_wait_and_in_what_comes_after(device: FakeDevice, tiers: Tiers, tmp_path: Path) -> None:
    up, source = tiers.compute.allocate(PAGE, "a").tensor, tiers.cpu.allocate(PAGE, "a").tensor
    with CopyEngine(device=device) as engine:
        missing = engine.read_extents((Extent(str(tmp_path / "gone"), 0, PAGE, 0, "w"),), source)
        behind = engine.copy(up, source, "cpu->gpu", after=missing)
        for wait in (behind.wait, behind.wait_on_device):
            with pytest.raises(ModelError, match="gone"):
                wait()
        with pytest.raises(ModelError, match="gone"):
            engine.copy(source, up, "gpu->cpu", after=behind).wait()
        assert device.copied == []
        device.failing = RuntimeError("CUDA error: invalid argument")
        refused = engine.copy(up, source, "cpu->gpu")
        with pytest.raises(RuntimeError, match="invalid argument"):
            refused.wait_on_device()
        assert done(refused)
        assert refused.error is device.failing


def test_what_fails_on_the_device_is_left_to_the_ticket(device: FakeDevice, tiers: Tiers, monkeypatch) -> None:
    up, source = tiers.compute.allocate(PAGE, "a").tensor, tiers.cpu.allocate(PAGE, "a").tensor

    def fail(mark: FakeMark) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with CopyEngine(device=device) as engine:
        ticket = engine.copy(up, source, "cpu->gpu")
        monkeypatch.setattr(device, "synchronize", fail)
        engine.drain()
        with pytest.raises(RuntimeError, match="illegal memory"):
            ticket.wait()
        assert engine.bytes_moved == {}


@pytest.mark.parametrize("bounced", [True, False])
def test_pageable_memory(bounced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks through locked buffers where there are some, both ways, some of them not full."""
    monkeypatch.setattr(device_copies, "BOUNCE_CHUNK", PAGE)
    monkeypatch.setattr(device_copies, "BOUNCE_BYTES", 4 * PAGE)
    device = FakeDevice(lockable=4 * PAGE if bounced else 0)
    order_threads(device, monkeypatch)
    pins = PinnedPool(device, None, HostMemory().allocate(4 * PAGE).tensor)
    assert (pins.bounce is not None) == bounced
    with make_tiers(None, None, None, False, None, device=torch.device("cpu"), pins=pins) as tiers:
        for size in (0, 1, PAGE, 5 * PAGE + 17):
            up, source = tiers.compute.allocate(size, "a").tensor, tiers.cpu.allocate(size, "a").tensor
            expected, down = noise(source), tiers.cpu.allocate(size, "b").tensor
            with CopyEngine(device=device, bounce=pins.bounce) as engine:
                there = engine.copy(up, source, "cpu->gpu")
                there.wait_on_device()
                assert torch.equal(up, expected)
                engine.copy(down, up, "gpu->cpu", after=there).wait()
                assert torch.equal(down, expected)
                engine.drain()
                assert dict(engine.bytes_moved) == {link: size for link in ("cpu->gpu", "gpu->cpu") if size}
    chunks = max(len(copy.dst) for copy in device.copied)
    assert chunks == (PAGE if bounced else 5 * PAGE + 17)
    assert device.races.found == []


def test_other_layouts_and_dtypes(device: FakeDevice, tiers: Tiers) -> None:
    up = tiers.compute.allocate(48, "a").tensor.view(torch.float32).view(4, 3)
    with CopyEngine(device=device) as engine:
        engine.copy(up, torch.arange(12.0).view(3, 4).t(), "cpu->gpu").wait()
        assert torch.equal(up, torch.arange(12.0).view(3, 4).t())
        halves = torch.empty(4, 3, dtype=torch.bfloat16)
        engine.copy(halves, up, "gpu->cpu").wait()
        assert torch.equal(halves, up.bfloat16())


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_what_goes_up_is_cut_and_what_is_urgent_gets_in_between(chance: float, tmp_path: Path, monkeypatch) -> None:
    """One mark before a unit and one behind it; the small copy waits for neither of them, nor for any piece."""
    monkeypatch.setattr(device_copies, "PIECE", 2 * PAGE)
    device = FakeDevice(chance)
    marks: list[Stream] = []
    record = device.record

    def noted(stream: Stream) -> FakeMark:
        marks.append(stream)
        return record(stream)

    monkeypatch.setattr(device, "record", noted)
    cpu = torch.device("cpu")
    with make_tiers(None, None, None, False, None, device=cpu, pins=PinnedPool(device)) as tiers:
        up, source = (tier.allocate(5 * PAGE + 12, "weights").tensor for tier in (tiers.compute, tiers.cpu))
        said, answer = (tier.allocate(PAGE, "queries").tensor for tier in (tiers.compute, tiers.cpu))
        down = tiers.cpu.allocate(5 * PAGE + 12, "state").tensor
        expected, spoken = noise(source), noise(answer)
        with CopyEngine(device=device) as engine:
            ticket = engine.copy(up, source, "cpu->gpu")
            sizes = [copy.dst.numel() for copy in device.copied]
            assert sizes == [2 * PAGE, 2 * PAGE, PAGE + 12]
            assert marks.count(Stream.UP) == 2
            engine.copy_in_turn(said, answer, "cpu->gpu")
            assert torch.equal(said, spoken)
            assert chance or not done(ticket), "the unit is still under way"
            assert (Stream.COMPUTE, Stream.UP) not in device.waits
            ticket.wait_on_device()
            assert torch.equal(up, expected), "all pieces are there"
            engine.copy(down, up, "gpu->cpu", after=ticket).wait()
            assert torch.equal(down, expected)
            assert [copy.dst.numel() for copy in device.copied if copy.stream is Stream.DOWN] == [5 * PAGE + 12]
            engine.drain()
            assert engine.bytes_moved["cpu->gpu"] == 6 * PAGE + 12
        assert device.races.found == []


DROPPED = [(Stream.UP, Stream.COMPUTE), (Stream.DOWN, Stream.COMPUTE), (Stream.COMPUTE, Stream.UP), (None, Stream.DOWN)]


@pytest.mark.parametrize("dropped", [None, *DROPPED], ids=str)
def test_a_buffer_in_turns_and_what_each_wait_is_for(dropped, device: FakeDevice, tiers: Tiers, monkeypatch) -> None:
    """Loaded, computed on, saved, and loaded again; without any one of the waits that is a race."""
    order_threads(device, monkeypatch)
    device.drops = lambda stream, mark: (stream, mark.stream) == dropped
    up = tiers.compute.allocate(PAGE, "up").tensor
    sources, sinks = ([tiers.cpu.allocate(PAGE, "host").tensor for _ in range(4)] for _ in range(2))
    for number, source in enumerate(sources):
        source.fill_(number)
    with CopyEngine(device=device) as engine, watched(device):
        saved = None
        for source, sink in zip(sources, sinks, strict=True):
            engine.copy(up, source, "cpu->gpu", after=saved).wait_on_device()
            up.add_(10)
            saved = engine.copy(sink, up, "gpu->cpu")
            torch.add(up, 1)  # read once more: the save does not wait for that, so that the next load has to
        assert saved is not None
        saved.wait()
        last = int(sinks[-1][0])
    assert bool(device.races.found) == (dropped is not None)
    assert dropped is not None or last == 13


def test_a_pool_locks_as_much_as_it_may(device: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    pool = PinnedPool(device, 10 * PAGE)
    pool.keep(4 * PAGE)

    def block(pages: int, pin: Pin):
        tensor = HostMemory().allocate(pages * PAGE).tensor
        return tensor, pool.lock(tensor, pin).undo

    (weights, unlock), (more, undo) = block(5, Pin.IF_ROOM), block(2, Pin.IF_ROOM)
    assert device.locked(weights)
    assert not device.locked(more), "room is kept for what comes first"
    stage, free_stage = block(4, Pin.FIRST)
    assert device.locked(stage)
    assert (pool.locked, pool.pageable) == (9 * PAGE, 2 * PAGE)
    assert not device.locked(block(3, Pin.NEVER)[0])
    with caplog.at_level(logging.WARNING):
        pool.warn()
        pool.warn()
    assert [record.message for record in caplog.records if "36 KiB" in record.message and "8 KiB" in record.message]
    assert len(caplog.records) == 1, "said once"
    for release in (free_stage, undo, unlock):
        release()
    assert (pool.locked, pool.pageable) == (0, 0)
    assert not device.locked(block(7, Pin.IF_ROOM)[0])
    assert device.locked(block(6, Pin.IF_ROOM)[0]), "as much is kept again"


def test_a_system_that_refuses_is_not_asked_again_for_what_is_large() -> None:
    device = FakeDevice(lockable=3 * PAGE)
    pool, kept = PinnedPool(device), []
    pool.keep(PAGE)
    wanted = ((2, Pin.IF_ROOM, True), (2, Pin.IF_ROOM, False), (1, Pin.IF_ROOM, False), (1, Pin.FIRST, True))
    for pages, pin, done in wanted:
        tensor = HostMemory().allocate(pages * PAGE).tensor
        kept.append((tensor, pool.lock(tensor, pin)))
        assert device.locked(tensor) == done


def test_a_gpu_that_is_full(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(device, "allocate", refuse)
    with pytest.raises(MemoryRefused, match="the GPU refused 4 KiB"):
        DeviceMemory(device).allocate(PAGE)
