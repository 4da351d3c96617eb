"""Tables of the records of scripts/gpu_check.sh, for table.md and for the README.

A dry run's records never get into the README, nor do those of a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from h2o_flexgen.baselines.store import Record, RecordFile
from h2o_flexgen.reporting.tables import markdown_table
from h2o_flexgen.units import format_bytes

BEGIN, END = "<!-- gpu table -->", "<!-- end of gpu table -->"
NOTHING = "No GPU figure has been measured yet: `scripts/gpu_check.sh` measures them, `docs/gpu.md` says how."
SECTIONS = ("kernels", "decode", "paper", "cost", "tests")
WHOLE = "section"
"""The name of the record of a section that crashed or ran out of time."""


def latest(records: Iterable[Record]) -> list[Record]:
    """The last good record of every name, or the last failed one where none was good, in order of first appearance."""
    found: dict[str, Record] = {}
    for record in records:
        found.pop(WHOLE, None)  # that a section failed as a whole matters until it is run again
        known = found.get(record["name"])
        if known is None or known.get("failed") or not record.get("failed"):
            found[record["name"]] = record
    return list(found.values())


def read(folder: Path, section: str) -> list[Record]:
    return RecordFile.open(folder, f"{section}.jsonl").records


def tables(folder: Path) -> str:
    """All tables of a folder's records, dry runs said to be such."""
    records = {name: latest(read(folder, name)) for name in SECTIONS}
    every = [record for rows in records.values() for record in rows]
    dry = "**Dry run: tiny shapes, no GPU; not one of these figures means anything.**\n\n"
    text = "\n\n".join(_parts(records))
    return (dry if any(record["dry_run"] for record in every) else "") + text


def readme_block(results: Path) -> str:
    """The README's tables of all good records in results/*-gpu-*, dry runs apart; NOTHING where there are none."""
    records: dict[str, list[Record]] = {name: [] for name in SECTIONS}
    for folder in sorted(results.glob("*-gpu-*")):
        for name in SECTIONS:
            records[name] += [r for r in read(folder, name) if not r["dry_run"] and r["hardware"]["gpu"]]
    shown = {name: [r for r in latest(rows) if not r.get("failed")] for name, rows in records.items()}
    if not any(shown.values()):
        return NOTHING
    return "\n\n".join(_parts(shown))


def with_block(text: str, block: str) -> str:
    """`text` with `block` between its marks. ValueError where it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, ending, after = rest.partition(END)
    if not begin or not ending:
        raise ValueError(f"needed {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def _parts(records: dict[str, list[Record]]) -> Iterator[str]:
    writers = {"kernels": _kernels, "decode": _decode, "paper": _paper, "cost": _cost, "tests": _tests}
    for name, rows in records.items():
        good = [record for record in rows if not record.get("failed")]
        if good:
            yield _where(name, good)
            yield from writers[name](good)
        failed = [f"- {record['name']}: {record['failed']}" for record in rows if record.get("failed")]
        if failed:
            yield "\n".join([f"{name}: did not run", *failed])


def _where(name: str, rows: list[Record]) -> str:
    """Machine, versions, dates, commits and commands of a section's records."""
    gpu, versions = rows[-1]["hardware"]["gpu"], rows[-1]["versions"]
    machine = f"{gpu['name']} ({format_bytes(gpu['memory_bytes'])}), CUDA {gpu['cuda']}" if gpu else "no GPU"
    host = rows[-1]["hardware"]
    machine += f", {host['cores']} cores of {host['cpu']}, {format_bytes(host['memory_bytes'])}"
    software = ", ".join(f"{key} {value}" for key, value in versions.items() if key in ("torch", "triton"))
    dates = sorted({record["date"][:10] for record in rows})
    commits = ", ".join(dict.fromkeys(record["commit"] for record in rows))
    when, command = " to ".join(dict.fromkeys((dates[0], dates[-1]))), rows[-1]["command"]
    return f"**{name}**: {machine}; {software}; {when}; `{command}` at {commits}."


def _kernels(rows: list[Record]) -> Iterator[str]:
    for record in rows:
        if record["name"] == "bandwidth":
            rates = f"{record['copy_bytes_per_s'] / 1e12:.2f} TB/s, reading {record['read_bytes_per_s'] / 1e12:.2f}"
            yield f"Bandwidth: a copy on the device, read and written, {rates}; shares are of the faster."
    timed = [record for record in rows if "kernel" in record]
    if timed:
        yield _table(timed, KERNELS)


def _decode(rows: list[Record]) -> Iterator[str]:
    yield "Everything on the GPU, random weights in bfloat16; the bound is bytes of a step over the bandwidth measured."
    yield _table(rows, DECODE, left=2)


def _paper(rows: list[Record]) -> Iterator[str]:
    yield from (record["table"] for record in rows)


def _cost(rows: list[Record]) -> Iterator[str]:
    yield "Generated tokens/s, random weights in bfloat16, policy by the search, calibrated on this machine before."
    yield _table(rows, COST)


def _tests(rows: list[Record]) -> Iterator[str]:
    for record in rows:
        counts = ", ".join(f"{count} {name}" for name, count in record["outcomes"].items())
        yield "\n".join([f"`{record['name']}`: {counts} in {record['seconds']:.0f} s.", *record["failures"]])


def _table(rows: list[Record], columns: Columns, left: int = 1) -> str:
    return markdown_table([*columns], [[cell(row) for cell in columns.values()] for row in rows], left)


Columns = dict[str, Callable[[Record], str]]
"""The text of each column of a table, by its head."""
KERNELS: Columns = {
    "kernel": lambda r: r["name"],
    "us": lambda r: f"{r['seconds'] * 1e6:.1f}",
    "bytes to move": lambda r: format_bytes(r["bytes"]),
    "GB/s": lambda r: f"{r['bytes_per_s'] / 1e9:,.0f}",
    "of bandwidth": lambda r: f"{r['share_of_bandwidth']:.0%}",
    "TFLOP/s": lambda r: f"{r['flops_per_s'] / 1e12:.3g}" if "flops_per_s" in r else "",
    "timed as": lambda r: "graph" if r["cuda_graph"] else "launches",
}
DECODE: Columns = {
    "work": lambda r: r["name"],
    "what ran": lambda r: r["ran"],
    "ms per step": lambda r: f"{r['step_s'] * 1e3:.2f}",
    "bound ms": lambda r: f"{r['bound_step_s'] * 1e3:.2f}",
    "of bound": lambda r: f"{r['bound_step_s'] / r['step_s']:.0%}",
    "decode tokens/s": lambda r: f"{r['decode_tokens_per_s']:,.0f}",
    "prefill s": lambda r: f"{r['prefill_s']:.2f}",
}
COST: Columns = {
    "setting": lambda r: r["name"],
    "predicted": lambda r: f"{r['predicted_tokens_per_s']:.4g}",
    "measured": lambda r: f"{r['measured_tokens_per_s']:.4g}",
    "error": lambda r: f"{r['error']:+.0%}",
}
