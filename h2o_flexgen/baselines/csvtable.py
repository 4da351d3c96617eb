"""Summaries as one CSV table."""

from __future__ import annotations

import csv
import io
from typing import Any

from h2o_flexgen.baselines.summary import RATES, ratio_of

_ENDS = (("", "median"), ("_min", "min"), ("_max", "max"))


def csv_table(*parts: tuple[str, dict[str, Any]]) -> str:
    """All rows of some summaries as CSV; `parts` are (what the batches are: "equal", "best" or "given", summary).

    Seconds, bytes and tokens per second are medians; ratios are speeds relative to the column `reference`.
    """
    head = ["batches", "system", "batch", "prompt_len", "gen_len", "dtype", "repetitions", "prefill_s", "decode_s"]
    head += ["total_s", *RATES, "peak_bytes", "disk_read_bytes", "process_read_bytes", "bytes_moved", "reference"]
    head += ["pairs", *(f"{rate}_ratio{end}" for rate in RATES for end, _ in _ENDS)]
    head += ["same_text", "sequences_compared", "failed"]
    target = io.StringIO()
    writer = csv.DictWriter(target, head, lineterminator="\n")
    writer.writeheader()
    for label, summary in parts:
        for name in summary["settings"]["systems"]:
            writer.writerow({"batches": label, **_row(summary, name)})
    return target.getvalue()


def _row(summary: dict[str, Any], name: str) -> dict[str, Any]:
    settings, system = summary["settings"], summary["systems"].get(name)
    reference = settings["reference"]
    row: dict[str, Any] = {"system": name, "reference": reference, "failed": summary["failed"].get(name, "")}
    row |= {key: settings[key] for key in ("prompt_len", "gen_len", "dtype")}
    if system is None:
        return row | {"failed": summary["failed"].get(name, "no reason is known")}
    row |= {"batch": system["batch"], "repetitions": system["repetitions"]}
    figures = ("prefill_s", "decode_s", "total_s", *RATES, "peak_bytes", "disk_read_bytes", "process_read_bytes")
    row |= {figure: system[figure]["median"] for figure in figures if system[figure]}
    moved = system["bytes_moved"]
    row["bytes_moved"] = "" if moved is None else sum(moved.values())
    pair = summary["ratios"].get(f"{name}/{reference}") or summary["ratios"].get(f"{reference}/{name}")
    row["pairs"] = "" if pair is None else pair["pairs"]
    for rate in RATES:
        ratio = ratio_of(summary, name, reference, rate)
        if ratio:
            row |= {f"{rate}_ratio{end}": ratio[key] for end, key in _ENDS}
    same = summary.get("same_text", {}).get(name)
    return row if same is None else row | {"same_text": same["same"], "sequences_compared": same["sequences"]}
