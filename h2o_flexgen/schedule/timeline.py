"""Tasks by resource and time: the rows that both the executor's trace and the simulator emit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

MEASURED, PREDICTED = "h2o_flexgen", "predicted"
"""The processes of a trace file."""
COUNTER = "memory "
"""How the names of the tiers' counters in a trace file begin."""


def on_stage(resource: str, stage: int) -> str:
    """The name of a stage's resource; names of the first stage have no number."""
    return f"{resource} {stage}" if stage else resource


class Row(NamedTuple):
    """One task on one resource ("compute", "disk->cpu", ...); start and end in seconds on one clock."""

    task: str
    start: float
    end: float
    resource: str


class Level(NamedTuple):
    """Bytes in use on a tier, or resident in the "process", from `at` on, in seconds."""

    at: float
    tier: str
    nbytes: int


@dataclass(frozen=True)
class Timeline:
    """Rows of one run, in any order. memory: levels in order of time; none in a simulation. caps: bytes that tiers and
    process may hold."""

    rows: tuple[Row, ...]
    memory: tuple[Level, ...] = ()
    caps: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """Every resource, in the order of their first rows."""
        return tuple(dict.fromkeys(row.resource for row in self.rows))

    @cached_property
    def start(self) -> float:
        """Seconds at which the first row starts; 0 without rows."""
        return min((row.start for row in self.rows), default=0.0)

    @cached_property
    def span(self) -> float:
        """Seconds from the first start to the last end."""
        return max((row.end for row in self.rows), default=0.0) - self.start

    def busy(self, resource: str) -> float:
        """Seconds in which `resource` did anything; rows that overlap on it count once. 0 for an unknown one."""
        return sum(end - start for start, end in self._intervals.get(resource, ()))

    @property
    def overlap(self) -> float:
        """Share of the span in which at least two resources were busy at once, 0 to 1."""
        edges = sorted(
            edge for merged in self._intervals.values() for start, end in merged for edge in ((start, 1), (end, -1))
        )
        together, running, since = 0.0, 0, 0.0
        for at, change in edges:
            if running > 1:
                together += at - since
            running, since = running + change, at
        return together / self.span if self.span > 0 else 0.0

    @cached_property
    def _intervals(self) -> dict[str, list[tuple[float, float]]]:
        """Each resource's busy intervals: disjoint and ascending."""
        by_resource: dict[str, list[tuple[float, float]]] = {resource: [] for resource in self.resources}
        for row in sorted(self.rows, key=lambda row: row.start):
            merged = by_resource[row.resource]
            if merged and row.start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], row.end))
            else:
                merged.append((row.start, row.end))
        return by_resource

    def write_chrome_trace(self, path: str | Path, process: str = MEASURED, predicted: Timeline | None = None) -> None:
        """Write Chrome Trace Event JSON (ui.perfetto.dev, chrome://tracing): a thread per resource, microseconds.

        Memory is a counter per tier. `predicted` is a process of its own. One event per line, so that the file of a
        killed run can be mended by hand. Raises OSError as `open` does.
        """
        parts = [(process, self)] if predicted is None else [(process, self), (PREDICTED, predicted)]
        events = (event for pid, (name, part) in enumerate(parts, start=1) for event in part._events(name, pid))
        with Path(path).open("w", encoding="utf-8") as file:
            caps = json.dumps({"caps": dict(self.caps)})
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {caps}, "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, events)))
            file.write("\n]}\n")

    def _events(self, process: str, pid: int) -> Iterator[dict[str, object]]:
        lanes = self._lanes()
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
        for thread, (resource, _) in enumerate(lanes, start=1):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": resource}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": thread, "args": {"sort_index": thread}}
        placed = ((row, thread) for thread, (_, rows) in enumerate(lanes, start=1) for row in rows)
        for row, thread in sorted(placed, key=lambda pair: pair[0].start):
            start, end = self._microseconds(row.start), self._microseconds(row.end)
            yield {
                "ph": "X",
                "name": row.task,
                "cat": row.task.split(" ", 1)[0],
                "pid": pid,
                "tid": thread,
                "ts": start,
                # Ends are rounded as starts are: tasks that follow at once must not overlap.
                "dur": round(end - start, 3),
            }
        for level in self.memory:
            name, at = f"{COUNTER}{level.tier}", self._microseconds(level.at)
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": {"bytes": level.nbytes}}

    def _lanes(self) -> list[tuple[str, list[Row]]]:
        """The rows of each resource, in as many lanes as run at once.

        Perfetto drops a task that begins before the last one of its thread ended, so that each lane is a thread.
        """
        lanes: list[tuple[str, list[Row]]] = [(resource, []) for resource in self.resources]
        for row in sorted(self.rows, key=lambda row: row.start):
            own = (rows for resource, rows in lanes if resource == row.resource)
            free = next((rows for rows in own if not rows or rows[-1].end <= row.start), None)
            if free is None:
                lanes.append((row.resource, free := []))
            free.append(row)
        return sorted(lanes, key=lambda lane: self.resources.index(lane[0]))

    def _microseconds(self, at: float) -> float:
        """Microseconds since the first row; 0 for earlier times, as of memory that was held before it."""
        return max(0.0, round((at - self.start) * 1e6, 3))
