"""`python -m h2o_flexgen.bench`: this engine beside others, on the same work, in the same minutes.

    python -m h2o_flexgen.bench --systems h2o,full,transformers --model opt-125m --batch-size 32 --repetitions 5
    python -m h2o_flexgen.bench --model demo --weights checkpoint --dtype float32 --batch-size 4 --gen-len 32

Each repetition runs every system in turn, each in a fresh process. A record per run, a summary and the table go to
--output-dir; the table is printed too, and the last line of stdout is the summary as one JSON object.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from h2o_flexgen.baselines.compare import compare
from h2o_flexgen.baselines.settings import BenchSettings, find_model
from h2o_flexgen.baselines.summary import summarise
from h2o_flexgen.baselines.systems import SYSTEMS
from h2o_flexgen.baselines.table import markdown
from h2o_flexgen.cli.program import exit_on_errors, print_error
from h2o_flexgen.cli.prompts import random_prompts
from h2o_flexgen.config.flags import Parser, add_arguments, from_namespace
from h2o_flexgen.errors import UsageError

EXIT_OURS_FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code: 1 where this engine itself failed, 0 where a peer did."""
    parser = Parser(prog="python -m h2o_flexgen.bench", description="Compares this engine with others, side by side.")
    add_arguments(parser, BenchSettings)
    parser.add_argument(
        "--output-dir", metavar="DIR", help="folder for records (default: a dated one in results/local)"
    )
    args = parser.parse_args(argv)
    return exit_on_errors(lambda: _bench(from_namespace(BenchSettings, args), args.output_dir))


def _bench(settings: BenchSettings, output_dir: str | None) -> int:
    model = find_model(settings)
    prompts = random_prompts(settings.batch_size, settings.prompt_len, model.config["vocab_size"], settings.seed)
    folder = _output_folder(settings, output_dir)
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print_error(f"warning: the machine is busy (load average {busy:.1f}): these figures will say little")
    result = compare(settings, model, prompts, folder, print_error)
    summary = summarise(result)
    table = markdown(summary)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    print_error(f"records, summary.json and table.md are in {folder}")
    sys.stdout.write(f"{table}\n{json.dumps(summary)}\n")
    return EXIT_OURS_FAILED if any(SYSTEMS.get(name).own for name in result.failed) else 0


def _output_folder(settings: BenchSettings, given: str | None) -> Path:
    """A folder with nothing in it. UsageError where there is something: nothing is overwritten unasked."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    shape = f"b{settings.batch_size}-{settings.prompt_len}+{settings.gen_len}"
    folder = Path(given) if given else Path("results/local") / f"{now}-{settings.model_name}-{shape}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
    except OSError as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}", "needed a folder that can be written") from None
    if taken:
        raise UsageError(f"--output-dir {folder} is not empty", "nothing is overwritten unasked", "name another folder")
    return folder


if __name__ == "__main__":
    sys.exit(main())
