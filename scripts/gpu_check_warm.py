"""Warm-ups of the sections of scripts/gpu_check.sh, and what a decode step takes after one.

Compiled and tuned kernels, memory pools, locked pages: what is made at its first use is made for the lengths and the
budget at hand. A warm-up is therefore the work itself, left after its first tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import Any

from h2o_flexgen.schedule.recorded import FIRST_REPLAYED

WARM_UP = 8
"""New tokens of each sequence: a decode step has been recorded and launched as a whole by then."""
FEWEST = 3
"""Steps that a mean is taken of."""


class _Enough(Exception):
    """The warm-up is over."""


def warm_up(llm: Any, prompts: list[list[int]], generated: int) -> float:
    """Begins `generated` tokens for each of `prompts` and leaves off after WARM_UP; seconds, those of loading included.

    Caches, budgets and the plan are those of the whole work.
    """
    left = len(prompts) * (generated - WARM_UP)

    def watch(what: str, done: int, total: int) -> None:
        if what == "generating" and total - done <= left:
            raise _Enough

    told, llm.on_progress, began = llm.on_progress, watch, time.perf_counter()
    try:
        llm.generate(prompts, max_new_tokens=generated, ignore_eos=True)
    except _Enough:
        pass
    finally:
        llm.on_progress = told
    return time.perf_counter() - began


class Steps:
    """When the steps of a run began, in which all sequences get equally many tokens: an `LLM.on_progress`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._began = clock, dict[int, float]()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what == "generating":
            self._began.setdefault(total - done, self._clock())

    @property
    def steady_s(self) -> float | None:
        """Mean seconds of the decode steps from the first on that is nothing but a graph's launch, where graphs are
        used; the steps before it compute, warm up and record. None where FEWEST are not left."""
        steps = [later - earlier for earlier, later in pairwise(self._began.values())]
        steady = steps[FIRST_REPLAYED:]  # the first of all is the prompts'
        return fmean(steady) if len(steady) >= FEWEST else None
