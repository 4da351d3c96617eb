"""Which of a few configurations of a kernel is the fastest on this device, found out at the first use.

They are compiled side by side: nearly all of a compilation is LLVM's and ptxas's work, for which Python's lock is free.
A process spends at most `COMPILE_S` seconds on it; after that, untried, the first configuration of each kind is taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

COMPILE_S = 30.0
"""Seconds in which a process begins to compile configurations to choose from."""
_MOST_THREADS = 16
_WARMUP_MS, _MEASURED_MS = 2, 10
_FOUND: dict[Hashable, Config] = {}
_SPENT: list[float] = []  # seconds of compiling, kind by kind


class Config(NamedTuple):
    """Rows of a tile, warps of a program, loads on the way."""

    block: int
    warps: int
    stages: int


def fastest(
    kind: Hashable,
    candidates: Sequence[Config],
    prepare: Callable[[Config], None],
    run: Callable[[Config], None],
    clock: Callable[[Callable[[], None]], float] | None = None,
) -> Config:
    """The fastest of `candidates` for work of this kind; asked again it gives the same answer without running.

    `prepare` compiles what `run` launches, which is called a number of times. A configuration that the device has too
    little shared memory or registers for is left out; OutOfResources if that is all of them. Where there is no time to
    compile, or no memory to measure with, some 256 MiB, it is the first. `clock` measures a call, in any unit; None:
    milliseconds on the device, median of 10 ms of calls.
    """
    if kind not in _FOUND:
        in_time = _compiled(candidates, prepare)
        _FOUND[kind] = _measured(candidates, run, clock or _milliseconds) if in_time else candidates[0]
    return _FOUND[kind]


def forget() -> None:
    """Measure everything anew, and in as much time as at first."""
    _FOUND.clear()
    _SPENT.clear()


def _compiled(candidates: Sequence[Config], prepare: Callable[[Config], None]) -> bool:
    """Whether all of them are compiled, in what is left of `COMPILE_S`."""
    began = time.monotonic()
    with compiling(COMPILE_S - sum(_SPENT)) as jobs:
        for config in candidates:
            prepare(config)
    _SPENT.append(time.monotonic() - began)
    return not jobs.late


def _measured(
    candidates: Sequence[Config], run: Callable[[Config], None], clock: Callable[[Callable[[], None]], float]
) -> Config:
    times: dict[Config, float] = {}
    for config in candidates:
        try:
            times[config] = clock(lambda config=config: run(config))  # type: ignore[misc]
        except OutOfResources as error:
            refused = error
        except torch.OutOfMemoryError:
            return candidates[0]
    if not times:
        raise refused
    return min(times, key=times.__getitem__)


def _milliseconds(call: Callable[[], None]) -> float:
    return float(triton.testing.do_bench(call, warmup=_WARMUP_MS, rep=_MEASURED_MS, return_mode="median"))


class Jobs:
    """Compilations in threads, none of which is begun after `seconds`. In the place of an `Executor`."""

    def __init__(self, seconds: float, pool: ThreadPoolExecutor, clock: Callable[[], float]) -> None:
        self._pool, self._clock, self._until = pool, clock, clock() + seconds
        self.late = False
        """Whether any was not begun."""

    def submit(self, compilation: Callable[[], Any]) -> Future[Any]:
        """The result of `compilation`; TimeoutError where it was not begun."""
        return self._pool.submit(self._in_time, compilation)

    def _in_time(self, compilation: Callable[[], Any]) -> Any:
        if self._clock() >= self._until:
            self.late = True
            raise TimeoutError("no time was left to compile this kernel")
        return compilation()


@contextmanager
def compiling(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Jobs]:
    """Kernels whose `warmup` is called within are compiled side by side, and are there at the end.

    After `seconds` no compilation begins. A kernel left out, or whose compilation fails, is left to its launch.
    """
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        jobs = Jobs(seconds, pool, clock)
        with triton.AsyncCompileMode(jobs, ignore_errors=True):
            yield jobs
