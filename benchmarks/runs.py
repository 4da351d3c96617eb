"""How does `run` change with its flags? Every combination of the values that are given, each a process of its own.

    python -m benchmarks.runs --vary gpu-batch-size=1,8,64 --vary hh-ratio=1,0.2 --flags "--prompt-len 128"
    python -m benchmarks.runs --limit 6G --flags "--model opt-30b --weights-placement disk=1 --hh-ratio 0.2"
    python -m benchmarks.runs --vary num-gpu-batches=-,1,2 --flags "--model opt-6.7b --cpu-mem 4.8GiB" --limit 6G

A value of `-` leaves the flag out. --flags are of every run, on opt-125m with random weights in bfloat16 unless they
say otherwise. Predictions stand beside what was measured where the machine is calibrated for the model
(h2o_flexgen.calibrate). --limit caps memory, page cache included, by a control group (needs root).
"""

from __future__ import annotations

import itertools
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.records import arguments, provenance, run_all, run_json, spread
from h2o_flexgen.baselines.memcap import cap_command, read_report
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.folders import cached
from h2o_flexgen.units import format_bytes

ALWAYS = "--model opt-125m --weights dummy --dtype bfloat16 --no-calibrate --quiet"
RATES = ("prefill", "decode", "gen")
LEFT_OUT = "-"


def points(args: Namespace) -> list[Record]:
    pairs = [each.partition("=") for each in args.vary]
    names = [name for name, _, _ in pairs]
    common = {"flags": args.flags, "limit": args.limit}
    found = []
    for values in itertools.product(*(values.split(",") for _, _, values in pairs)):
        varied = dict(zip(names, values, strict=True))
        name = ", ".join(f"{flag} {value}" for flag, value in varied.items())
        found.append({"name": name or args.flags, "varied": varied, **common})
    return found


def command(point: Record) -> list[str]:
    varied = [f"--{name}={value}" for name, value in point["varied"].items() if value != LEFT_OUT]
    return [sys.executable, "-m", "h2o_flexgen.run", *shlex.split(f"{ALWAYS} {point['flags']}"), *varied]


def measure(point: Record, offload: Path) -> Record:
    """The record of one run, and what the control group saw where there is one. `offload` leaves the page cache."""
    if point["limit"] is None:
        return run_json(command(point))
    with TemporaryDirectory() as folder:
        report = Path(folder) / "memcap.json"
        offload.mkdir(parents=True, exist_ok=True)
        capped = [*cap_command(point["limit"], [offload], report), *command(point), "--offload-dir", str(offload)]
        return {**run_json(capped), "memcap": read_report(report)}


def table(records: list[Record]) -> Iterator[str]:
    """A table for all runs of the same --flags; medians, in brackets least and most."""
    for key in dict.fromkeys((record["flags"], record["limit"]) for record in records):
        yield f"`{key[0]}`" + ("" if key[1] is None else f", within {key[1]}") + ":"
        yield ""
        yield from _rows([record for record in records if (record["flags"], record["limit"]) == key])
        yield ""
    yield provenance(records)


def _rows(records: list[Record]) -> Iterator[str]:
    """A row for each point, whose decoding is also compared with that of the first one, repetition by repetition."""
    names = list(records[0]["varied"])
    heads = [*names, "prefill, tokens/s", "decode", "end to end", "decode over the first", "predicted", "prompt tokens"]
    yield f"| {' | '.join([*heads, 'from disk', 'peak', 'n'])} |"
    yield "|" + "---:|" * (len(heads) + 3)
    errors: list[float] = []
    decode = {run["repetition"]: run["decode_throughput"] for run in records if run["name"] == records[0]["name"]}
    for name in dict.fromkeys(record["name"] for record in records):
        runs = [record for record in records if record["name"] == name]
        last = runs[-1]
        rates = [spread([run[f"{rate}_throughput"] or 0.0 for run in runs], ".4g") for rate in RATES]
        pairs = [(run["decode_throughput"], decode.get(run["repetition"])) for run in runs]
        over = spread([own / other for own, other in pairs if own and other], ".2f")
        guesses = [run["predicted"]["gen_throughput"] for run in runs if run["predicted"]]
        said = ""
        if guesses:
            errors.append(median(guesses) / median(run["gen_throughput"] for run in runs) - 1)
            said = f"{median(guesses):.4g} ({errors[-1]:+.0%})"
        read = format_bytes(last["bytes_moved"].get("disk->cpu", 0))
        peak = max(run.get("memcap", {}).get("peak_bytes") or run["peak_bytes"]["rss"] or 0 for run in runs)
        counts = (run["computed_prompt_tokens"] or run["prompt_tokens"] for run in runs)
        computed = " and ".join(f"{count:,}" for count in dict.fromkeys(counts))  # a store of prefixes fills with runs
        cells = [*last["varied"].values(), *rates, over, said, computed, read, format_bytes(peak)]
        yield f"| {' | '.join(cells)} | {len(runs)} |"
    if errors:
        middle, worst = median(map(abs, errors)), max(errors, key=abs)
        yield ""
        yield f"Predictions of {len(errors)} settings: median error {middle:.0%}, worst {worst:+.0%}."


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, "runs", 3)
    parser.add_argument("--vary", action="append", default=[], metavar="FLAG=V,V", help="a flag of run, its values")
    parser.add_argument("--flags", default="", help="of all runs")
    parser.add_argument("--limit", help="of memory, page cache included, as 6G")
    parser.add_argument("--offload-dir", type=Path, default=cached("offload"), help="with --limit: weights on disk")
    args = parser.parse_args(argv)
    if wrong := [each for each in args.vary if not all(each.partition("="))]:
        parser.error(f"--vary {wrong[0]}: needed a flag and its values, as gpu-batch-size=8,32")
    return run_all(args, points(args), lambda point: measure(point, args.offload_dir), "name", table)


if __name__ == "__main__":
    sys.exit(main())
