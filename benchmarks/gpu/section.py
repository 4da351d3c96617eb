"""The common parts of the sections of scripts/gpu_check.sh: records, programs that are run, warm-ups.

A record is one line of JSON in OUTPUT/SECTION.jsonl: a name and its figures, or why there are none ("failed"), with
hardware, versions, date, command and commit. No record is overwritten; of several of a name the last good one counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.records import ROOT, shaped
from h2o_flexgen.baselines.process import Finished, RunFailed, run_command
from h2o_flexgen.baselines.store import Record, RecordFile
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.reports.record import host_facts, utc_now, version_of
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED

SCHEMA = 1
PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed", "flexgen", "numpy")
KEPT = "gpu-check"
"""In the cache folder, for the next call on this machine: checkpoints of random weights, compiled kernels."""
LEAST_S = 5.0  # in which nothing can be measured
ONE = "one"
"""Says to a section's module that it is to do one work of it, in a process of its own, and to print its facts."""
WARM_UP = 8
"""New tokens of each sequence: a decode step has been recorded and launched as a whole by then."""
FEWEST = 3
"""Steps that a mean is taken of."""
TINY_OPT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
"""The config of a dry run's model, in place of the sizes of OPT-125M."""


@dataclass(frozen=True)
class Section:
    """The settings of a section, and where its records go. `until` is a time of time.monotonic."""

    name: str
    output: Path
    until: float
    dry_run: bool = False
    only: tuple[str, ...] = ()
    again: bool = False
    commit: str = "unknown"
    peers: str = ""
    command: str = ""

    @property
    def records(self) -> RecordFile:
        return RecordFile.open(self.output, f"{self.name}.jsonl")

    def left(self) -> float:
        return self.until - time.monotonic()

    def wanted(self, name: str) -> bool:
        """Whether to measure `name`: no good record of it is there, and --only, where given, has a part of it."""
        if self.only and not any(part in name for part in self.only):
            return False
        found = (r for r in self.records.records if r["name"] == name and not r["dry_run"])
        return self.again or not any(not r.get("failed") for r in found)

    def attempt(self, name: str, measure: Callable[[], Mapping[str, Any]], **known: Any) -> None:
        """Records what `measure` gives, or why it gave nothing, where `name` is wanted; `known` of either."""
        if not self.wanted(name):
            return
        try:
            if self.left() < LEAST_S:
                raise RunFailed("no time is left in the budget")
            self.keep(name, **{**known, **measure()})
        except RunFailed as error:
            self.keep(name, failed=str(error), **known)
        except Exception as error:
            self.keep(name, failed=f"{type(error).__name__}: {error}".splitlines()[0][:400], **known)

    def keep(self, name: str, **facts: Any) -> None:
        """Appends a record; `failed` among the facts says why there is nothing to report."""
        record = {
            "gpu_check": SCHEMA,
            "section": self.name,
            "name": name,
            "dry_run": self.dry_run,
            "date": utc_now(),
            "commit": self.commit,
            "command": self.command,
            "hardware": hardware(),
            "versions": {name: version for name in PACKAGES if (version := version_of(name))},
        }
        self.records.add({**record, **facts})
        said = f"failed: {facts['failed']}" if facts.get("failed") else facts.get("said", "done")
        say(f"{self.name}: {name}: {said}")


def serve(measure: Callable[[Section], None], one: Callable[[dict[str, Any]], Record] | None = None) -> int:
    """Runs a section's module as a program: all of it (returns 0 even after failures, which are recorded), or one."""
    what, text = sys.argv[1:]
    told = json.loads(text)
    if what == ONE and one is not None:
        print(json.dumps(one(told)))
        return 0
    until = time.monotonic() + told.pop("seconds")
    measure(Section(what, Path(told.pop("output")), until, only=tuple(told.pop("only")), **told))
    return 0


def module_command(section: str, what: str, told: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gpu.{section}", what, json.dumps(told)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@cache
def hardware() -> dict[str, Any]:
    """CPU, memory, system and Python; `gpu` with name, bytes and capability, None without one. No host name."""
    import torch

    facts: dict[str, Any] = {**host_facts(), "gpu": None}
    if torch.cuda.is_available():
        of = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": of.name,
            "count": torch.cuda.device_count(),
            "memory_bytes": of.total_memory,
            "processors": of.multi_processor_count,
            "capability": f"{of.major}.{of.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def run(command: Sequence[str], seconds: float, loud: bool = False, **environment: str) -> Finished:
    """How a program of this repository ended, within `seconds`. RunFailed where there is no time left for it."""
    if seconds <= 0:
        raise RunFailed("no time is left in the budget")
    known = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}
    return run_command(command, seconds, loud=loud, cwd=ROOT, environment=known)


def tiny_model(folder: Path) -> str:
    return shaped(folder, {**(known_config("opt-125m") or {}), **TINY_OPT})


class _Enough(Exception):
    """The warm-up is over."""


def warm_up(llm: Any, prompts: list[list[int]], generated: int) -> float:
    """Begins `generated` tokens for each of `prompts` and leaves off after WARM_UP; returns seconds, loading included.

    Kernels are compiled and tuned, memory pools filled and pages locked at their first use, for the lengths and the
    budget at hand. So a warm-up is the work itself, with the caches, budgets and plan of all of it.
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


def timed(llm: Any, prompts: list[list[int]], generated: int) -> tuple[Any, float, float | None]:
    """A warm-up and the work: the record, the seconds before it, those of a steady decode step (`Steps`)."""
    load_s = warm_up(llm, prompts, generated)
    steps = llm.on_progress = Steps()
    llm.generate(prompts, max_new_tokens=generated, ignore_eos=True)
    if llm.last_record is None:
        raise RunFailed("the run left no record")
    return llm.last_record, load_s, steps.steady_s


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
