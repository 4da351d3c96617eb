"""`h2o-flexgen doctor`: this machine's tiers, rates, limits and kernels, and why features are off, for bug reports.

The text goes to stdout; with --json it is one JSON object alone. The exit code is 0 even where features are off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import h2o_flexgen
from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.cli.program import add_json, program, write_result
from h2o_flexgen.config.flags import called
from h2o_flexgen.units import format_bytes, format_rate


@program
def main(argv: Sequence[str] | None) -> int:
    parser = Parser(prog=called("doctor"), description="Says what this machine offers, and which features are off.")
    parser.add_argument("--offload-dir", "--offload-folder", metavar="DIR", help="the folder that runs would use")
    add_json(parser)
    args = parser.parse_args(argv)
    # torch takes seconds to import: --help does without it.
    from h2o_flexgen.calibration.checkup import checkup

    found = checkup(args.offload_dir)
    found["versions"]["h2o_flexgen"] = h2o_flexgen.__version__
    write_result((json.dumps(found, allow_nan=False) if args.json else "\n".join(_lines(found))) + "\n")
    return 0


def _lines(found: dict[str, Any]) -> Iterator[str]:
    versions, machine = found["versions"], found["machine"]
    yield f"h2o_flexgen {versions['h2o_flexgen']} on {machine['system']}, Python {machine['python']}"
    yield f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, " + format_bytes(
        machine["memory_bytes"]
    )
    yield "\ntiers"
    for name, tier in found["tiers"].items():
        yield f"  {name:10} " + ("none" if tier is None else f"{format_bytes(tier['bytes'])}: {tier['why']}")
    bandwidth = dict(found["bandwidth"])
    yield f"\nbandwidth, {bandwidth.pop('source')}"
    for name, rate in bandwidth.items():
        yield f"  {name:10} {rate if isinstance(rate, str) else format_rate(rate)}"
    yield "\nlimits"
    for name, limit in found["limits"].items():
        in_bytes = name in ("memlock", "file_size", "address_space", "cgroup_memory", "disk_free")
        yield f"  {name:14} " + ("none" if limit is None else format_bytes(limit) if in_bytes else f"{limit:g}")
    yield "\nkernels"
    kernels = found["kernels"]
    yield f"  native   {kernels['native']['computes']}"
    yield f"  triton   {kernels['triton']['why_not'] or 'works'}"
    yield f"  processor has {', '.join(kernels['instructions']) or 'none of the instruction sets that kernels use'}"
    yield "\nfolders"
    for name, folder in found["folders"].items():
        used = "not there" if folder["bytes"] is None else format_bytes(folder["bytes"])
        yield f"  {name:8} {folder['path']} ({used})"
    yield "\nversions"
    yield "  " + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if found["switches"]:
        yield "\nswitches\n  " + ", ".join(f"{name}={value}" for name, value in found["switches"].items())
    yield "\noff" if found["features"] else "\nnothing is off"
    for entry in found["features"]:
        yield f"  {entry['feature']}: {entry['why']}" + (f" -> {entry['change']}" if entry["change"] else "")


if __name__ == "__main__":
    sys.exit(main())
