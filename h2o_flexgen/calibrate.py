"""`python -m h2o_flexgen.calibrate`: how fast this machine is, for the shapes of one model.

    python -m h2o_flexgen.calibrate --model opt-6.7b
    python -m h2o_flexgen.calibrate --model opt-30b --offload-dir /mnt/nvme/h2o --output nvme.json

The profile is kept in ~/.cache/h2o_flexgen/hardware, where `run` and `search` look for it. A table goes to stdout,
everything else to stderr. The last line of stdout is the profile as one JSON object, unless stdout is a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from h2o_flexgen.cli.arguments import add_compress
from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.cli.program import (
    add_json,
    leaving_at_once,
    look_up_model,
    output_file,
    print_error,
    program,
    stop_if_told,
    write_json,
    write_result,
)
from h2o_flexgen.cli.progress import ProgressBar, bar
from h2o_flexgen.config.checks import number
from h2o_flexgen.config.engine import MEASURED_FIELDS, EngineConfig
from h2o_flexgen.config.flags import add_arguments, called, from_namespace
from h2o_flexgen.config.hardware.profile import HardwareProfile, kept_file, load_kept
from h2o_flexgen.config.hardware.rates import ComputeRates, Curve
from h2o_flexgen.config.model.tensors import computed_dtype
from h2o_flexgen.cores import sharing_warning
from h2o_flexgen.errors import MemoryRefused, PlanError, is_out_of_memory, writing
from h2o_flexgen.units import format_bytes, format_rate, format_seconds


@program
def main(argv: Sequence[str] | None) -> int:
    with _parser().parsed(argv, os.environ) as args:
        config = from_namespace(EngineConfig, args)
    number(args.budget_s, "--budget-s", 0, above=True, needed="needed a number of seconds above 0")
    output = output_file("--output", args.output, keep=not args.overwrite)
    look_up_model(replace(config, weights="dummy"))  # sizes are enough
    # torch takes seconds to import: --help and refusals do without it.
    with leaving_at_once():
        from h2o_flexgen.calibration import calibrate
        from h2o_flexgen.calibration.stored import profile_text
    progress, calibration = PartProgress(args.quiet), _calibration(config, args)
    try:
        profile = calibrate(calibration, progress)
    except (MemoryError, RuntimeError, MemoryRefused) as error:
        if not is_out_of_memory(error):
            raise
        found = error.found if isinstance(error, MemoryRefused) else "out of memory"
        of_gpu = "GPU" in found or "CUDA" in str(error)
        raise PlanError(found, change="free some" if of_gpu else "free some, or lower --cpu-mem") from error
    finally:
        progress.close()
    if output is not None:
        with writing(output):
            output.write_text(profile_text(profile), encoding="utf-8")
    write_result(profile_table(profile) + "\n")
    write_json(json.dumps(profile.to_json(), allow_nan=False), args.json)
    kept = kept_file(calibration.key)
    if not args.quiet and load_kept(kept) == profile:  # where it could not be written, a warning said so
        print_error(f"kept in {kept}: run, bench and search plan by it, for models of these shapes on this machine")
    return 0


def _calibration(config: EngineConfig, args: Namespace) -> Any:
    from h2o_flexgen.calibration import Calibration
    from h2o_flexgen.checkpoint.hub import resolve_model
    from h2o_flexgen.checkpoint.opening import stored_spec
    from h2o_flexgen.engine.limits.devices import offload_folder, resolve_device
    from h2o_flexgen.memory.rundir import OffloadDir

    found = resolve_model(**config.named, need_weights=False)
    spec, device = config.kept(stored_spec(found, found.impl(config.model_impl))), resolve_device(config)
    OffloadDir(offload_folder(config.offload_dir)).close()  # found out now, not once the rest was measured
    return Calibration(
        spec,
        computed_dtype(config.dtype, spec.dtype, device.type == "cuda"),
        device,
        offload_folder(config.offload_dir),
        budget_s=args.budget_s,
        emulated=config.emulate_gpu is not None,
        cpu_mem=config.cpu_mem,
    )


def _parser() -> Parser:
    parser = Parser(
        prog=called("calibrate"),
        description="Measures this machine for the shapes of a model: the figures behind plans and predictions.",
        epilog="Every flag can be set in the environment, as for run. Exit codes: 0 all well, 2 flags, 4 model, "
        "5 memory, 6 disk, 130 or 143 interrupted.",
    )
    refused = set(EngineConfig.__dataclass_fields__) - MEASURED_FIELDS
    add_arguments(parser, EngineConfig, exclude=refused, title="model and machine")
    add_compress(parser.add_argument_group("known from FlexGen"), "weight")
    work = parser.add_argument_group("measuring")
    budget = "about how long it may take; everything is measured once, however long that takes (default: 45)"
    work.add_argument("--budget-s", type=float, default=45.0, metavar="SECONDS", help=budget)
    work.add_argument("--output", "-o", metavar="FILE", help="the profile in a file too")
    work.add_argument("--overwrite", action="store_true", help="replace an existing --output file")
    add_json(work)
    work.add_argument("--quiet", "-q", action="store_true", help="no progress on stderr")
    return parser


class PartProgress(ProgressBar):
    """A bar of seconds on a terminal, a line for each part where stderr is a file, nothing with --quiet."""

    def __call__(self, what: str, spent: float, total: float) -> None:
        """See `calibration.measure.Progress`."""
        stop_if_told()
        if self._quiet:
            return
        if not self._terminal:
            print_error(f"measuring {what} ({spent:.0f} of about {total:.0f} s)")
            return
        if self._bar is None:
            self._bar = bar(total, bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}")
        self._bar.n = min(spent, total)
        self._bar.set_description(what)


def profile_table(profile: HardwareProfile) -> str:
    """Rates by device and link, what they were measured from, and how much they disturb each other."""
    lines = [f"{profile.name}: {profile.dtype}, {profile.date}"]
    for device, rates in profile.compute.items():
        if device == "gpu" and rates == profile.compute.get("cpu"):
            continue  # emulated: the CPU's own
        lines += [*_device(device, rates)]
    links = [(name, format_rate(r.bytes_per_s), format_seconds(r.latency_s)) for name, r in profile.links.items()]
    lines += ["", *_aligned([("link", "rate", "latency"), *links])]
    if profile.slowdown:
        pairs = [(a, b, f"{factor:.2f} x as long") for a, row in profile.slowdown.items() for b, factor in row.items()]
        lines += ["", *_aligned([("slowed down", "by", ""), *pairs])]
    lines += ["", *_aligned([("figure", "source"), *profile.sources.items()])]
    if (said := sharing_warning(profile.host.get("shared"))) is not None:
        lines += ["", f"warning: {said}"]
    return "\n".join(lines)


def _device(device: str, rates: ComputeRates) -> Iterator[str]:
    flops = {
        f"{shape.out_features} x {shape.in_features}": {
            n: 2 * n * shape.out_features * shape.in_features / seconds for n, seconds in shape.seconds.points
        }
        for shape in rates.shapes
    }
    flops["others"] = dict(rates.gemm_flops.points)
    counts = sorted({n for known in flops.values() for n in known})
    rows = {of: [f"{known[n] / 1e12:.3g}" if n in known else "-" for n in counts] for of, known in flops.items()}
    yield from _grid(f"{device}: products, TFLOP/s by rows", counts, rows)
    if rates.packed:
        counts = _sizes(rates.packed)
        rows = {f"  {bits} bits": [f"{curve.at(n):.2f}" for n in counts] for bits, curve in rates.packed.items()}
        yield from _grid(f"{device}: products of packed weights, times as long by rows", counts, rows)
    if rates.experts:
        counts = _sizes(rates.experts)
        rows = {f"  {bits} bits": [*map(format_seconds, map(of.time_at, counts))] for bits, of in rates.experts.items()}
        yield from _grid(f"{device}: an expert, by its tokens", counts, rows)
    decode, prefill = rates.decode_attention, rates.prefill_attention
    sizes, keys = _sizes(decode), _sizes({"plain": prefill["plain"]})
    times = {kind: [(x, decode[kind].time_at(x)) for x in sizes] for kind in ("plain", "scored")}
    rows = {f"  {kind}": [f"{format_seconds(t)}, {format_rate(x / t)}" for x, t in row] for kind, row in times.items()}
    yield from _grid(f"{device}: attention of a decode step, by K and V", map(format_bytes, sizes), rows)
    rows = {f"  {kind}": [f"{prefill[kind].at(n) / 1e12:.3g}" for n in keys] for kind in ("plain", "scored")}
    yield from _grid(f"{device}: attention of prompts, TFLOP/s by keys", keys, rows)
    yield ""
    memory, elementwise = format_rate(rates.memory_bytes_per_s), format_rate(rates.elementwise_bytes_per_s)
    yield f"{device}: memory {memory}, elementwise {elementwise}; sampling {format_seconds(rates.sample_s)} per row"
    if rates.fresh_bytes_per_s is not None:
        yield f"{device}: first touch of new memory {format_rate(rates.fresh_bytes_per_s)}"
    if rates.graph_tick_s is not None:
        by = ", ".join(f"{x:g}" for x, _ in rates.graph_tick_s.points)
        yield f"{device}: ticks of recorded steps beyond that by {by} rows: {_tick(rates.graph_tick_s)}"
    curve = rates.tick_s["attn"]
    by = f" by {', '.join(f'{x:g}' for x, _ in curve.points)} rows" if isinstance(curve, Curve) else ""
    yield f"{device}: ticks beyond all that{by}: {', '.join(f'{k} {_tick(s)}' for k, s in rates.tick_s.items())}"


def _sizes(curves: Mapping[str, Curve]) -> list[float]:
    return sorted({x for curve in curves.values() for x, _ in curve.points})


def _grid(title: str, heads: Iterable[float | str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Figures by name, over the numbers that they were measured at."""
    over = (head if isinstance(head, str) else f"{head:g}" for head in heads)
    yield from ("", *_aligned([(title, *over), *((name, *row) for name, row in rows.items())]))


def _tick(seconds: float | Curve) -> str:
    points = seconds.points if isinstance(seconds, Curve) else ((1, seconds),)
    return " ".join(format_seconds(y) for _, y in points)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left, the others to the right if all are numbers."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
