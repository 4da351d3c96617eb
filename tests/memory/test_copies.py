from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h2o_flexgen.config.tensors import TensorSpec, WeightGroup
from h2o_flexgen.errors import ModelError, StorageError
from h2o_flexgen.memory.copies import CopyEngine, Ticket, checksum
from h2o_flexgen.memory.disk import Syscalls
from h2o_flexgen.memory.disk_tier import DiskTier
from h2o_flexgen.memory.handle import Extent, Location, direct_layout, views
from h2o_flexgen.memory.pages import HostMemory
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import Tiers, make_tiers
from tests.memory.conftest import Faulty, engine_threads

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with OffloadDir(tmp_path / "off") as folder, make_tiers(None, None, None, True, folder) as made:
        yield made


def whole(path: str, nbytes: int) -> tuple[Extent, ...]:
    return (Extent(path, 0, nbytes, 0, "layers.0.attn"),)


def random_bytes(nbytes: int) -> torch.Tensor:
    return HostMemory().allocate(nbytes).tensor.random_(0, 256)


def padded(nbytes: int) -> torch.Tensor:
    return HostMemory().allocate(-(-nbytes // 4096) * 4096).tensor


def safetensors_locations(path: Path) -> dict[str, Location]:
    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    return {
        name: Location(
            str(path), 8 + size + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


@pytest.mark.parametrize("direct", [True, False])
def test_weights_straight_out_of_safetensors(tmp_path: Path, direct: bool) -> None:
    shapes = {"b.weight": (300, 77), "a.weight": (64, 64), "z.bias": (5,), "m.weight": (1000, 3), "unused": (9000,)}
    saved = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(saved, tmp_path / "model.safetensors")
    names = [name for name in shapes if name != "unused"]
    group = WeightGroup("layers.0.attn", tuple(TensorSpec(name, shapes[name]) for name in names))
    layout, extents = direct_layout(group, "bfloat16", safetensors_locations(tmp_path / "model.safetensors"))
    assert len(extents) == 2, "the gap of the unused tensor is not read"
    buffer = padded(layout.nbytes)
    with CopyEngine(direct=direct, chunk=8192) as engine:
        ticket = engine.read_extents(extents, buffer)
        ticket.wait()
        assert ticket.nbytes == sum(saved[name].nbytes for name in names)
        assert engine.bytes_moved == {"disk->cpu": ticket.nbytes}
        assert 0 < engine.busy_seconds["disk->cpu"] <= ticket.seconds
    for name, tensor in views(layout, buffer).items():
        assert torch.equal(tensor, saved[name])


def test_a_short_first_read_never_passes_for_the_whole(payload: tuple[str, bytes]) -> None:
    """The n-th call fails, for every n, once and for good: right bytes or an error, nothing between."""
    path, data = payload
    for forever in (False, True):
        for short in (None, 0, 700, 4096):
            failing = 1
            while True:
                calls = Faulty(lambda n, f=failing, e=forever: n >= f if e else n == f, short=short)  # type: ignore[misc]
                out = padded(len(data))
                with CopyEngine(chunk=65536, syscalls=calls) as engine:
                    ticket = engine.read_extents(whole(path, len(data)), out)
                    engine.drain()
                    if ticket.error is None:
                        assert out[: len(data)].numpy().tobytes() == data
                    else:
                        assert forever
                        assert isinstance(ticket.error, StorageError)
                        assert "layers.0.attn" in str(ticket.error)
                if calls.calls < failing:
                    break
                failing += 1
            assert failing > 3


def test_checksums(payload: tuple[str, bytes]) -> None:
    path, data = payload
    spans = (Extent(path, 4096, 5000, 0, "a"), Extent(path, 40960, 100, 8192, "b"))
    good = padded(12288)
    with CopyEngine() as engine:
        engine.read_extents(spans, good).wait()
        digest = checksum((good[:5000], good[8192:8292]))
        engine.read_extents(spans, padded(12288), digest=digest).wait()
        with open(path, "r+b") as stream:
            stream.seek(4096 + 4999)
            stream.write(bytes([data[4096 + 4999] ^ 1]))
    with CopyEngine() as engine:
        ticket = engine.read_extents(spans, padded(12288), digest=digest, label="layers.7.mlp")
        for _ in range(2):
            with pytest.raises(StorageError, match=r"layers\.7\.mlp.*bit flip") as flipped:
                ticket.wait()
        assert path in str(flipped.value)
        assert flipped.value.exit_code == 6


def test_a_checkpoint_that_shrinks_or_is_replaced(payload: tuple[str, bytes]) -> None:
    path, data = payload
    with CopyEngine() as engine:
        engine.watch([path])
        engine.read_extents(whole(path, len(data)), padded(len(data))).wait()
        os.truncate(path, 8192)
        with pytest.raises(ModelError, match="changed during the run") as changed:
            engine.read_extents(whole(path, len(data)), padded(len(data))).wait()
        assert changed.value.exit_code == 4
        with pytest.raises(ModelError, match="changed during the run"):
            engine.read_extents(whole(path, 4096), padded(4096)).wait()
    with CopyEngine() as engine:
        engine.watch([path], ours=True)
        Path(path + ".new").write_bytes(bytes(8192))
        os.replace(path + ".new", path)
        with pytest.raises(StorageError, match="replaced"):
            engine.read_extents(whole(path, 8192), padded(8192)).wait()


def test_a_missing_file_surfaces_at_wait(tmp_path: Path) -> None:
    with CopyEngine() as engine:
        ticket = engine.read_extents(whole(str(tmp_path / "gone"), 10), padded(10))
        with pytest.raises(ModelError, match="gone"):
            ticket.wait()
        assert ticket.done()
        assert isinstance(ticket.error, ModelError)


def test_regions_round_trip_and_remember_their_digest(tiers: Tiers) -> None:
    region = tiers.disk.allocate(300_000, "kv cache")
    data, out = random_bytes(299_999), padded(299_999)[:299_999]
    with CopyEngine(chunk=65536) as engine:
        written = engine.write(region, data)
        read = engine.read_region(region, out, after=written)
        read.wait()
        assert written.done()
        assert torch.equal(out, data)
        assert engine.bytes_moved == {"cpu->disk": 299_999, "disk->cpu": 299_999}

        matrix = torch.randn(10, 33)
        part = region.part(8192, 8192)
        again = torch.empty_like(matrix)
        engine.read_region(part, again, after=engine.write(part, matrix)).wait()
        assert torch.equal(matrix, again)
        with pytest.raises(StorageError, match=r"kv cache.*bit flip"):
            engine.read_region(region, out).wait()  # the part's write went behind the whole region's back
        with pytest.raises(ValueError, match="do not fit"):
            engine.write(part, random_bytes(8193))


def test_a_flipped_bit_in_a_region_is_found(tiers: Tiers) -> None:
    region = tiers.disk.allocate(20_000, "kv cache")
    data = random_bytes(20_000)
    with CopyEngine() as engine:
        engine.write(region, data).wait()
        with open(region.file.path, "r+b") as stream:
            stream.seek(12_345)
            stream.write(bytes([int(data[12_345]) ^ 64]))
        with pytest.raises(StorageError, match="bit flip"):
            engine.read_region(region, torch.empty_like(data)).wait()
        with pytest.raises(StorageError, match="bit flip"):
            engine.read_region(region, data[:100].clone(), digest=b"0" * 16).wait()


class FullDisk(Syscalls):
    """Has no space from the n-th write on."""

    def __init__(self, failing: int) -> None:
        self.failing, self.calls = failing, 0

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        self.calls += 1
        if self.calls >= self.failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().pwritev(fd, view, offset)


def test_a_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    data = random_bytes(50_000)
    failing = 1
    while True:
        calls = FullDisk(failing)
        with OffloadDir(tmp_path / "off") as folder, CopyEngine(chunk=8192) as engine:
            tier = DiskTier(None, folder, calls)
            region = tier.allocate(50_000, "kv cache")
            ticket = engine.write(region, data)
            read = engine.read_region(region, padded(50_000)[:50_000], after=ticket)
            engine.drain()
            if calls.calls < failing:
                read.wait()
                break
            for dependent in (ticket, read):
                with pytest.raises(StorageError, match="No space left"):
                    dependent.wait()
            tier.close()
        failing += 1
    assert failing == 1 + 7


def test_copies_between_tiers(tiers: Tiers) -> None:
    assert tiers.gpu is not None
    up = tiers.gpu.allocate(3 * (4 << 20) + 5, "weights").tensor
    source = torch.randint(0, 256, up.shape, dtype=torch.uint8)
    rows = []
    with CopyEngine(trace=lambda *row: rows.append(row)) as engine:
        first = engine.copy(up, source, "cpu->gpu", label="load layers.0.mlp")
        down = torch.empty_like(source)
        engine.copy(down, up, "gpu->cpu", after=first).wait()
        assert torch.equal(down, source)
        converted, transposed = torch.empty(4, 3), torch.arange(12.0).view(3, 4).t()
        engine.copy(converted, transposed, "cpu->gpu").wait()
        assert torch.equal(converted, transposed)
        halves = torch.empty(4, 3, dtype=torch.bfloat16)
        engine.copy(halves, converted, "cpu->gpu").wait()
        assert torch.equal(halves, converted.bfloat16())
        with pytest.raises(ValueError, match="cannot copy"):
            engine.copy(converted, transposed.t(), "cpu->gpu")
        assert engine.bytes_moved == {"cpu->gpu": up.numel() + 48 + 24, "gpu->cpu": up.numel()}
    assert [(row[0], row[3]) for row in rows][:2] == [("load layers.0.mlp", "cpu->gpu"), ("gpu->cpu", "gpu->cpu")]
    assert all(start <= end for _, start, end, _ in rows)
    assert rows[0][2] <= rows[1][1], "what comes after starts after"


def test_inference_tensors_may_be_targets() -> None:
    with torch.inference_mode():
        dst, src = torch.empty(4, 3), torch.arange(12.0).view(3, 4).t()
    with CopyEngine() as engine:
        engine.copy(dst, src, "cpu->gpu").wait()
    assert bool((dst == src).all())


def test_run_uses_the_threads_of_its_link() -> None:
    seen: dict[str, str] = {}
    with CopyEngine() as engine:
        for link in ("disk->cpu", "cpu->disk", "cpu->gpu"):
            engine.run(lambda link=link: seen.update({link: threading.current_thread().name}), link, 7)  # type: ignore[misc]
        engine.drain()
        assert engine.bytes_moved == {"disk->cpu": 7, "cpu->disk": 7, "cpu->gpu": 7}
    assert [seen[link][:-2] for link in sorted(seen)] == ["h2o-disk-write", "h2o-cpu->gpu", "h2o-disk-read"]


def test_what_comes_after_a_failure_fails_without_running() -> None:
    ran = []
    with CopyEngine() as engine:
        broken = engine.run(lambda: 1 / 0 and None, "cpu->gpu", 5)
        behind = engine.run(lambda: ran.append(1), "gpu->cpu", after=broken)
        last = engine.run(lambda: ran.append(2), "disk->cpu", after=behind)
        free = engine.run(lambda: ran.append(3), "gpu->cpu")
        free.wait()
        for ticket in (broken, behind, last):
            with pytest.raises(ZeroDivisionError):
                ticket.wait()
        assert engine.bytes_moved["cpu->gpu"] == 0
    assert ran == [3]


def test_a_blocked_ticket_does_not_hold_up_the_lane() -> None:
    gate = threading.Event()
    order = []
    with CopyEngine() as engine:
        slow = engine.run(lambda: gate.wait(10) and None, "cpu->disk")
        blocked = engine.run(lambda: order.append("blocked"), "disk->cpu", after=slow)
        engine.run(lambda: order.append("free"), "disk->cpu").wait()
        assert not blocked.done()
        with pytest.raises(TimeoutError, match="disk->cpu"):
            blocked.wait(0.01)
        gate.set()
        blocked.wait()
    assert order == ["free", "blocked"]


def test_earlier_tickets_go_first(payload: tuple[str, bytes]) -> None:
    path, data = payload
    rows: list[str] = []
    gate = threading.Event()
    with CopyEngine(read_threads=1, chunk=4096, trace=lambda task, *_: rows.append(task)) as engine:
        engine.run(lambda: gate.wait(10) and None, "disk->cpu", label="gate")
        for label in ("first", "second", "third"):
            engine.read_extents(whole(path, len(data)), padded(len(data)), label=label)
        gate.set()
        engine.drain()
    assert rows == ["gate", "first", "second", "third"]


def test_a_ticket_is_not_done_while_a_piece_of_it_runs(payload: tuple[str, bytes]) -> None:
    """After an error the buffer must be the caller's again: no reader may still be writing into it."""
    path, data = payload
    inside, gate = threading.Event(), threading.Event()

    class SlowSecond(Faulty):
        def preadv(self, fd: int, view: memoryview, offset: int) -> int:
            if offset == 0:
                inside.set()
                gate.wait(10)
                return super().preadv(fd, view, offset)
            inside.wait(10)
            raise OSError(errno.EACCES, "refused")

    with CopyEngine(chunk=65536, syscalls=SlowSecond(lambda _: False)) as engine:
        ticket = engine.read_extents(whole(path, len(data)), padded(len(data)))
        inside.wait(10)
        with pytest.raises(TimeoutError):
            ticket.wait(0.1)
        gate.set()
        with pytest.raises(StorageError, match="refused"):
            ticket.wait()


def test_close_drops_what_has_not_started() -> None:
    started, gate = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        gate.wait(10)

    engine = CopyEngine()
    running = engine.run(hold, "cpu->disk")
    waiting = engine.run(lambda: None, "cpu->disk")
    behind = engine.run(lambda: None, "disk->cpu", after=waiting)
    started.wait(10)
    threading.Timer(0.1, gate.set).start()
    engine.close()
    assert engine_threads() == []
    running.wait()
    for ticket in (waiting, behind):
        with pytest.raises(RuntimeError, match="closed"):
            ticket.wait()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.run(lambda: None, "cpu->disk")


def test_close_in_the_middle_of_a_large_read_is_prompt(tmp_path: Path) -> None:
    class Slow(Faulty):
        def preadv(self, fd: int, view: memoryview, offset: int) -> int:
            time.sleep(0.02)
            return super().preadv(fd, view, offset)

    (tmp_path / "f").write_bytes(bytes(400 * 4096))
    with CopyEngine(chunk=4096, syscalls=Slow(lambda _: False)) as engine:
        ticket = engine.read_extents(whole(str(tmp_path / "f"), 400 * 4096), padded(400 * 4096))
        time.sleep(0.05)
        start = time.perf_counter()
    assert time.perf_counter() - start < 1
    with pytest.raises(RuntimeError, match="dropped"):
        ticket.wait()


def test_an_exception_in_the_block_still_joins_the_threads() -> None:
    def block() -> None:
        with CopyEngine() as engine:
            for _ in range(50):
                engine.run(lambda: time.sleep(0.01), "cpu->gpu")
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert engine_threads() == []


@pytest.mark.parametrize("how", ["wait", "drain", "close"])
def test_waiting_can_be_interrupted(how: str) -> None:
    gate = threading.Event()
    engine = CopyEngine()
    ticket = engine.run(lambda: gate.wait(10) and None, "cpu->gpu")
    waits = {"wait": ticket.wait, "drain": engine.drain, "close": engine.close}
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))

    def interrupt(*_: object) -> None:
        raise InterruptedError

    # A signal of our own: one that arrives late on a busy machine must not end the test run as Ctrl-C would.
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(InterruptedError):
            (timer.start(), waits[how]())
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
        gate.set()
        engine.close()
    ticket.wait()


def test_a_failing_trace_callback_is_an_error_of_the_ticket() -> None:
    def broken(*_: object) -> None:
        raise OverflowError("trace")

    with CopyEngine(trace=broken) as engine:
        ticket: Ticket = engine.run(lambda: None, "cpu->gpu")
        with pytest.raises(OverflowError):
            ticket.wait()
        with pytest.raises(OverflowError):
            engine.run(lambda: None, "cpu->gpu").wait()


def test_many_tickets_at_once(tmp_path: Path) -> None:
    data = random_bytes(1 << 20)
    (tmp_path / "f").write_bytes(data.numpy().tobytes())
    path = str(tmp_path / "f")
    outs = []
    with CopyEngine(chunk=65536) as engine:
        previous: Ticket | None = None
        for number in range(60):
            out, up = padded(1 << 20), padded(1 << 20)
            read = engine.read_extents(whole(path, 1 << 20), out, after=previous if number % 3 == 0 else None)
            previous = engine.copy(up, out, "cpu->gpu", after=read)
            outs.append(up)
        engine.drain()
        assert engine.bytes_moved == {"disk->cpu": 60 << 20, "cpu->gpu": 60 << 20}
    assert all(torch.equal(out, data) for out in outs)


def test_empty_transfers(payload: tuple[str, bytes]) -> None:
    with CopyEngine() as engine:
        engine.read_extents((), padded(0)).wait()
        engine.copy(torch.empty(0), torch.empty(0), "cpu->gpu").wait()


def test_wrong_arguments(payload: tuple[str, bytes]) -> None:
    with CopyEngine() as engine:
        with pytest.raises(ValueError, match="does not fit"):
            engine.read_extents(whole(payload[0], 4097), padded(4096))
        with pytest.raises(ValueError, match="flat uint8"):
            engine.read_extents(whole(payload[0], 4096), torch.zeros(4096))
    for bad in ({"read_threads": 0}, {"chunk": 1000}, {"chunk": 0}):
        with pytest.raises(ValueError, match="whole pages"):
            CopyEngine(**bad)


def test_a_forgotten_engine_does_not_hang_the_exit() -> None:
    script = """
import threading
from collections import deque
from h2o_flexgen.memory.jobs import Job, Piece, Ticket
from h2o_flexgen.memory.workers import Workers
workers = Workers()
gate = threading.Event()
workers.submit("lane", Job(Ticket("t", "cpu->gpu", 1), deque([Piece(lambda: None, 1)]))).wait()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "done\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copies() -> None:
    with make_tiers(None, None, None, False, None, device=torch.device("cuda")) as tiers, CopyEngine() as engine:
        up, source = tiers.compute.allocate(1 << 20, "weights").tensor, tiers.cpu.allocate(1 << 20, "weights").tensor
        source.random_(0, 256)
        first = engine.copy(up, source, "cpu->gpu")
        down = torch.empty_like(source)
        engine.copy(down, up, "gpu->cpu", after=first).wait()
        assert torch.equal(down, source)
