"""What ran when on which resource: the rows that the executor's trace and the simulator both emit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple


def on_stage(resource: str, stage: int) -> str:
    """What the rows of a timeline call a resource of a stage; those of the first have no number."""
    return f"{resource} {stage}" if stage else resource


class Row(NamedTuple):
    """One task on one resource ("compute", "disk->cpu", ...); start and end in seconds on one clock."""

    task: str
    start: float
    end: float
    resource: str


@dataclass(frozen=True)
class Timeline:
    """Rows of one run, in any order; resources keep the order in which they first appear."""

    rows: tuple[Row, ...]

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """Every resource that has a row."""
        return tuple(dict.fromkeys(row.resource for row in self.rows))

    @property
    def start(self) -> float:
        """Seconds at which the first row starts; 0 without rows."""
        return min((row.start for row in self.rows), default=0.0)

    def write_chrome_trace(self, path: str | Path, process: str = "h2o_flexgen") -> None:
        """Write Chrome Trace Event JSON (ui.perfetto.dev, chrome://tracing): one thread per resource, microseconds.

        One event per line, so that the file of a killed run can be mended by hand. Raises OSError as `open` does.
        """
        with Path(path).open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for event in self._events(process)))
            file.write("\n]}\n")

    def _events(self, process: str) -> Iterator[dict[str, object]]:
        threads = {resource: thread for thread, resource in enumerate(self.resources, start=1)}
        yield {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": process}}
        for resource, thread in threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": resource}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": thread, "args": {"sort_index": thread}}
        for row in sorted(self.rows, key=lambda row: row.start):
            yield {
                "ph": "X",
                "name": row.task,
                "cat": row.task.split(" ", 1)[0],
                "pid": 1,
                "tid": threads[row.resource],
                "ts": round((row.start - self.start) * 1e6, 3),
                "dur": round((row.end - row.start) * 1e6, 3),
            }
