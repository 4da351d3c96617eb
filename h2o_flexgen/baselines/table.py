"""A summary as a markdown table."""

from __future__ import annotations

from typing import Any

from h2o_flexgen.baselines.summary import ratio_of
from h2o_flexgen.baselines.systems import SYSTEMS
from h2o_flexgen.units import format_bytes

_NONE = "-"


def markdown(summary: dict[str, Any]) -> str:
    """What ran on what, a row per system with medians, ratios with their spread, and the systems that did not run."""
    settings, host = summary["settings"], summary["host"]
    reference = settings["reference"]
    texts = "same_text" in summary
    head = ["system", "prefill s", "decode s", "decode tok/s", "end to end tok/s", "peak memory"]
    head += [f"prefill vs {reference}", f"decode vs {reference}", f"end to end vs {reference}"]
    head += ["same text"] if texts else []
    lines = [_title(settings, host), "", _row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for name in settings["systems"]:
        if name in summary["systems"]:
            lines.append(_row(_cells(summary, name, reference, texts)))
        else:
            lines.append(_row([name, f"did not run: {_flat(summary['failed'][name])}", *[""] * (len(head) - 2)]))
    lines += ["", *(f"{name}: {says}." for name, says in _notes(summary))]
    lines += [
        f"{name} stopped early: {_flat(why)}" for name, why in summary["failed"].items() if name in summary["systems"]
    ]
    lines.append(f"Medians of {settings['repetitions']}, (least-most). {summary['measured']}")
    return "\n".join(lines)


def _title(settings: dict[str, Any], host: dict[str, Any]) -> str:
    threads = settings["threads"]
    weights = "random weights" if settings["weights"] == "dummy" else "checkpoint"
    return (
        f"{settings['model']} ({weights}), {settings['dtype']}, batch {settings['batch_size']}, "
        f"{settings['prompt_len']}+{settings['gen_len']} tokens, h2o at {settings['hh_ratio']:.0%}; "
        f"{threads} thread{'s' if threads > 1 else ''} of {host['cpu']}, {format_bytes(host['memory_bytes'])}"
    )


def _cells(summary: dict[str, Any], name: str, reference: str, texts: bool) -> list[str]:
    system = summary["systems"][name]
    cells = [name, *(_median(system[figure], ".2f") for figure in ("prefill_s", "decode_s"))]
    cells += [_median(system[figure], ".4g") for figure in ("decode_throughput", "gen_throughput")]
    cells.append(format_bytes(system["peak_rss_bytes"]["median"]))
    for figure in ("prefill_throughput", "decode_throughput", "gen_throughput"):
        ratio = ratio_of(summary, name, reference, figure)
        cells.append(f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio else _NONE)
    if texts:
        same = summary["same_text"][name]
        cells.append(f"{same['same']} of {same['sequences']}")
    return cells


def _notes(summary: dict[str, Any]) -> list[tuple[str, str]]:
    notes = []
    for name in summary["settings"]["systems"]:
        if name in summary["systems"]:
            versions = ", ".join(f"{key} {value}" for key, value in summary["systems"][name]["versions"].items())
            notes.append((name, f"{SYSTEMS.get(name).says} ({versions})"))
    return notes


def _median(figure: dict[str, float] | None, form: str) -> str:
    return format(figure["median"], form) if figure else _NONE


def _flat(text: str) -> str:
    """Text that cannot break a table."""
    return " ".join(text.split()).replace("|", "/")


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
