"""Who was busy when: the executor's and the copy threads' rows, the same type the simulator will emit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.memory.cuda import Device, Mark, Stream
from h2o_flexgen.schedule.tasks import Task
from h2o_flexgen.schedule.timeline import Row, Timeline, on_stage


class _TimedTask:
    """A compute task: what it was, how much of its tokens are prompts, and while it is computed the context of that."""

    __slots__ = ("begun", "prompts", "stage", "task", "trace", "unit", "what")

    def __init__(self, trace: Trace, task: Task, unit: UnitSpec, prompts: float, what: str, stage: int) -> None:
        self.trace, self.task, self.unit, self.prompts, self.what, self.stage = trace, task, unit, prompts, what, stage

    def __enter__(self) -> None:
        self.begun = self.trace.begin(self.stage)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.trace.end(self, self.begun)


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
        self._queued: list[deque[tuple[_TimedTask, Mark, Mark]]] = [deque() for _ in devices]
        self._lock = threading.Lock()
        self._zero = time.perf_counter()

    @property
    def compute_seconds(self) -> dict[str, float]:
        """Seconds by phase and kind of unit ("decode.mlp", ...). Waits for what a GPU still computes."""
        self._collect(wait=True)
        return self._seconds

    def record(self, task: Task, unit: UnitSpec, prompts: float, what: str = "", stage: int = 0) -> _TimedTask:
        """A context that times one compute task. `prompts`: how much of its tokens are prompts, others are decode rows.

        `what`: which part of the task, where it is computed in several; `stage`: whose task it is.
        """
        return _TimedTask(self, task, unit, prompts, what, stage)

    def begin(self, stage: int) -> float | Mark | None:
        """The beginning of a task, by the clock of what computes it; None while a device records."""
        if not self._devices:
            return time.perf_counter()
        device = self._devices[stage]
        return None if device.capturing() else device.record(Stream.COMPUTE)

    def end(self, timed: _TimedTask, begun: float | Mark | None) -> None:
        """The end of a task that `begin` was called for."""
        if isinstance(begun, float):
            self._book(timed, begun, time.perf_counter())
        elif begun is not None:
            self._queued[timed.stage].append((timed, begun, self._devices[timed.stage].record(Stream.COMPUTE)))
            self._collect(wait=False)

    def add(self, task: str, start: float, end: float, resource: str) -> None:
        """One row; `start` and `end` are `time.perf_counter` readings. Called by the copy threads too."""
        if self.enabled:
            with self._lock:
                self._rows.append(Row(task, start - self._zero, end - self._zero, resource))

    def timeline(self) -> Timeline:
        """The rows so far. Waits for what a GPU still computes."""
        self._collect(wait=True)
        return Timeline(tuple(sorted(self._rows, key=lambda row: row.start)))

    def _collect(self, wait: bool) -> None:
        """Books the tasks that are done, or after a wait all of them."""
        for device, queued in zip(self._devices, self._queued, strict=True):
            if wait and queued:
                device.synchronize(queued[-1][2])
            while queued and device.passed(queued[0][2]):
                timed, first, last = queued.popleft()
                start = device.clock(first)
                self._book(timed, start, start + device.seconds(first, last))
                device.release(first)
                device.release(last)

    def _book(self, timed: _TimedTask, start: float, end: float) -> None:
        for phase, share in (("prefill", timed.prompts), ("decode", 1 - timed.prompts)):
            if share:
                key = f"{phase}.{timed.unit.kind}"
                self._seconds[key] = self._seconds.get(key, 0.0) + share * (end - start)
        if self.enabled:
            batch = "" if timed.task.experts else f" batch {timed.task.batch}"
            task = f"{timed.unit.name}{timed.what} step {timed.task.step}{batch}"
            self.add(task, start, end, on_stage("compute", timed.stage))
