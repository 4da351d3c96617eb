"""Who was busy when: the executor's and the copy threads' rows, the same type the simulator will emit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.memory.cuda import Device, Mark, Stream
from h2o_flexgen.schedule.tasks import Task
from h2o_flexgen.schedule.timeline import Row, Timeline, on_stage


class _Tick(NamedTuple):
    """A compute task: what it was, and how much of its tokens are prompts."""

    task: Task
    unit: UnitSpec
    prompts: float
    what: str
    stage: int


class Trace:
    """Collects rows from any thread. With `enabled` False only the busy seconds of the compute are kept.

    On a device a task is timed by marks in the queue of its computes; they are waited for only when the trace is read.
    """

    def __init__(self, enabled: bool = False, devices: Sequence[Device] = ()) -> None:
        """`devices`: those of the stages, in order; none where the CPU computes."""
        self.enabled = enabled
        self._devices = devices
        self._seconds: dict[str, float] = {}
        self._rows: list[Row] = []
        self._queued: list[deque[tuple[_Tick, Mark, Mark]]] = [deque() for _ in devices]
        self._lock = threading.Lock()
        self._zero = time.perf_counter()

    @property
    def compute_seconds(self) -> dict[str, float]:
        """Seconds by phase and kind of unit ("decode.mlp", ...). Waits for what a GPU still computes."""
        self._collect(wait=True)
        return self._seconds

    @contextmanager
    def record(self, task: Task, unit: UnitSpec, prompts: float, what: str = "", stage: int = 0) -> Iterator[None]:
        """Times one compute task. `prompts`: how much of its tokens are prompts, the others are decode rows.

        `what`: which part of the task, where it is computed in several; `stage`: whose task it is.
        """
        tick = _Tick(task, unit, prompts, what, stage)
        if self._devices:
            with self._marked(tick, self._devices[stage]):
                yield
            return
        start = time.perf_counter()
        yield
        self._book(tick, start, time.perf_counter())

    def add(self, task: str, start: float, end: float, resource: str) -> None:
        """One row; `start` and `end` are `time.perf_counter` readings. Called by the copy threads too."""
        if self.enabled:
            with self._lock:
                self._rows.append(Row(task, start - self._zero, end - self._zero, resource))

    def timeline(self) -> Timeline:
        """The rows so far. Waits for what a GPU still computes."""
        self._collect(wait=True)
        return Timeline(tuple(sorted(self._rows, key=lambda row: row.start)))

    @contextmanager
    def _marked(self, tick: _Tick, device: Device) -> Iterator[None]:
        if device.capturing():
            yield
            return
        start = device.record(Stream.COMPUTE)
        yield
        self._queued[tick.stage].append((tick, start, device.record(Stream.COMPUTE)))
        self._collect(wait=False)

    def _collect(self, wait: bool) -> None:
        """Books the tasks that are done, or after a wait all of them."""
        for device, queued in zip(self._devices, self._queued, strict=True):
            if wait and queued:
                device.synchronize(queued[-1][2])
            while queued and device.passed(queued[0][2]):
                tick, first, last = queued.popleft()
                start = device.clock(first)
                self._book(tick, start, start + device.seconds(first, last))
                device.release(first)
                device.release(last)

    def _book(self, tick: _Tick, start: float, end: float) -> None:
        for phase, share in (("prefill", tick.prompts), ("decode", 1 - tick.prompts)):
            if share:
                key = f"{phase}.{tick.unit.kind}"
                self._seconds[key] = self._seconds.get(key, 0.0) + share * (end - start)
        if self.enabled:
            task = f"{tick.unit.name}{tick.what} step {tick.task.step} batch {tick.task.batch}"
            self.add(task, start, end, on_stage("compute", tick.stage))
