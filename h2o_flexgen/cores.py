"""How much of the cores this process had over a stretch of time, and how much others had. Standard library only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SHARE = 0.1
"""Of the cores that a run used (of one, if it used fewer): where others had more, its speeds may have suffered."""
_LEAST_SECONDS = 1.0  # the kernel counts in ticks of 10 ms: over less time a tick too many would be a warning
_STAT = Path("/proc/stat")


class CoreTimes(NamedTuple):
    """Seconds since some moment: by the clock, computed by this process, and of all cores together busy and idle."""

    clock: float
    own: float
    busy: float
    idle: float


class CoreCount:
    """Counts who used the cores between `start` and `stop`, over all such stretches together. Not thread safe."""

    def __init__(self, read: Callable[[], CoreTimes | None] | None = None) -> None:
        self._read = read or core_times
        self._started: CoreTimes | None = None
        self._sum = CoreTimes(0.0, 0.0, 0.0, 0.0)

    def start(self) -> None:
        self._started = self._read()

    def stop(self) -> None:
        ended, started, self._started = self._read(), self._started, None
        if ended is not None and started is not None:
            self._sum = CoreTimes(*(a + b - c for a, b, c in zip(self._sum, ended, started, strict=True)))

    @property
    def shared(self) -> dict[str, float] | None:
        """The `shared` object of a record; None where the kernel does not say, or nothing was counted.

        `seconds` of the clock; `cores` that this process may use, and how many of them on the average it used itself
        (`own`), were `idle`, or served `others`: programs, interrupts, and what the host of a virtual machine took.
        """
        clock, own, busy, idle = self._sum
        if clock <= 0 or busy + idle < clock / 2:  # a sandbox may show a file of zeros
            return None
        return {
            "seconds": clock,
            "cores": round((busy + idle) / clock),
            "own": own / clock,
            "others": max(0.0, busy - own) / clock,
            "idle": idle / clock,
        }


def used_by_others(seconds: float = 0.5) -> float:
    """How many cores other programs use now, watched for some seconds; 0 where the kernel does not say."""
    count = CoreCount()
    count.start()
    time.sleep(seconds)
    count.stop()
    return count.shared["others"] if count.shared else 0.0


def core_times(stat: Path = _STAT) -> CoreTimes | None:
    """The counters now, of the cores that this process may use; None where there is no /proc/stat (not Linux)."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
        usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        # user nice system idle iowait irq softirq steal; the fields behind these are part of user and nice.
        rows = [[int(ticks) for ticks in words[1:9]] for words in map(str.split, lines) if words and words[0] in usable]
    except (OSError, ValueError, AttributeError):
        return None
    second = os.sysconf("SC_CLK_TCK")
    idle = sum(row[3] + row[4] for row in rows) / second
    busy = sum(map(sum, rows)) / second - idle
    return CoreTimes(time.perf_counter(), time.process_time(), busy, idle)


def sharing_warning(shared: Mapping[str, Any] | None) -> str | None:
    """One sentence where others had more of the cores than SHARE of what the run had; None where they had less."""
    if shared is None or shared["seconds"] < _LEAST_SECONDS or shared["others"] <= SHARE * max(1.0, shared["own"]):
        return None
    return (
        f"others used {shared['others']:.2f} of the {shared['cores']} cores while this used {shared['own']:.2f}: "
        "its speeds are not those of this machine alone"
    )
