"""A summary as a markdown table, and as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from h2o_flexgen.baselines.summary import ratio_of
from h2o_flexgen.baselines.systems import SYSTEMS
from h2o_flexgen.units import format_bytes

_NONE = "-"
_NO_TEXT = "n/a"
COMPARED = ("gen_throughput", "decode_throughput")
"""The rates whose ratios the table shows; the summary has one more."""


def markdown(summary: dict[str, Any], explain: bool = True) -> str:
    """What ran on what, a row per system with medians, ratios with their spread, and the systems that did not run.

    `explain` adds how each was run and what the columns mean.
    """
    settings = summary["settings"]
    reference = settings["reference"]
    head = ["system", "batch", "prefill s", "decode s", "total s", "tokens/s", "decode tokens/s", "peak memory"]
    head += ["disk read", f"tokens/s vs {reference}", f"decode vs {reference}", "same text"]
    lines = [_title(summary), "", _row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for name in settings["systems"]:
        if name in summary["systems"]:
            lines.append(_row(_cells(summary, name, reference)))
        else:
            lines.append(_row([name, f"did not run: {_flat(_why(summary, name))}", *[""] * (len(head) - 2)]))
    stopped = [(name, why) for name, why in summary["failed"].items() if name in summary["systems"]]
    lines += ["", *(f"{name} stopped early: {_flat(why)}" for name, why in stopped)]
    if not explain:
        return "\n".join(lines).rstrip()
    lines += [f"{name}: {says}." for name, says in _notes(summary)]
    lines += [f"{name} tried {_attempts(tried)}." for name, tried in summary["tried"].items()]
    lines.append(f"Medians of {settings['repetitions']}, (least-most). {summary['measured']} {_about_text(summary)}")
    if summary["cap"]["why_not"]:
        lines.append(f"The cap was told to every system but nothing enforced it: {summary['cap']['why_not']}.")
    return "\n".join(lines)


def csv_table(*parts: tuple[str, dict[str, Any]]) -> str:
    """All rows of some summaries as CSV; `parts` are (what the batches are: "equal" or "best", summary).

    Seconds, bytes and tokens per second are medians; ratios are speeds relative to the column `reference`.
    """
    head = ["batches", "system", "batch", "prompt_len", "gen_len", "dtype", "repetitions", "prefill_s", "decode_s"]
    head += ["total_s", *COMPARED, "peak_bytes", "disk_read_bytes", "process_read_bytes", "bytes_moved", "reference"]
    head += [f"{rate}_ratio{end}" for rate in COMPARED for end in ("", "_min", "_max")]
    head += ["same_text", "sequences_compared", "failed"]
    target = io.StringIO()
    writer = csv.DictWriter(target, head, lineterminator="\n")
    writer.writeheader()
    for label, summary in parts:
        for name in summary["settings"]["systems"]:
            writer.writerow({"batches": label, **_csv_row(summary, name)})
    return target.getvalue()


def _csv_row(summary: dict[str, Any], name: str) -> dict[str, Any]:
    settings, system = summary["settings"], summary["systems"].get(name)
    reference = settings["reference"]
    row: dict[str, Any] = {"system": name, "reference": reference, "failed": summary["failed"].get(name, "")}
    row |= {key: settings[key] for key in ("prompt_len", "gen_len", "dtype")}
    if system is None:
        return row | {"failed": _why(summary, name)}
    row |= {"batch": system["batch"], "repetitions": system["repetitions"]}
    figures = ("prefill_s", "decode_s", "total_s", *COMPARED, "peak_bytes", "disk_read_bytes", "process_read_bytes")
    row |= {figure: system[figure]["median"] for figure in figures if system[figure]}
    moved = system["bytes_moved"]
    row["bytes_moved"] = "" if moved is None else sum(moved.values())
    for rate in COMPARED:
        ratio = ratio_of(summary, name, reference, rate)
        if ratio:
            ends = (("", "median"), ("_min", "min"), ("_max", "max"))
            row |= {f"{rate}_ratio{end}": ratio[key] for end, key in ends}
    same = summary.get("same_text", {}).get(name)
    return row if same is None else row | {"same_text": same["same"], "sequences_compared": same["sequences"]}


def _title(summary: dict[str, Any]) -> str:
    settings, host = summary["settings"], summary["host"]
    threads, sizes = settings["threads"], sorted(set(summary["batches"].values()))
    weights = "random weights" if settings["weights"] == "dummy" else "checkpoint"
    batch = f"batch {sizes[0]}" if len(sizes) == 1 else "each at its own batch"
    cap = "" if settings["cpu_mem"] is None else f", within {format_bytes(settings['cpu_mem'])}"
    return (
        f"{settings['model']} ({weights}), {settings['dtype']}, {batch}, "
        f"{settings['prompt_len']}+{settings['gen_len']} tokens, h2o at {settings['hh_ratio']:.0%}; "
        f"{threads} thread{'s' if threads > 1 else ''} of {host['cpu']}, {format_bytes(host['memory_bytes'])}{cap}"
    )


def _cells(summary: dict[str, Any], name: str, reference: str) -> list[str]:
    system = summary["systems"][name]
    cells = [name, str(system["batch"])]
    cells += [_median(system[figure], ".2f") for figure in ("prefill_s", "decode_s", "total_s")]
    cells += [_median(system[figure], ".4g") for figure in COMPARED]
    cells += [
        _NONE if system[figure] is None else format_bytes(system[figure]["median"])
        for figure in ("peak_bytes", "disk_read_bytes")
    ]
    for figure in COMPARED:
        ratio = ratio_of(summary, name, reference, figure)
        cells.append(f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio else _NONE)
    same = summary.get("same_text", {}).get(name)
    cells.append(_NO_TEXT if same is None else f"{same['same']} of {same['sequences']}")
    return cells


def _about_text(summary: dict[str, Any]) -> str:
    if "same_text" not in summary:
        return "Text is not compared: every system made random weights of its own."
    return f"Same text: sequences whose tokens are all those of {summary['settings']['text_reference']}."


def _notes(summary: dict[str, Any]) -> list[tuple[str, str]]:
    notes = []
    for name in summary["settings"]["systems"]:
        if name in summary["systems"]:
            versions = ", ".join(f"{key} {value}" for key, value in summary["systems"][name]["versions"].items())
            notes.append((name, f"{SYSTEMS.get(name).says} ({versions})"))
    return notes


def _why(summary: dict[str, Any], name: str) -> str:
    return str(summary["failed"].get(name, "no reason is known"))


def _attempts(tried: list[dict[str, Any]]) -> str:
    """ "batch 8: 120 tokens/s; batch 16: out of memory"."""
    return "; ".join(
        f"batch {run['batch']}: "
        + (_flat(run["failed"]) if "failed" in run else f"{run['gen_throughput']:.4g} tokens/s")
        for run in tried
    )


def _median(figure: dict[str, float] | None, form: str) -> str:
    return format(figure["median"], form) if figure else _NONE


def _flat(text: str) -> str:
    """Text that cannot break a table."""
    return " ".join(text.split()).replace("|", "/")


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
