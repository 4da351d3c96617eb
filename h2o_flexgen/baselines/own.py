"""Adapter of this package by the engine's own rule: `python -m h2o_flexgen.baselines.own FOLDER`.

`options` are the fields of EvictionConfig. The adapter that `bench` runs is `h2o_flexgen.cli.adapter`: this one with
the planner of `run`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from h2o_flexgen.baselines.work import WARMUP_NEW, WARMUP_PROMPT, AdapterWork, Outcome, disk_bytes, run
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.reports.record import RunRecord, package_version
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.engine.llm import LLM

SPARED, LEAST_SPARED = 1 / 16, 128 << 20
"""Of a cap, and in bytes at least, what the engine does not plan with: a control group also counts pages of files."""
Complete = Callable[[RunRecord, int, int], RunRecord]
"""From the record of a call and the fewest tokens of any of its prompts and answers to the record with all that the
planner knows."""
Attach = Callable[[LLM], Complete]
"""Gives an engine a planner for its next call."""


def by_rule(llm: LLM) -> Complete:
    """Leaves the engine's own planner where it is."""
    return lambda record, prompt_len, generated: record


def measure(folder: str, attach: Attach = by_rule) -> Outcome:
    """Runs the work in `folder` through `LLM.generate`, as `run` does, planned by what `attach` gives the engine."""
    work = AdapterWork.read(Path(folder))
    with engine_of(work) as llm:
        attach(llm)
        llm.generate([prompt[:WARMUP_PROMPT] for prompt in work.prompts], max_new_tokens=WARMUP_NEW, ignore_eos=True)
        load_s = llm.last_record.load_s if llm.last_record else 0.0
        complete, planning = attach(llm), _PlanTimer(llm)
        read, started = disk_bytes(), time.perf_counter()
        outputs = llm.generate(work.prompts, max_new_tokens=work.gen_len, ignore_eos=True)
        total_s, read = time.perf_counter() - started, disk_bytes() - read
        if llm.last_record is None:
            raise RuntimeError("the run left no record")
        record = complete(llm.last_record, min(len(prompt) for prompt in work.prompts), work.gen_len)
    return Outcome(
        prefill_s=record.prefill_s,
        decode_s=record.decode_s,
        # A second plan may place the weights anew: that is loading, and planning is no generation either.
        total_s=total_s - record.load_s - planning.seconds,
        load_s=load_s + record.load_s,
        token_ids=[output.token_ids for output in outputs],
        versions={"h2o_flexgen": package_version(), "torch": torch.__version__},
        detail={**record.to_json(), "plan_s": planning.seconds},
        disk_read_bytes=read,
        bytes_moved=record.bytes_moved,
        shared=record.shared,
    )


def engine_of(work: AdapterWork) -> LLM:
    """The engine for `work`; unless everything is to be planned, its prompts are one GPU batch."""
    policy = {} if work.plan == "all" else {"gpu_batch_size": len(work.prompts), "num_gpu_batches": 1}
    return LLM(
        work.folder or work.model,
        eviction=EvictionConfig(**work.options),
        policy=policy,
        weights=work.weights,
        dtype=work.dtype,
        device=work.device,
        seed=work.seed,
        cpu_mem=None if work.cpu_mem is None else within(work.cpu_mem),
        gpu_mem=work.gpu_mem,
        offload_dir=str(Path(work.scratch) / "offload"),
    )


def within(cap: int) -> int:
    """Bytes of host memory that the engine is given under a cap on the whole process."""
    return int(cap - max(cap * SPARED, LEAST_SPARED))


class _PlanTimer:
    """The seconds that an engine's planner takes from now on."""

    def __init__(self, llm: LLM) -> None:
        self.seconds, self._planner = 0.0, llm.planner
        llm.planner = self._timed

    def _timed(self, *question: Any) -> Plan:
        started = time.perf_counter()
        try:
            return self._planner(*question)
        finally:
            self.seconds += time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(run(measure))
