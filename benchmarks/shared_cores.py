"""What others on the same cores cost: tokens per second beside busy programs, over those alone.

    python -m benchmarks.shared_cores      everything, 3 repetitions: an hour on two cores
    python -m benchmarks.shared_cores --shapes opt-125m:1,opt-125m:8 --repetitions 1 --dtype float32

Ours with the full cache (`full`) and the others of h2o_flexgen.bench that are named, each run a process of its own, in
turn: alone, beside one and two plain Python loops, and beside a program that multiplies matrices by two OpenMP threads
which spin while they wait. Ratios are of the runs of one repetition. Where others were on the cores while a run was to
be alone, its repetition is left out, and the table says so. Records go to --output, a line each, and those that are
there already are not measured again; table.md is made of all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.records import arguments, facts, llama, provenance, run_all, spread
from h2o_flexgen.baselines.process import RunFailed
from h2o_flexgen.baselines.runner import Runner
from h2o_flexgen.baselines.settings import DTYPES, SYSTEMS, BenchSettings, find_model
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.cli.prompts import random_prompts
from h2o_flexgen.cores import sharing_warning
from h2o_flexgen.openmp import without_short_spin

ALONE = "alone"
LLAMA_1B: dict[str, int | bool] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""1.1 B parameters, called llama-1.1b."""
SHAPES = "opt-125m:1,opt-125m:8,opt-125m:32,llama-1.1b:1,llama-1.1b:8"
PHASES = ("prefill", "decode")
KEPT = (*(f"{phase}_s" for phase in PHASES), *(f"{phase}_throughput" for phase in PHASES), "shared", "versions")
"""Of a measurement, beside `facts`."""

# Both end with the script that started them, however that ends.
_BUSY = """
import os
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
_SPINNER = """
import os, torch
parent = os.getppid()
torch.set_num_threads(2)
a, b = torch.randn(256, 768), torch.randn(768, 3072)
print(flush=True)
while os.getppid() == parent:
    a @ b
"""
BESIDE: dict[str, tuple[str, ...]] = {
    ALONE: (),
    "one busy": (_BUSY,),
    "two busy": (_BUSY, _BUSY),
    "spinner": (_SPINNER,),
}
"""The programs that run beside a measurement, by the heading of its column."""


@contextmanager
def running(programs: tuple[str, ...]) -> Iterator[None]:
    """Has them run meanwhile. RunFailed where one does not start, or has ended by itself."""
    environment = without_short_spin(os.environ) | {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "2"}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for program in programs
    ]
    try:
        for process in processes:
            if process.stdout is None or not process.stdout.readline():
                raise RunFailed("a program that was to be beside the run did not start")
        yield
        if any(process.poll() is not None for process in processes):
            raise RunFailed("a program beside the run ended before it")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def points(args: argparse.Namespace) -> list[Record]:
    """Of each shape in turn: every neighbour, and beside it every system."""
    work = {"prompt_len": args.prompt_len, "gen_len": args.gen_len, "dtype": args.dtype, "threads": args.threads}
    return [
        {"name": f"{model}, batch {batch}, {system}, {beside}"}
        | {"model": model, "batch": batch, "system": system, "beside": beside, **work}
        for model, batch in args.shapes
        for beside in BESIDE
        for system in args.systems
    ]


def measure(point: Record, models: Path) -> Record:
    """One run; RunFailed where it fails. `models` has a folder for each model that is known by none."""
    folder, system = models / point["model"], point["system"]
    settings = BenchSettings(
        systems=(system,),
        model=str(folder) if folder.is_dir() else point["model"],
        weights="dummy",
        batch_sizes=(point["batch"],),
        search=False,
        **{name: point[name] for name in ("prompt_len", "gen_len", "dtype", "threads")},
    )
    model = find_model(settings)
    known = facts(sys.argv)
    with TemporaryDirectory(prefix="h2o_flexgen-shared-cores-") as temporary:

        def prompts(count: int) -> list[list[int]]:
            return random_prompts(count, point["prompt_len"], model.config["vocab_size"], settings.seed)

        runner = Runner(settings, model, prompts, Path(temporary), Path(temporary))
        if (why := runner.missing(system)) is not None:
            raise RunFailed(why)
        with running(BESIDE[point["beside"]]):
            run = runner.run(system, point["batch"], point["gen_len"])
    return {**known, **{name: getattr(run, name) for name in KEPT}}


def table(records: list[Record]) -> Iterator[str]:
    """A row for each shape, phase and system: tokens per second alone, and what is left of them beside others."""
    heads = [name for name in BESIDE if name != ALONE]
    yield "Tokens per second alone, and the share of them that is left beside others: medians (least to most)."
    yield "A fair share of two cores is 0.67 to 0.75 beside one busy program, and 0.5 beside two or the spinner."
    yield provenance(records)
    yield ""
    yield f"| shape | phase | system | alone | {' | '.join(f'beside {head}' for head in heads)} | n |"
    yield f"|---|---|---|{'---:|' * (len(heads) + 2)}"
    keys = ("model", "batch", "prompt_len", "gen_len", "dtype", "system")
    not_alone: list[str] = []
    for shape in dict.fromkeys(tuple(record[key] for key in keys) for record in records):
        of_shape = [record for record in records if tuple(record[key] for key in keys) == shape]
        runs = {(record["beside"], record["repetition"]): record for record in of_shape}
        alone = {number: run for (beside, number), run in runs.items() if beside == ALONE}
        said = {number: why for number, run in alone.items() if (why := sharing_warning(run["shared"])) is not None}
        model, batch, prompt, new, dtype, system = shape
        label = f"{model}, batch {batch}, {prompt}+{new}, {dtype}"
        not_alone += [f"- {label}, {system}, repetition {number + 1}: {why}" for number, why in said.items()]
        rows = [runs[ALONE, number] for number in alone.keys() - said.keys()]
        for rate in (f"{phase}_throughput" for phase in PHASES):
            shares = [
                [runs[head, row["repetition"]][rate] / row[rate] for row in rows if (head, row["repetition"]) in runs]
                for head in heads
            ]
            cells = [spread([row[rate] for row in rows], ".4g"), *(spread(share, ".2f") for share in shares)]
            yield f"| {label} | {rate.partition('_')[0]} | {system} | {' | '.join(cells)} | {len(rows)} |"
    if not_alone:
        yield ""
        yield "Runs that were to be alone and were not; their repetitions are left out of the table:"
        yield from not_alone


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "shared-cores", 3)
    parser.add_argument("--shapes", default=SHAPES, help=f"models and batches (default: {SHAPES})")
    parser.add_argument("--systems", default="full,transformers", help="of bench (default: full,transformers)")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--gen-len", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=BenchSettings().threads, help="of each system")
    args = parser.parse_args(argv)
    args.systems = args.systems.split(",")
    if unknown := [name for name in args.systems if name not in SYSTEMS]:
        parser.error(f"no system is called {', '.join(unknown)}; there are {', '.join(SYSTEMS.names())}")
    try:
        args.shapes = [
            (model, int(batch)) for model, _, batch in (shape.partition(":") for shape in args.shapes.split(","))
        ]
    except ValueError:
        parser.error(f"--shapes is {args.shapes}: needed models with a batch each, as in {SHAPES}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    models = llama(args.output.resolve() / "models" / "llama-1.1b", **LLAMA_1B).parent
    return run_all(args, points(args), lambda point: measure(point, models), "name", table)


if __name__ == "__main__":
    sys.exit(main())
