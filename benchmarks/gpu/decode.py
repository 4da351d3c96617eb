"""Section decode: seconds per decode step with everything on the GPU, beside the fewest that the bandwidth allows.

OPT-6.7B's shape with random weights, 24 sequences of 2,048 + 2,048 tokens, KV cache at 20 %, and the full cache. OPT's
context is 2,048: the model has a position table of twice that, for which random weights are as good. Of the new tokens
a part is generated: with a budget the cache is full from the first step on, so that every step does what the last would
do; the full cache grows, and its record says how far. No figure is projected. `step_s` is the mean of all decode steps,
`steady_step_s` of those after a graph was recorded; `load_s` contains the warm-up, which is the work's first tokens.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.section import ONE, Section, module_command, run, serve, timed, tiny_model
from benchmarks.records import shaped
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.config.model.known import known_config

RATIO = 0.2


@dataclass(frozen=True)
class Work:
    """One measurement: `generated` of `gen_len` new tokens of each sequence; `budget` None keeps every token."""

    model: str
    batch: int
    prompt_len: int
    gen_len: int
    generated: int
    budget: int | None
    emulated: bool = False

    @property
    def name(self) -> str:
        cache = "full cache" if self.budget is None else f"H2O {RATIO:.0%}"
        return f"{self.model.rpartition('/')[2]}, {self.batch} x {self.prompt_len:,}+{self.gen_len:,}, {cache}"

    @property
    def ran(self) -> str:
        part = f"{self.generated:,} of {self.gen_len:,} new tokens"
        if self.budget is None:
            return f"{part}; the cache grew from {self.prompt_len:,} to {self.prompt_len + self.generated:,} tokens"
        return f"{part}; the cache held its {self.budget:,} tokens from the first step on"


def works(folder: Path, dry_run: bool) -> list[Work]:
    """The measurements, the most telling first; `folder` takes the models' config.json."""
    if dry_run:
        model = tiny_model(folder / "tiny-opt")
        return [Work(model, 2, 32, 32, 8, budget, True) for budget in (math.ceil(RATIO * 64), None)]
    config = {**(known_config("opt-6.7b") or {}), "max_position_embeddings": 4096}
    model = shaped(folder / "opt-6.7b-4096-positions", config)
    return [Work(model, 24, 2048, 2048, 256, budget) for budget in (math.ceil(RATIO * 4096), None)]


def one(told: dict[str, Any]) -> Record:
    """Facts of one Work, measured in this process."""
    from benchmarks.gpu.kernels import bandwidth, best
    from h2o_flexgen import LLM, EvictionConfig
    from h2o_flexgen.cli.prompts import random_prompts

    work = Work(**told)
    rates = bandwidth()
    eviction = EvictionConfig() if work.budget is None else EvictionConfig("h2o", budget=work.budget)
    where = {kind: {"gpu": 1.0} for kind in ("weights", "cache", "hidden")}
    policy = {**where, "gpu_batch_size": work.batch, "num_gpu_batches": 1}
    machine = {"emulate_gpu": "1GiB"} if work.emulated else {"device": "cuda"}
    with LLM(
        work.model, weights="dummy", dtype="bfloat16", eviction=eviction, policy=policy, share_prefixes=False, **machine
    ) as llm:
        spec = llm.model.spec
        prompts = random_prompts(work.batch, work.prompt_len, spec.vocab_size, 0)
        record, load_s, steady_step_s = timed(llm, prompts, work.generated)
    tensors = [tensor for group in spec.weight_groups for tensor in group.tensors]
    # Position tables are read by the row; everything else once per step.
    weights = sum(2 * math.prod(tensor.shape) for tensor in tensors if "position" not in tensor.name)
    slots = work.budget or work.prompt_len + work.generated / 2
    cache = work.batch * slots * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 2
    scores = 0 if work.budget is None else 12 * work.batch * slots * spec.num_layers * spec.num_kv_heads
    nbytes, step = weights + cache + scores, record.decode_s / (work.generated - 1)
    bound = nbytes / best(rates)
    asked = {name: getattr(work, name) for name in ("batch", "prompt_len", "gen_len", "generated", "budget", "ran")}
    kept = ("dtype", "prefill_s", "decode_s", "peak_bytes", "kv_bytes", "warnings")
    return {
        "model": Path(work.model).name,
        **asked,
        **{name: getattr(record, name) for name in kept},
        "projected": False,
        "load_s": load_s,
        "step_s": step,
        "steady_step_s": steady_step_s,
        "decode_tokens_per_s": record.decode_throughput,
        "bytes_per_step": nbytes,
        **rates,
        "bound_step_s": bound,
        "said": f"{step * 1e3:.2f} ms a step, bound {bound * 1e3:.2f} ms",
    }


def measure(section: Section) -> None:
    def measured(work: Work) -> Record:
        return run(module_command("decode", ONE, vars(work)), section.left()).json()

    with tempfile.TemporaryDirectory() as folder:
        for work in works(Path(folder), section.dry_run):
            section.attempt(work.name, partial(measured, work), ran=work.ran)


if __name__ == "__main__":
    sys.exit(serve(measure, one))
