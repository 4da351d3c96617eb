"""Who was busy when: the executor's and the copy threads' rows, the same type the simulator will emit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from h2o_flexgen.config.model import UnitSpec
from h2o_flexgen.schedule.tasks import Task
from h2o_flexgen.schedule.timeline import Row, Timeline


class Trace:
    """Collects rows from any thread. With `enabled` False only the busy seconds of the compute are kept."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.compute_seconds: dict[str, float] = {}
        self._rows: list[Row] = []
        self._lock = threading.Lock()
        self._zero = time.perf_counter()

    @contextmanager
    def record(self, task: Task, unit: UnitSpec, prompts: float) -> Iterator[None]:
        """Times one compute task. `prompts`: how much of its tokens are prompts, the others are decode rows."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        for phase, share in (("prefill", prompts), ("decode", 1 - prompts)):
            if share:
                key = f"{phase}.{unit.kind}"
                self.compute_seconds[key] = self.compute_seconds.get(key, 0.0) + share * (end - start)
        if self.enabled:
            self.add(f"{unit.name} step {task.step} batch {task.batch}", start, end, "compute")

    def add(self, task: str, start: float, end: float, resource: str) -> None:
        """One row; `start` and `end` are `time.perf_counter` readings. Called by the copy threads too."""
        if self.enabled:
            with self._lock:
                self._rows.append(Row(task, start - self._zero, end - self._zero, resource))

    def timeline(self) -> Timeline:
        return Timeline(tuple(sorted(self._rows, key=lambda row: row.start)))
