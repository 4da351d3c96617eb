"""A model of 30 billion parameters on a machine with less memory than it has weights: OPT-30B's shape, to the end.

    python -m benchmarks.opt30b              under 6 GiB, 64 sequences of 64 + 8 tokens
    python -m benchmarks.opt30b --dry-run    how many layers fit on the disk, and about how long it takes
    python -m benchmarks.opt30b --layers 4 --limit 4G --batch 4 --num-batches 2

Random weights in bfloat16, all of them on disk, read anew in every step; the KV cache (H2O at 20 %) and hidden states
in memory, which a control group caps, page cache included (scripts/memcap.sh: needs root). The weights are 60 GB. Where
the disk has less room the model has as many layers as fit, and is called "opt-30b with N of 48 layers" everywhere. They
are written by the first run, reused by the others, and removed at the end without --keep. Records go to --output, a
line each; table.md and opt30b.png are made of all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records import arguments, provenance, repeat, report, run_json, save_picture, shown, spread, tidy
from h2o_flexgen.baselines.memcap import cap_command, read_report
from h2o_flexgen.baselines.store import Record, RecordFile
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.units import format_bytes, format_rate, format_seconds

DTYPE = "bfloat16"
SPARE = 2 << 30
"""Bytes of disk that are left free."""
WRITE, READ, COMPUTE = 0.7e9, 2e9, 0.4e12
"""Assumed for the estimate of the time, in bytes and FLOPs per second."""


def spec_of(model: str, layers: int | None = None) -> ModelSpec:
    """The shape of `model`, with `layers` layers if a number is given."""
    config = known_config(model)
    if config is None:
        raise SystemExit(f"no model is called {model}")
    return spec_from_config({**config, **({"num_hidden_layers": layers} if layers else {})}, model)


def weight_bytes(spec: ModelSpec) -> int:
    """Of all weights, as they lie on disk."""
    return sum(group.buffer_bytes(DTYPE) for group in spec.weight_groups)


def layers_that_fit(model: str, room: int) -> int:
    """The most layers whose weights take at most `room` bytes; 0 where not even one does."""
    whole, one = spec_of(model), weight_bytes(spec_of(model, 1))
    each = (weight_bytes(whole) - one) // (whole.num_layers - 1)
    return max(0, min(whole.num_layers, 1 + (room - one) // each))


def room(scratch: Path) -> int:
    """Bytes that weights may take: what is free, and what an earlier run left in `scratch`, less SPARE."""
    left = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    return shutil.disk_usage(scratch).free + left - SPARE


def prepared(args: argparse.Namespace, scratch: Path, folder: Path) -> Record:
    """The point to measure: a model whose weights fit on the disk, and a folder for it where it is not the whole one.

    Weights of another size that an earlier run left are removed.
    """
    whole, fitting = spec_of(args.model), layers_that_fit(args.model, room(scratch))
    layers = args.layers or fitting
    if not 0 < layers <= min(fitting, whole.num_layers):
        raise SystemExit(
            f"{args.model} has {whole.num_layers} layers, the disk of {shown(scratch)} has room for {fitting} of them "
            f"and {format_bytes(SPARE)} more, and {layers} are wanted"
        )
    title, model = args.model, args.model
    if layers < whole.num_layers:
        title = f"{args.model} with {layers} of {whole.num_layers} layers"
        place = folder / title.replace(" ", "-")
        config = {**(known_config(args.model) or {}), "num_hidden_layers": layers, "_name_or_path": title}
        if not args.dry_run:
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        model = shown(place)
    marker = scratch / "model"
    if not args.dry_run and (marker.read_text(encoding="utf-8") if marker.exists() else title) != title:
        remove_weights(scratch)
    if not args.dry_run:
        marker.write_text(title, encoding="utf-8")
    shape = {"batch": args.batch, "num_batches": args.num_batches, "prompt": args.prompt, "new": args.new}
    known = {"layers": layers, "of_layers": whole.num_layers, "weight_bytes": weight_bytes(spec_of(args.model, layers))}
    name = f"{title}, {args.batch} x {args.num_batches} sequences of {args.prompt}+{args.new} tokens, {args.limit}"
    return {"title": title, "model": model, "limit": args.limit, "ratio": args.hh_ratio, **shape, **known, "name": name}


def remove_weights(scratch: Path) -> None:
    """The packed weights in the script's own folder."""
    for path in scratch.glob("packed-*"):
        shutil.rmtree(path)


def estimate(point: Record) -> str:
    """About how long one run takes, at rates that are assumed."""
    nbytes, sequences = point["weight_bytes"], point["batch"] * point["num_batches"]
    read, flops = nbytes / READ, nbytes * sequences  # two FLOPs for a parameter of two bytes, per token
    prefill = max(read, flops * point["prompt"] / COMPUTE)
    decode = (point["new"] - 1) * max(read, flops / COMPUTE)
    return (
        f"{point['name']}: {nbytes / 1e9:.1f} GB of weights; about {format_seconds(nbytes / WRITE)} to write them "
        f"once, {format_seconds(prefill)} of prefill and {format_seconds(decode)} of decode, if the disk writes "
        f"{format_rate(WRITE)} and reads {format_rate(READ)} and prompts are computed at {COMPUTE / 1e12:g} TFLOP/s"
    )


def command(point: Record, scratch: Path, report: Path) -> list[str]:
    """One run under the cap."""
    sequences = point["batch"] * point["num_batches"]
    work = {"gpu-batch-size": point["batch"], "num-gpu-batches": point["num_batches"], "num-prompts": sequences}
    work |= {"prompt-len": point["prompt"], "gen-len": point["new"], "hh-ratio": point["ratio"]}
    work |= {"weights-placement": "disk=1", "cache-placement": "cpu=1", "hidden-placement": "cpu=1"}
    work |= {"offload-dir": scratch, "nvme-mem": f"{point['weight_bytes'] // 10**6 + 100}MB"}
    flags = [str(text) for name, value in work.items() for text in (f"--{name}", value)]
    capped = cap_command(point["limit"], [scratch], report)
    run = [sys.executable, "-m", "h2o_flexgen.run", "--model", point["model"], "--weights", "dummy", "--dtype", DTYPE]
    return [*capped, *run, "--no-calibrate", *flags]


def measure(point: Record, scratch: Path, folder: Path) -> Record:
    """One run: its record, what the control group saw, and the bytes that the plan says it reads."""
    from benchmarks.offload_check import planned_disk_bytes  # torch, which takes its time

    report = folder / "memcap.json"
    try:
        record = run_json(command(point, scratch, report), loud=True)
        memcap = read_report(report)
    finally:
        report.unlink(missing_ok=True)
    own = {item.name for item in fields(RunRecord)}
    run = RunRecord.from_json({key: value for key, value in record.items() if key in own})
    known = known_config(point["title"].partition(" ")[0]) or {}
    spec = spec_from_config({**known, "num_hidden_layers": point["layers"]}, run.model)
    return {**record, "memcap": memcap, "planned_disk_bytes": planned_disk_bytes(run, spec)}


def table(records: list[Record]) -> Iterator[str]:
    """A row per model and work; medians, in brackets least and most."""
    yield "Weights on disk, read anew in every step; generated tokens per second over prefill and decode. Medians, in"
    yield "brackets the least and the most; the peak is that of the control group, page cache included."
    yield provenance(records)
    if not records:
        return
    yield ""
    yield (
        "| model | sequences, tokens, cap | tokens/s | prefill s | decode s | decode tokens/s | read | as planned "
        "| disk while busy | peak | resident | bound | runs |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---|---:|"
    for name in dict.fromkeys(record["name"] for record in records):
        yield _row([record for record in records if record["name"] == name])


def _row(runs: list[Record]) -> str:
    first = runs[0]
    title = f"{first['title']}, {first['weight_bytes'] / 1e9:.1f} GB"
    work = f"{first['batch']} x {first['num_batches']}, {first['prompt']}+{first['new']}, {first['limit']}"
    speeds = [
        spread([run[key] or 0.0 for run in runs])
        for key in ("gen_throughput", "prefill_s", "decode_s", "decode_throughput")
    ]
    read = {run["bytes_moved"].get("disk->cpu", 0) for run in runs}
    planned = {run["planned_disk_bytes"] for run in runs}
    verdict = "yes" if read == planned else f"no: {', '.join(f'{value:,}' for value in planned if value is not None)}"
    rate = format_rate(median(run["bandwidth"].get("disk->cpu") or 0.0 for run in runs))
    peaks = [run["memcap"]["peak_bytes"] for run in runs if run["memcap"]["peak_bytes"] is not None]
    peak = format_bytes(max(peaks)) if peaks else "not reported"
    resident = format_bytes(max(run["peak_bytes"]["rss"] for run in runs))
    bound = first["bound"]
    busy = f"{bound['resource']}, busy for {bound['seconds']:.0f} of {first['total_s']:.0f} s"
    cells = [title, work, *speeds, ", ".join(f"{value:,}" for value in sorted(read)), verdict, rate, peak, resident]
    return f"| {' | '.join(cells)} | {busy} | {len(runs)} |"


def picture(records: list[Record], path: Path) -> None:
    """Where the time of each run went: the phases, and how long disk and compute were busy meanwhile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.4 + 0.9 * len(records)), layout="constrained")
    axes: Any = figure.subplots()
    colors = {"prefill": "#1f5fa8", "decode": "#c1121f", "disk->cpu": "#7b6d8d", "compute": "#e08e45"}
    for place, run in enumerate(records):
        busy = run["bound"]["busy"]
        for name, start, seconds, row in (
            ("prefill", 0.0, run["prefill_s"], 0),
            ("decode", run["prefill_s"], run["decode_s"], 0),
            ("disk->cpu", 0.0, busy.get("disk->cpu", 0.0), 1),
            ("compute", 0.0, busy.get("compute", 0.0), 2),
        ):
            label = f"{name}{' busy' if row else ''}" if place == 0 else None
            axes.barh(4 * place + row, seconds, left=start, height=0.85, color=colors[name], label=label)
    axes.set_yticks(
        [4 * place + 1 for place in range(len(records))], [run["name"].replace(", ", "\n") for run in records]
    )
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of generation")
    tidy(axes)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    save_picture(figure, path)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "opt30b", 1, "runs")
    parser.add_argument("--model", default="opt-30b", help="a known model (default: opt-30b)")
    parser.add_argument("--layers", type=int, help="fewer than the model has (default: all that fit on the disk)")
    parser.add_argument("--limit", default="6G", help="of memory, page cache included (default: 6G)")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a GPU batch (default: 32)")
    parser.add_argument("--num-batches", type=int, default=2, help="GPU batches of the block (default: 2)")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--hh-ratio", type=float, default=0.2)
    parser.add_argument("--keep", action="store_true", help="leave the weights on the disk")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    parser.add_argument("--offload-dir", type=Path, default=Path("~/.cache/h2o_flexgen/opt30b").expanduser())
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    scratch = args.offload_dir.resolve() / "weights"
    scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = args.output.resolve()
    if args.dry_run:
        print(estimate(prepared(args, scratch, folder)))
        return 0
    store = RecordFile.open(folder)
    point = prepared(args, scratch, folder)
    print(estimate(point), file=sys.stderr, flush=True)
    failed = repeat(store, [point], args.repetitions, lambda point: measure(point, scratch, folder), "name")
    if not args.keep:
        remove_weights(scratch)
    else:
        print(f"the weights stay in {shown(scratch)}", file=sys.stderr)
    report(store, table, picture, "opt30b.png")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
