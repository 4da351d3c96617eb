"""Section paper: the H2O paper's throughput table on this machine: generated tokens/s over prefill and decode.

OPT-6.7B and 30B with random weights, prompts of 512 tokens, 32, 512 or 1,024 new ones, GPU memory capped at 16 GiB,
host memory as it is (208 GB at most). Ours, with H2O at 20 % and with the full cache, by the policy that the search
finds on the machine's calibrated rates; the others through h2o_flexgen.bench at the batches of `peers`.

A cell first generates a few tokens, then all of them where its time allows, else as many as do; where even the first
few take too long, it tries half the sequences. A cell that was cut in either way has no measured throughput: what it
ran gives "short_tokens_per_s", and, its steps taken for all that are missing, "projected_tokens_per_s". Each of our
runs is warmed up by its own first tokens; its first steps do not count for what is missing.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.cost import PredictedSetting, calibrate
from benchmarks.gpu.peers import PEERS, PROBE, RATIOS, Cell, command, host_bytes, one_of, sizes
from benchmarks.gpu.section import ONE, Section, module_command, run, scratch_folder, serve, timed, tiny_model
from h2o_flexgen.baselines.process import RunFailed
from h2o_flexgen.baselines.store import Record

CELL_S = {"opt-30b": 200.0}
"""Seconds of a cell, loading included; OTHER_S for other models. Loading 60 GB takes much of it."""
OTHER_S = 100.0
GROWING = 1.25  # what a step may take more when caches have grown
STARTING_S = 20.0  # imports, CUDA


@dataclass(frozen=True)
class Ran:
    """What one run gave: seconds, sequences, new tokens of each, and facts for the record.

    load_s: before the clock started, warming up included. steady_s: of a step, without the first ones, where known.
    """

    prefill_s: float
    decode_s: float
    load_s: float
    sequences: int
    generated: int
    facts: dict[str, Any]
    steady_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Over prefill and decode."""
        return self.sequences * self.generated / (self.prefill_s + self.decode_s)

    @property
    def step_s(self) -> float:
        """Of decoding."""
        return self.steady_s or self.decode_s / max(1, self.generated - 1)

    def projected(self, gen_len: int) -> float:
        """Tokens per second if every step that is missing took as long as these did."""
        return self.sequences * gen_len / (self.prefill_s + self.step_s * (gen_len - 1))


Attempt = Callable[[int, int, float], Ran]
"""From sequences, new tokens and seconds to what that gave; raises RunFailed."""


def cells(section: Section) -> list[Cell]:
    """The table, the cells first that say most."""
    systems = (*RATIOS, *PEERS)
    if section.dry_run:
        model = tiny_model(section.output / "tiny-opt")
        return [Cell(model, PROBE, system, 32, "4MiB", emulated=True) for system in systems]
    work = [(model, gen_len) for model in ("opt-6.7b", "opt-30b") for gen_len in (512, 32, 1024)]
    return [Cell(*each, system) for each in work for system in systems]


def cell_facts(cell: Cell, batches: list[int], attempt: Attempt, until: float) -> dict[str, Any]:
    """Facts of a cell: of the fastest of `batches`, as many of its tokens as there is time for."""
    probes = [_first(cell, size, attempt, until) for size in batches]
    found = max(
        (ran for ran in probes if isinstance(ran, Ran)), key=lambda ran: ran.projected(cell.gen_len), default=None
    )
    if found is None:
        raise RunFailed("; ".join(map(str, probes)))
    left = until - time.monotonic() - STARTING_S - found.load_s - found.prefill_s
    fitting = int(left / (found.step_s * GROWING)) if found.step_s > 0 else cell.gen_len
    note = None
    if found.generated < cell.gen_len and fitting > 2 * found.generated:
        try:
            found = attempt(found.sequences, min(cell.gen_len, fitting), until - time.monotonic())
        except RunFailed as error:
            note = f"a longer run failed: {error}"
    facts = _facts(cell, found, cut=found.sequences not in batches)
    tried = [str(ran) if isinstance(ran, RunFailed) else f"{ran.sequences}: {ran.tokens_per_s:.4g}" for ran in probes]
    return {**facts, "tried": tried, **({"note": note} if note else {})}


def _first(cell: Cell, size: int, attempt: Attempt, until: float) -> Ran | RunFailed:
    """A short run of `size` sequences, or of fewer where they are too many; what went wrong, where nothing ran."""
    error = RunFailed("no time was left in the budget")
    for _ in range(3):
        left = until - time.monotonic()
        if left < STARTING_S and not cell.emulated:
            break
        try:
            return attempt(size, cell.probe, 0.75 * left)
        except RunFailed as failed:
            error = failed
            if size == 1 or not any(word in str(error).lower() for word in ("memory", "cap is", "gave up")):
                break
            size = size // 2
    return error


def _facts(cell: Cell, ran: Ran, cut: bool) -> dict[str, Any]:
    complete = ran.generated == cell.gen_len and not cut
    speed, projected = ran.tokens_per_s, None if complete else ran.projected(cell.gen_len)
    kind = "measured" if complete else f"in a run of {ran.generated} new tokens"
    return {
        "model": Path(cell.model).name,
        "system": cell.system,
        "prompt_len": cell.prompt_len,
        "gen_len": cell.gen_len,
        "gpu_mem": cell.gpu_mem,
        "sequences": ran.sequences,
        "generated": ran.generated,
        "fewer_sequences": cut,
        "prefill_s": ran.prefill_s,
        "decode_s": ran.decode_s,
        "load_s": ran.load_s,
        "measured_tokens_per_s": speed if complete else None,
        "short_tokens_per_s": None if complete else speed,
        "projected_tokens_per_s": projected,
        "said": f"{speed:.4g} tokens/s {kind}",
        **ran.facts,
    }


def ours(section: Section, cell: Cell) -> dict[str, Any]:
    """Searches a policy, then runs it. The machine is calibrated for the model before the clock of its first cell."""
    setting = PredictedSetting(
        cell.model, cell.gpu_mem, 1, cell.prompt_len, cell.gen_len, 1.0, cell.gpu_mem * cell.emulated
    )
    profile = calibrate(section, setting, 3 if cell.emulated else 30)
    ratio, until = RATIOS[cell.system], deadline(section, cell)
    search = [sys.executable, "-m", "h2o_flexgen.search", "--model", cell.model, "--hardware", str(profile), "--quiet"]
    search += ["--gpu-mem", cell.gpu_mem, "--cpu-mem", f"{host_bytes()}B", "--nvme-mem", "0", "--dtype", "bfloat16"]
    search += ["--prompt-len", str(cell.prompt_len), "--gen-len", str(cell.gen_len), "--hh-ratio", str(ratio)]
    if cell.emulated:
        search += ["--num-prompts", "4"]
    found = run(search, until - time.monotonic()).json()
    policy, predicted = found["policy"], found["predicted"]["gen_throughput"]
    whole = policy["gpu_batch_size"] * policy["num_gpu_batches"]
    budget = None if ratio == 1 else math.ceil(ratio * (cell.prompt_len + cell.gen_len))

    def once(size: int, generated: int, seconds: float) -> Ran:
        rows = min(policy["gpu_batch_size"], size)
        shape = {"gpu_batch_size": rows, "num_gpu_batches": size // rows}
        work = {**asdict(cell), "policy": {**policy, **shape}, "generated": generated, "budget": budget}
        return Ran(**run(module_command("paper", ONE, {**work, "host": host_bytes()}), seconds).json())

    return {**cell_facts(cell, [whole], once, until), "predicted_tokens_per_s": predicted, "budget": budget}


def deadline(section: Section, cell: Cell) -> float:
    """When a cell that begins now has to be done, in seconds of time.monotonic."""
    return time.monotonic() + min(CELL_S.get(cell.model, OTHER_S), section.left())


def theirs(section: Section, cell: Cell) -> dict[str, Any]:
    """Runs a peer at each of its batches."""
    batches = sizes(cell, section.peers)
    until = deadline(section, cell)

    def once(size: int, generated: int, seconds: float) -> Ran:
        with tempfile.TemporaryDirectory() as folder:
            bench = command(cell, section.peers, size, generated, seconds, Path(folder) / "bench")
            return Ran(**one_of(run(bench, seconds + 15).json(), cell.system, size, generated))

    return {**cell_facts(cell, batches, once, until), "dtype": cell.dtype}


def one(work: dict[str, Any]) -> Record:
    """One run of ours after a warm-up, as the fields of a Ran."""
    from h2o_flexgen import LLM, EvictionConfig
    from h2o_flexgen.cli.prompts import random_prompts
    from h2o_flexgen.config.offload import OffloadPolicy

    policy = OffloadPolicy.from_json(work["policy"])
    count, budget = policy.gpu_batch_size * policy.num_gpu_batches, work["budget"]
    eviction = EvictionConfig() if budget is None else EvictionConfig("h2o", budget=budget)
    caps: dict[str, Any] = {"emulate_gpu": work["gpu_mem"]}
    if not work["emulated"]:
        caps = {"device": "cuda", "gpu_mem": work["gpu_mem"], "cpu_mem": work["host"]}
    with LLM(
        work["model"], weights="dummy", dtype="bfloat16", eviction=eviction, policy=policy, disk_mem=0, **caps
    ) as llm:
        prompts = random_prompts(count, work["prompt_len"], llm.model.spec.vocab_size, 0)
        record, load_s, steady_s = timed(llm, prompts, work["generated"])
    kept = {key: record.to_json()[key] for key in ("dtype", "policy", "bytes_moved", "peak_bytes", "warnings")}
    return asdict(Ran(record.prefill_s, record.decode_s, load_s, count, work["generated"], kept, steady_s))


def measure(section: Section) -> None:
    """Every cell that there is time for."""
    scratch_folder().mkdir(parents=True, exist_ok=True)
    for cell in cells(section):
        if section.left() >= 2 * STARTING_S or cell.emulated:
            section.attempt(cell.name, partial(ours if cell.system in RATIOS else theirs, section, cell))
        elif section.wanted(cell.name) and not section.records.done(name=cell.name):
            section.keep(cell.name, failed="not reached: no time was left in the budget")


if __name__ == "__main__":
    sys.exit(serve(measure, one))
