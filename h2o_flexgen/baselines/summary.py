"""The result of a comparison: a summary as one JSON object, and the markdown and CSV tables of it.

Ratios are of pairs, repetition by repetition, so that drift of the machine cancels.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Any

from h2o_flexgen.baselines.runner import Comparison
from h2o_flexgen.baselines.settings import SYSTEMS
from h2o_flexgen.baselines.store import SCHEMA, Measurement, machine, origin, place
from h2o_flexgen.cores import sharing_warning
from h2o_flexgen.units import format_bytes

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
_NONE = "-"
_CALLED = ("prefill", "decode", "end to end")  # the columns of the ratios of RATES
_KINDS = ("weights", "cache", "hidden")
_OPTIONAL = ("disk read", "bytes moved", "same text")
"""Columns that are left out where no row has anything in them."""
_ENDS = (("", "median"), ("_min", "min"), ("_max", "max"))


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
    """Median, least and most of the values that are not None; None where all are."""
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
    found = _pair(summary, one, two).get(figure)
    if found is None or f"{one}/{two}" in summary["ratios"]:
        return found
    return {"median": 1 / found["median"], "min": 1 / found["max"], "max": 1 / found["min"]}


def _pair(summary: dict[str, Any], one: str, two: str) -> dict[str, Any]:
    """The entry of a pair in a summary, whichever way round; {} where it has not both."""
    ratios = summary["ratios"]
    return dict(ratios.get(f"{one}/{two}") or ratios.get(f"{two}/{one}") or {})


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


def markdown(summary: dict[str, Any], explain: bool = True) -> str:
    """Systems and machine, a row per system with medians, ratios of pairs, and the systems that did not run.

    `explain` adds how each was run and what the columns mean.
    """
    settings = summary["settings"]
    rows = {name: _cells(summary, name) for name in settings["systems"] if name in summary["systems"]}
    every = next(iter(rows.values()), {"system": "", "batch": ""})
    empty = {name for name in _OPTIONAL if all(row[name] in (_NONE, "0 B") for row in rows.values())}
    head = [name for name in every if name not in empty]
    lines = [_title(summary), "", _row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for name in settings["systems"]:
        if name in rows:
            lines.append(_row([rows[name][column] for column in head]))
        else:
            lines.append(_row([name, f"did not run: {_flat(_why(summary, name))}", *[""] * (len(head) - 2)]))
    lines += ["", *_ratio_table(summary)]
    notes = [f"{name} stopped early: {_flat(why)}." for name, why in summary["failed"].items() if name in rows]
    notes += [f"{name} ran with {plan}." for name in rows if (plan := _plan(summary["systems"][name]["plan"]))]
    notes += _provenance(summary)
    for name, system in summary["systems"].items():
        if why := system["disturbed"]:
            notes.append(f"{why['runs']} of {system['repetitions']} runs of {name}, at worst: {why['worst']}.")
    if explain:
        for name in rows:
            versions = ", ".join(f"{key} {value}" for key, value in summary["systems"][name]["versions"].items())
            notes.append(f"{name}: {SYSTEMS.get(name).says} ({versions}).")
        notes += [f"{name} tried {_attempts(tried)}." for name, tried in summary["tried"].items()]
        notes.append(f"Medians of n runs. {summary['measured']} {_about_text(summary)}")
        if summary["cap"]["why_not"]:
            notes.append(f"The cap was told to every system but nothing enforced it: {summary['cap']['why_not']}.")
    return "\n".join([*lines, *(f"- {note}" for note in notes)]).rstrip()


def pairs(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Whose speed is divided by whose: each of ours by each of the others, and the rest by the reference, if it ran."""
    ran = [name for name in summary["settings"]["systems"] if name in summary["systems"]]
    ours, reference = [name for name in ran if SYSTEMS.get(name).own], summary["settings"]["reference"]
    found = [(one, two) for i, one in enumerate(ours) for two in ran if two not in ours[: i + 1]]
    if reference in ran and reference not in ours:
        found += [(one, reference) for one in ran if one not in (*ours, reference)]
    elif not ours and ran:
        found = [(one, ran[-1]) for one in ran[:-1]]
    return found


def _ratio_table(summary: dict[str, Any]) -> list[str]:
    """The table of ratios, median and (least-most) of the n repetitions that both finished; empty for one system."""
    lines = []
    for one, two in pairs(summary):
        count = _pair(summary, one, two)["pairs"]
        ratios = [_ratio_cell(ratio_of(summary, one, two, figure), count) for figure in RATES]
        lines.append(_row([f"{one} / {two}", *ratios, str(count)]))
    if not lines:
        return []
    return [_row(["speed of", *_CALLED, "n"]), _row(["---", *["---:"] * (len(_CALLED) + 1)]), *lines, ""]


def _ratio_cell(ratio: dict[str, float] | None, count: int) -> str:
    """ "2.00x (1.50-2.50)", without the spread where there is one alone."""
    if ratio is None:
        return _NONE
    return f"{ratio['median']:.2f}x" + (f" ({ratio['min']:.2f}-{ratio['max']:.2f})" if count > 1 else "")


def _title(summary: dict[str, Any]) -> str:
    settings, host = summary["settings"], summary["host"]
    threads, sizes = settings["threads"], sorted(set(summary["batches"].values()))
    weights = "random weights" if settings["weights"] == "dummy" else "checkpoint"
    batch = f"batch {sizes[0]}" if len(sizes) == 1 else "each at its own batch"
    bits = settings.get("weight_bits", 16)
    packed = "" if bits == 16 else f" (our weights in {bits} bits)"
    impl = settings.get("model_impl", "auto")
    packed += "" if impl == "auto" else f" (ours by --model-impl {impl})"
    cap = "" if settings["cpu_mem"] is None else f", within {format_bytes(settings['cpu_mem'])}"
    return (
        f"{settings['model']} ({weights}), {settings['dtype']}{packed}, {batch}, "
        f"{settings['prompt_len']}+{settings['gen_len']} tokens, h2o at {settings['hh_ratio']:.0%}; "
        f"{threads} thread{'s' if threads > 1 else ''} of {host['cpu']}, {format_bytes(host['memory_bytes'])}{cap}"
    )


def _cells(summary: dict[str, Any], name: str) -> dict[str, str]:
    system, same = summary["systems"][name], summary.get("same_text", {}).get(name)
    moved = system["bytes_moved"]

    def size(figure: str) -> str:
        return _NONE if system[figure] is None else format_bytes(system[figure]["median"])

    return {
        "system": name,
        "batch": str(system["batch"]),
        "n": str(system["repetitions"]),
        "prefill s": _median(system["prefill_s"], ".2f"),
        "decode s": _median(system["decode_s"], ".2f"),
        "total s": _median(system["total_s"], ".2f"),
        "tokens/s": _median(system["gen_throughput"], ".4g"),
        "decode tokens/s": _median(system["decode_throughput"], ".4g"),
        "peak memory": size("peak_bytes"),
        "disk read": size("disk_read_bytes"),
        "bytes moved": format_bytes(sum(moved.values())) if moved else _NONE,
        "same text": _NONE if same is None else f"{same['same']} of {same['sequences']}",
    }


def _plan(plan: dict[str, Any] | None) -> str:
    """ "GPU batches of 16, 2 in a block, weights 40% cpu and 60% disk (by search)": the placement; "" if unknown."""
    if not plan:
        return ""
    if "gpu_batch_size" not in plan:  # modules by place
        return "modules: " + ", ".join(f"{count} on {place}" for place, count in plan.items())
    places = {kind: " and ".join(f"{share:.0%} {tier}" for tier, share in plan[kind].items()) for kind in _KINDS}
    shares = [f"{kind} {place}" for kind, place in places.items()]
    if len(set(places.values())) == 1:
        shares = [f"everything {places[_KINDS[0]]}"]
    return f"GPU batches of {plan['gpu_batch_size']}, {plan['num_gpu_batches']} in a block, {', '.join(shares)}" + (
        f" (by {plan['chosen']})" if plan.get("chosen") else ""
    )


def _provenance(summary: dict[str, Any]) -> list[str]:
    """When, from which commits and on which machines it was measured, by repetitions where these differ."""
    parts = summary["measured_in"]
    if not parts:
        return []
    many = len({machine(part) for part in parts}) > 1
    said = []
    for part in parts:
        host = part["host"]
        words = [part["date"]] + ([f"commit {part['commit']}"] if part["commit"] else [])
        words += [f"{host['cores']} cores of {host['cpu']}, {format_bytes(host['memory_bytes'])}"] if many else []
        numbers = f"repetition{'s' * (len(part['repetitions']) > 1)} {_ranges(part['repetitions'])}: "
        said.append((numbers if len(parts) > 1 else "") + ", ".join(words))
    load = summary["highest_load_average"]
    line = f"Measured {'; '.join(said)}. Highest load average before a run: {load:.1f}."
    warning = ["More than one machine: medians mix them, ratios do not."] if many else []
    return [line, *warning]


def _ranges(numbers: list[int]) -> str:
    """ "1-3, 5" for 1, 2, 3, 5."""
    places = enumerate(sorted(numbers))  # neighbours are as far from their places
    groups = [[number for _, number in group] for _, group in groupby(places, lambda pair: pair[1] - pair[0])]
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def _about_text(summary: dict[str, Any]) -> str:
    if "same_text" not in summary:
        return "Text is not compared: every system made random weights of its own."
    reference = summary["settings"]["text_reference"]
    return (
        f"Same text: sequences whose greedy tokens are all those of {reference}; a system that keeps part of the KV "
        "cache may well have others."
    )


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


_CSV_FIGURES = ("prefill_s", "decode_s", "total_s", *RATES, "peak_bytes", "disk_read_bytes", "process_read_bytes")


def csv_table(*parts: tuple[str, dict[str, Any]]) -> str:
    """All rows of some summaries as CSV; `parts` are (what the batches are: "equal", "best" or "given", summary).

    Seconds, bytes and tokens per second are medians; ratios are speeds relative to the column `reference`.
    """
    head = ["batches", "system", "batch", "prompt_len", "gen_len", "dtype", "repetitions", *_CSV_FIGURES]
    head += ["bytes_moved", "reference", "pairs", *(f"{rate}_ratio{end}" for rate in RATES for end, _ in _ENDS)]
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
    row |= {figure: system[figure]["median"] for figure in _CSV_FIGURES if system[figure]}
    moved = system["bytes_moved"]
    row["bytes_moved"] = "" if moved is None else sum(moved.values())
    row["pairs"] = _pair(summary, name, reference).get("pairs", "")
    for rate in RATES:
        ratio = ratio_of(summary, name, reference, rate)
        if ratio:
            row |= {f"{rate}_ratio{end}": ratio[key] for end, key in _ENDS}
    same = summary.get("same_text", {}).get(name)
    return row if same is None else row | {"same_text": same["same"], "sequences_compared": same["sequences"]}
