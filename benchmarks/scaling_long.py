r"""One long generation at a fixed budget: seconds per step and resident memory along it.

    python -m benchmarks.scaling_long \
        '{"model": "FOLDER", "batch": 8, "prompt": 256, "budget": 256, "new": 16384, "window": 512}'

In a process of its own, so that its memory is its own. The last line of stdout is the engine's record with `windows`
added: for each window of decode steps the step it ends with, the mean, median and least seconds of a step, and the
resident bytes of the process at its end. What is left over after the last whole window is dropped.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from itertools import pairwise
from random import Random
from statistics import fmean, median
from typing import Any

import psutil

from h2o_flexgen import LLM, EvictionConfig


def main(settings: dict[str, Any]) -> int:
    process, draw = psutil.Process(), Random(0)
    times, resident, window = array("d"), array("q"), settings["window"]

    def note(what: str, done: int, total: int) -> None:
        """Called before every step: before the prompts, then before each decode step."""
        if what != "generating":
            return
        times.append(time.perf_counter())
        if len(times) % window == 2 % window:  # before decode step 1, and then after every window
            resident.append(process.memory_info().rss)
            print(f"{done:,} of {total:,} tokens", file=sys.stderr, flush=True)

    policy = {"gpu_batch_size": settings["batch"], "num_gpu_batches": 1, "weights": {"cpu": 1.0}, "cache": {"cpu": 1.0}}
    eviction = EvictionConfig("h2o", budget=settings["budget"])
    with LLM(settings["model"], weights="dummy", dtype="bfloat16", eviction=eviction, policy=policy) as llm:
        vocabulary = llm.model.spec.vocab_size
        prompts = [[draw.randrange(3, vocabulary) for _ in range(settings["prompt"])] for _ in range(settings["batch"])]
        llm.on_progress = note
        outputs = llm.generate(prompts, max_new_tokens=settings["new"], ignore_eos=True)
        record = llm.last_record.to_json()
    short = [output.index for output in outputs if len(output.token_ids) != settings["new"]]
    if short:
        raise RuntimeError(f"sequences {short} ended early: {outputs[short[0]].error}")
    steps = [later - earlier for earlier, later in pairwise(times[1:])]
    windows = []
    for index, end in enumerate(range(window, len(steps) + 1, window)):
        part = steps[end - window : end]
        windows.append(
            {"step": end, "mean_s": fmean(part), "median_s": median(part), "least_s": min(part)}
            | {"rss_bytes": resident[index + 1] if index + 1 < len(resident) else None}
        )
    print(json.dumps({**record, "windows": windows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
