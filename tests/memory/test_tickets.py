"""Tickets and the threads behind them: order, failures, closing and interruption."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from h2o_flexgen.errors import StorageError
from h2o_flexgen.memory import copies
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import Extent
from h2o_flexgen.memory.transfers import Ticket
from tests.memory.buffers import padded, whole
from tests.memory.conftest import PREADV, engine_threads, in_chunks

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_blocked_ticket_does_not_hold_up_the_queue() -> None:
    gate = threading.Event()
    order = []
    with CopyEngine() as engine:
        slow = engine.run(lambda: gate.wait(10) and None, "cpu->disk")
        blocked = engine.run(lambda: order.append("blocked"), "disk->cpu", after=slow)
        engine.run(lambda: order.append("free"), "disk->cpu").wait()
        assert not blocked.issued()
        gate.set()
        blocked.wait()
    assert order == ["free", "blocked"]


def test_earlier_tickets_go_first(payload: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 4096)
    monkeypatch.setattr(copies, "READ_THREADS", 1)
    path, data = payload
    rows: list[str] = []
    gate = threading.Event()
    with CopyEngine(trace=lambda task, *_: rows.append(task)) as engine:
        engine.run(lambda: gate.wait(10) and None, "disk->cpu", label="gate")
        for name in ("first", "second", "third"):
            engine.read_extents((Extent(path, 0, len(data), 0, name),), padded(len(data)))
        gate.set()
        engine.drain()
    assert rows == ["gate", "first", "second", "third"]


def test_a_ticket_is_not_done_while_a_piece_of_it_runs(
    payload: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error the buffer must be the caller's again: no reader may still be writing into it."""
    path, data = payload
    inside, gate = threading.Event(), threading.Event()

    def slow_second(fd: int, views: list[memoryview], offset: int) -> int:
        if offset == 0:
            inside.set()
            gate.wait(10)
            return PREADV(fd, views, offset)
        inside.wait(10)
        raise OSError(errno.EACCES, "refused")

    in_chunks(monkeypatch, 65536)
    monkeypatch.setattr(os, "preadv", slow_second)
    with CopyEngine() as engine:
        ticket = engine.read_extents(whole(path, len(data)), padded(len(data)))
        inside.wait(10)
        time.sleep(0.1)  # room for the error to end it too early
        assert not ticket.issued()
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


def test_close_in_the_middle_of_a_large_read_is_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        time.sleep(0.02)
        calls.append(offset)
        return PREADV(fd, views, offset)

    (tmp_path / "f").write_bytes(bytes(400 * 4096))
    in_chunks(monkeypatch, 4096)
    monkeypatch.setattr(os, "preadv", slow)
    with CopyEngine() as engine:
        ticket = engine.read_extents(whole(str(tmp_path / "f"), 400 * 4096), padded(400 * 4096))
        time.sleep(0.05)
        before = len(calls)
    assert len(calls) < before + 100  # of 400
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
    begun, gate = threading.Event(), threading.Event()
    engine = CopyEngine()

    def operation() -> None:
        begun.set()
        gate.wait(10)

    ticket = engine.run(operation, "cpu->gpu")
    assert begun.wait(60)  # what has not begun is dropped by close, which then has nothing to wait for
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


@pytest.mark.slow
def test_a_forgotten_engine_does_not_hang_the_exit() -> None:
    script = """
import threading
from h2o_flexgen.memory.transfers import LinkMeters, Operation, Ticket, Workers
workers = Workers(LinkMeters())
gate = threading.Event()
workers.submit("queue", Ticket("t", "cpu->gpu", 1, [Operation(lambda: None, 1)])).wait()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "done\n"
