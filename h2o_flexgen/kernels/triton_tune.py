"""Which of a few configurations of a kernel is the fastest on this device, found out at the first use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

_FOUND: dict[Hashable, Config] = {}
_WARMUP_MS, _MEASURED_MS = 2, 10


class Config(NamedTuple):
    """Rows of a tile, warps of a program, loads on the way."""

    block: int
    warps: int
    stages: int


def fastest(
    kind: Hashable,
    candidates: Sequence[Config],
    run: Callable[[Config], None],
    clock: Callable[[Callable[[], None]], float] | None = None,
) -> Config:
    """The fastest of `candidates` for work of this kind; asked again it gives the same answer without running.

    `run` launches the work; it is called a number of times for each. A configuration that the device has too little
    shared memory or registers for is left out; OutOfResources if that is all of them. Where there is no memory to
    measure with, some 256 MiB, it is the first. `clock` measures a call, in any unit; None: milliseconds on the device,
    median of 10 ms of calls.
    """
    if kind not in _FOUND:
        times: dict[Config, float] = {}
        for config in candidates:
            try:
                times[config] = (clock or _milliseconds)(lambda config=config: run(config))  # type: ignore[misc]
            except OutOfResources as error:
                refused = error
            except torch.OutOfMemoryError:
                times = {candidates[0]: 0.0}
                break
        if not times:
            raise refused
        _FOUND[kind] = min(times, key=times.__getitem__)
    return _FOUND[kind]


def forget() -> None:
    """Measure everything anew."""
    _FOUND.clear()


def _milliseconds(call: Callable[[], None]) -> float:
    return float(triton.testing.do_bench(call, warmup=_WARMUP_MS, rep=_MEASURED_MS, return_mode="median"))
