"""Medians of each system, and ratios of pairs: repetition by repetition, so that drift of the machine cancels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from h2o_flexgen.baselines.runner import Comparison
from h2o_flexgen.baselines.store import SCHEMA, Measurement, origin, place
from h2o_flexgen.cores import sharing_warning

RATES = ("prefill_throughput", "decode_throughput", "gen_throughput")
"""Compared as ratios: more is better in each."""
FIGURES = (
    "prefill_s",
    "decode_s",
    "total_s",
    "load_s",
    "peak_bytes",
    "peak_rss_bytes",
    "disk_read_bytes",
    "process_read_bytes",
    *RATES,
    "total_token_throughput",
)
MEASURED = (
    "Seconds of generation alone, in a process of its own per run: starting, loading and a warm-up of a few tokens "
    "with the whole batch come before the clock. Prefill ends when every sequence has its first token. Tokens/s are "
    "generated ones, over prefill and decode, and over decode alone. Peak memory is that of the whole process{peak}. "
    "Disk read is what the kernel read from disks for it while it generated. Ratios are speeds, the median "
    "(least-most) of n repetitions, each of runs side by side, of one commit on one machine: above 1 means that the "
    "first is faster."
)
_PEAK = " and the pages of files it read, as its control group counted them"


def summarise(result: Comparison) -> dict[str, Any]:
    """The summary as one JSON object: settings, {median, min, max} per system and figure, ratios per pair, failures."""
    settings = result.settings
    ran = [name for name in result.names if result.runs[name]]
    held = settings.cpu_mem is not None and result.uncapped is None
    newest = max((run for name in ran for run in result.runs[name]), key=lambda run: run.date, default=None)
    summary: dict[str, Any] = {
        "bench": SCHEMA,
        **(origin() if newest is None else newest.origin),
        "settings": {**settings.to_json(), "systems": result.names},
        "measured_in": _measured_in(result),
        "measured": MEASURED.format(peak=_PEAK if held else ""),
        "cap": {"cpu_mem": settings.cpu_mem, "enforced": held, "why_not": result.uncapped},
        "highest_load_average": max((run.load_average for name in ran for run in result.runs[name]), default=None),
        "batches": dict(result.batches),
        "tried": dict(result.tried),
        "systems": {name: _system(result.runs[name]) for name in ran},
        "ratios": {f"{one}/{two}": _ratios(result, one, two) for i, one in enumerate(ran) for two in ran[i + 1 :]},
        "failed": dict(result.failed),
    }
    reference = settings.text_reference
    if settings.weights == "checkpoint" and reference in ran:
        summary["same_text"] = {name: _same_text(result, name, reference) for name in ran}
    return summary


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, least and most of the values that there are; None where there are none."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None


def ratio_spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """As `spread`, but between the two in the middle of an even number lies their geometric mean.

    So the median of ratios turned round is the median turned round.
    """
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    low, high = known[(len(known) - 1) // 2], known[len(known) // 2]
    return {"median": low if low == high else math.sqrt(low * high), "min": known[0], "max": known[-1]}


def ratio_of(summary: dict[str, Any], one: str, two: str, figure: str) -> dict[str, float] | None:
    """The spread of one/two from a summary, whichever way round it holds the pair."""
    if one == two:
        return None
    pair = summary["ratios"].get(f"{one}/{two}")
    if pair is not None:
        found: dict[str, float] | None = pair[figure]
        return found
    turned = summary["ratios"].get(f"{two}/{one}", {}).get(figure)
    if turned is None:
        return None
    return {"median": 1 / turned["median"], "min": 1 / turned["max"], "max": 1 / turned["min"]}


def _system(runs: Sequence[Measurement]) -> dict[str, Any]:
    """Medians of a system's runs; bytes moved and the plan are those of its latest."""
    packages = dict.fromkeys(name for run in runs for name in run.versions)
    versions = {name: " and ".join(dict.fromkeys(str(run.versions.get(name)) for run in runs)) for name in packages}
    return {
        "repetitions": len(runs),
        "batch": runs[0].sequences,
        "versions": versions,
        "bytes_moved": runs[-1].bytes_moved,
        "plan": runs[-1].detail.get("policy") or runs[-1].detail.get("modules_by_place"),
        "disturbed": _disturbed(runs),
        **{name: spread([getattr(run, name) for run in runs]) for name in FIGURES},
    }


def _disturbed(runs: Sequence[Measurement]) -> dict[str, Any] | None:
    """How many runs shared the cores with others, and what is to be said of the one that shared most; None for none."""
    found = [run.shared for run in runs if run.shared and sharing_warning(run.shared)]
    if not found:
        return None
    return {"runs": len(found), "worst": sharing_warning(max(found, key=lambda shared: float(shared["others"])))}


def _measured_in(result: Comparison) -> list[dict[str, Any]]:
    """The parts in which it was measured: repetitions of one day, one commit and one machine."""
    parts: dict[Any, dict[str, Any]] = {}
    for run in sorted((run for runs in result.runs.values() for run in runs), key=lambda run: run.date):
        key = (run.date[:10], place(run.origin))
        facts = {"date": run.date[:10], "commit": run.origin.get("commit"), "host": run.origin["host"]}
        part = parts.setdefault(key, facts)
        numbers = part.setdefault("repetitions", [])
        if run.repetition not in numbers:
            numbers.append(run.repetition)
    return list(parts.values())


def _ratios(result: Comparison, one: str, two: str) -> dict[str, Any]:
    """Ratios of rates of `one` to those of `two`, over the repetitions that both finished in the same place."""
    others = {(run.repetition, place(run.origin)): run for run in result.runs[two]}
    keys = [(run.repetition, place(run.origin)) for run in result.runs[one]]
    pairs = [(run, others[key]) for run, key in zip(result.runs[one], keys, strict=True) if key in others]
    return {"pairs": len(pairs), **{name: ratio_spread([_ratio(a, b, name) for a, b in pairs]) for name in RATES}}


def _ratio(one: Measurement, two: Measurement, figure: str) -> float | None:
    upper, lower = getattr(one, figure), getattr(two, figure)
    return upper / lower if upper and lower else None


def _same_text(result: Comparison, name: str, reference: str) -> dict[str, int]:
    """How many sequences of the first repetition have the reference's tokens, all of them, of those that both ran."""
    own, theirs = result.runs[name][0].token_ids, result.runs[reference][0].token_ids
    pairs = list(zip(own, theirs, strict=False))
    return {"same": sum(a == b for a, b in pairs), "sequences": len(pairs)}
