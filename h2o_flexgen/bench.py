"""`python -m h2o_flexgen.bench`: this engine beside others, on the same work, in the same minutes.

    python -m h2o_flexgen.bench --systems h2o,full,transformers --model opt-125m --batch-size 32 --repetitions 5
    python -m h2o_flexgen.bench --systems h2o,full,transformers,accelerate,flexgen,deepspeed,kvpress --batch-size auto
    python -m h2o_flexgen.bench --systems full,llamacpp --weight-bits 4 --model llama-3.2-1b
    python -m h2o_flexgen.bench --model demo --dtype float32 --batch-size 4 --gen-len 32

Each repetition runs every system in turn, each in a fresh process, peers in environments of their own
(scripts/peer_env.sh), under --cpu-mem where it is given and with its files out of the page cache. A record per run, a
summary and the table (markdown, CSV) go to --output-dir; the table is printed too, and the last line of stdout is the
summary as one JSON object, unless stdout is a terminal. Our own rows run by the searched plan, as `run` does; the
calibration that it needs comes before all measurements, and --no-search plans by rule. With several batch sizes the
summary is of the largest that all could run, and "best" in it that of each system at its fastest.

The same command with the same --output-dir adds what is missing, so that a comparison can be made in pieces: records
are written as each run ends and never overwritten, batch sizes that were searched are used again, --repetitions counts
those that are there, and the tables are made of all. Systems may be added; other settings are refused.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from h2o_flexgen.baselines.best import at_best
from h2o_flexgen.baselines.runner import Comparison, Runner, compare
from h2o_flexgen.baselines.settings import SYSTEMS, BenchSettings, find_model
from h2o_flexgen.baselines.store import Store, write
from h2o_flexgen.baselines.summary import csv_table, markdown, summarise
from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.cli.program import add_json, print_error, program, write_json, write_result
from h2o_flexgen.cli.prompts import random_prompts
from h2o_flexgen.config.flags import add_arguments, called, from_namespace
from h2o_flexgen.errors import UsageError
from h2o_flexgen.folders import expanded

EXIT_OURS_FAILED = 1


@program
def main(argv: Sequence[str] | None) -> int:
    """Runs the program; returns its exit code: 1 where this engine itself failed, 0 where a peer did."""
    parser = Parser(prog=called("bench"), description="Compares this engine with others, side by side.")
    add_arguments(parser, BenchSettings, title="comparison")
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        help="folder for records; existing ones are not measured again (default: a dated one in results/local)",
    )
    add_json(parser)
    with parser.parsed(argv) as args:
        settings = from_namespace(BenchSettings, args)
    return _bench(settings, args.output_dir, args.json)


def _bench(settings: BenchSettings, output_dir: str | None, json_wanted: bool | None) -> int:
    model = find_model(settings)
    folder = _output_folder(settings, output_dir)
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print_error(f"warning: the machine is busy (load average {busy:.1f}): these figures will say little")

    def prompts(count: int) -> list[list[int]]:
        return random_prompts(count, settings.prompt_len, model.config["vocab_size"], settings.seed)

    with _folders(settings) as folders:
        runner = Runner(settings, model, prompts, *folders)
        if runner.uncapped:
            print_error(f"warning: --cpu-mem is told to every system, but nothing enforces it: {runner.uncapped}")
        if settings.searches:
            parts = at_best(runner, folder, print_error)
        else:
            sizes = {name: settings.batch_of.get(name, settings.batch_sizes[0]) for name in settings.systems}
            label = "given" if settings.batch_of else "equal"
            parts = [(label, compare(runner, sizes, Store.open(folder, runner.kept_settings), print_error))]
    with suppress(BrokenPipeError):  # who read stdout has gone
        write_json(json.dumps(_report(parts, folder)), json_wanted)
    ours = [SYSTEMS.get(name).own for _, result in parts for name in result.failed]
    return EXIT_OURS_FAILED if any(ours) else 0


def _report(parts: list[tuple[str, Comparison]], folder: Path) -> dict[str, Any]:
    """Writes summary.json, table.md and table.csv, prints the table, and returns the summary."""
    summaries = [(label, summarise(result)) for label, result in parts]
    (_, whole), *others = summaries
    table = "\n\n".join([*(markdown(summary, explain=False) for _, summary in others), markdown(whole)])
    csv = csv_table(*summaries)
    whole.update(others)
    write(folder / "summary.json", json.dumps(whole, indent=1) + "\n")
    write(folder / "table.md", table + "\n")
    write(folder / "table.csv", csv)
    print_error(f"records, summary.json, table.md and table.csv are in {folder}")
    print_error("the same command with that --output-dir adds what is missing, with more --repetitions those")
    write_result(table + "\n")
    return whole


@contextmanager
def _folders(settings: BenchSettings) -> Iterator[tuple[Path, Path]]:
    """The folder for the systems' files, which stays where it was named, and one for what is to be done."""
    named = None if settings.scratch_dir is None else expanded(settings.scratch_dir)
    try:
        if named is not None:
            named.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--scratch-dir {named}: {error.strerror}", "needed a folder that can be written") from None
    with tempfile.TemporaryDirectory(prefix="h2o_flexgen-bench-") as temporary:
        yield named or Path(temporary), Path(temporary)


def _output_folder(settings: BenchSettings, given: str | None) -> Path:
    """A folder with nothing in it, or with records of a comparison. UsageError where there is something else."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    sizes = ",".join(map(str, settings.batch_sizes)) or "auto"
    shape = f"b{sizes}-{settings.prompt_len}+{settings.gen_len}"
    folder = Path(given) if given else Path("results/local") / f"{now}-{settings.model_name}-{shape}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A write that was cut off may leave what begins with a dot.
        taken = any(not path.name.startswith(".") for path in folder.iterdir()) and not any(
            any(place.glob(pattern))
            for place in (folder, folder / "best")
            for pattern in ("run-*.json", "failed-*.json", "batches.json")
        )
    except OSError as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}", "needed a folder that can be written") from None
    if taken:
        found = f"--output-dir {folder} is not empty, and does not hold a comparison"
        raise UsageError(found, "nothing is overwritten unasked", "name another folder")
    return folder


if __name__ == "__main__":
    sys.exit(main())
