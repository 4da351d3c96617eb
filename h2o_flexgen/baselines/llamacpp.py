"""Adapter of llama.cpp: `python -m h2o_flexgen.baselines.llamacpp FOLDER [prepare]`; `options`: {"type": "q4_0"}.

Runs its `llama-batched-bench`, beside this interpreter, on a file of random weights: the prompts of all sequences, then
steps of one token for each, all with the full cache in float16. It feeds random tokens and chooses none, so that the
tokens it is said to have made are zeros; its warm-up is 16 tokens of one sequence.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from h2o_flexgen.baselines.random_gguf import TYPES, GgufShape, random_file
from h2o_flexgen.baselines.work import PASSIVE, AdapterWork, CannotRun, Outcome, batched_bench, bench_row, run
from h2o_flexgen.cores import CoreCount, CoreTimes, core_times

QUANTISED = {"q4_k": "Q4_K_M"}
"""Types that llama.cpp's own program makes of float16, and what they are called there: a mix, as people have them."""
MOST_SEQUENCES = 256  # that llama.cpp is compiled for
_BATCH, _MICRO_BATCH, _PADDING = 2048, 512, 256  # its defaults, and what it rounds a sequence's cells up to
_NO_MEMORY = re.compile(r"failed to allocate|insufficient memory")


def measure(folder: str) -> Outcome:
    work, shape = _asked(folder)
    # The first new token is of the prompt's last, so there is a step less than there are new tokens.
    batch, prompt, steps = len(work.prompts), len(work.prompts[0]), max(1, work.gen_len - 1)
    longest = prompt + max(steps, work.room_len - 1)
    cells = batch * (-(-longest // _PADDING) * _PADDING)
    sizes = {"b": max(_BATCH, batch), "ub": max(_MICRO_BATCH, batch)}
    bench = batched_bench(Path(sys.prefix), batch, prompt, steps, cells, work.threads, **sizes)
    command = [*bench, "-m", str(made(work, shape, work.options["type"]))]
    cores = CoreCount(_times_of_children)
    cores.start()
    started = time.perf_counter()
    said = _output(command, work.threads)
    seconds = time.perf_counter() - started
    cores.stop()
    row = bench_row(said)
    decode_s = row["t_tg"] if work.gen_len > 1 else 0.0
    return Outcome(
        prefill_s=row["t_pp"],
        decode_s=decode_s,
        total_s=row["t_pp"] + decode_s,
        load_s=max(0.0, seconds - row["t"]),
        token_ids=[[0] * work.gen_len for _ in work.prompts],
        versions={"llama.cpp": _version(work.threads)},
        detail={"type": work.options["type"], "cache": "f16", "threads": work.threads, "row": row},
        shared=cores.shared,
    )


def prepare(folder: str) -> None:
    work, shape = _asked(folder)
    made(work, shape, work.options["type"])


def made(work: AdapterWork, shape: GgufShape, kind: str) -> Path:
    """The file of random weights of a type in the scratch folder, made there once."""
    source = random_file(Path(work.scratch), shape, kind if kind in TYPES else "f16", work.seed)
    if kind in TYPES:
        return source
    path = source.with_name(source.name.replace("-f16.", f"-{kind}."))
    if not path.is_file():
        partial, threads = path.with_name(f".{path.name}.partial"), str(work.threads)
        _output([_program("llama-quantize"), str(source), str(partial), QUANTISED[kind], threads], work.threads)
        partial.replace(path)
    return path


def _asked(folder: str) -> tuple[AdapterWork, GgufShape]:
    """The work and the model's shape; CannotRun for what is not done."""
    work = AdapterWork.read(Path(folder))
    if work.weights != "dummy":
        raise CannotRun("llama.cpp's benchmark takes no prompts, so it is compared on random weights: --weights dummy")
    if work.device == "cuda" or (work.device == "auto" and Path("/dev/nvidiactl").exists()):
        raise CannotRun("llama.cpp is built for the CPU here: --device cpu")
    if len(work.prompts) > MOST_SEQUENCES:
        raise CannotRun(f"llama.cpp takes {MOST_SEQUENCES} sequences at most, not {len(work.prompts)}")
    return work, GgufShape.from_config(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))


def _program(name: str) -> str:
    return str(Path(sys.prefix) / "bin" / name)


def _output(command: list[str], threads: int) -> str:
    """The output of a program of llama.cpp, stdout first; where it fails this process ends as it did."""
    environment = {**os.environ, **PASSIVE, "OMP_NUM_THREADS": str(threads)}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CannotRun(f"{command[0]}: {error.strerror} (scripts/peer_env.sh llamacpp builds it)") from None
    if ended.returncode == 0:
        return ended.stdout + ended.stderr
    sys.stderr.write(ended.stdout + ended.stderr)
    refused = next((line for line in ended.stderr.splitlines() if _NO_MEMORY.search(line)), None)
    if refused is not None:
        sys.stderr.write(f"out of memory: {refused}\n")
    raise SystemExit(128 - ended.returncode if ended.returncode < 0 else ended.returncode)


def _version(threads: int) -> str:
    """The version that it reports: the commit that it names is the package that it was built from."""
    lines = _output([_program("llama-batched-bench"), "--version"], threads).splitlines()
    return next((line.removeprefix("version: ") for line in lines if line.startswith("version: ")), "unknown")


def _times_of_children() -> CoreTimes | None:
    """The counters now, with what children of this process computed counted as its own."""
    counted, times = core_times(), os.times()
    return counted and counted._replace(own=counted.own + times.children_user + times.children_system)


if __name__ == "__main__":
    sys.exit(run(measure, prepare))
