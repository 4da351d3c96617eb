"""The page of some records: which sections there are, and what is missing."""

from __future__ import annotations

from pathlib import Path

from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.errors import UsageError, writing
from h2o_flexgen.pages import machine, quality, throughput, tokens
from h2o_flexgen.pages.page import Chapter, Passage, Table, render
from h2o_flexgen.pages.reading import Json, Material, Run, model_name, object_in
from h2o_flexgen.reporting.run_report import block_text, report_lines, shares_text
from h2o_flexgen.units import format_bytes

_SECTIONS = (
    (tokens.section, "Heavy hitters: recorded scores (run --record-scores FILE with --hh-ratio)."),
    (throughput.section, "Throughput: the record of a run (run --json) or of bench."),
    (machine.schedule, "Schedule: a trace (run --trace FILE, or search --simulate FILE for a prediction)."),
    (machine.memory, "Memory: the record of a run; over time: a trace."),
    (machine.roofline, "Roofline: the record of a run on a calibrated machine."),
    (quality.section, "Quality: the output of evaluate."),
)
"""The function that makes each section, and the records that it needs."""


def page_of(material: Material, title: str = "") -> str:
    made = [(make(material), needs) for make, needs in _SECTIONS]
    missing = [needs for section, needs in made if not section.parts]
    chapters = [_overview(material), _plans(material), *(section for section, _ in made)]
    shown = [chapter for chapter in chapters if chapter.parts]
    return render(title or _title(material), [*shown, _sources(material, missing)])


def write_page(material: Material, path: Path, title: str = "") -> int:
    """Writes the page; returns its bytes. StorageError where that fails."""
    text = page_of(material, title)
    with writing(path):
        path.write_text(text, encoding="utf-8", errors="replace")  # names of files may be no text
    return len(text.encode(errors="replace"))


def _title(material: Material) -> str:
    reports = [report.data for report in (*material.qualities, *material.streams)]
    names = [
        str((run.record or run.data).get("model") or object_in(run.data, "settings", run.source).get("model", ""))
        for run in material.runs
    ]
    names += [str(report.model) for report in reports] + [str(each.data["model"]) for each in material.suites]
    models = [model_name(name) for name in dict.fromkeys(names) if name]
    named = ", ".join(models[:3]) + " and others" * (len(models) > 3)
    return f"h2o_flexgen: {named or 'what was measured'}"


def _overview(material: Material) -> Chapter:
    """The first section: the report of the run, if there is only one, and the warnings of all runs."""
    parts = []
    if len(material.runs) == 1 and material.runs[0].record is material.runs[0].data:
        parts.append(_facts(material.runs[0]))
    warnings = list(dict.fromkeys(
        f"{run.source}: {warning}" for run in material.runs for warning in (run.record or {}).get("warnings") or []
    ))  # fmt: skip
    if warnings:
        parts.append(Passage("Warnings", warnings[:20]))
    return Chapter("overview", "Overview", [], parts)


def _sources(material: Material, missing: list[str]) -> Chapter:
    """The files that were read, what they lack, and which sections other records would add: the last."""
    rows = [[name, what] for name, what in material.files.items()]
    parts = [Passage(tables=[Table("Files", ["file", "what is in it"], rows)])] if rows else []
    ours = [run.record for run in material.runs if run.record]
    absent = [
        f"{name} in {count} of {len(material.runs)} records"
        for name in ("predicted", "roofline", "peak_bytes", "host", "date")
        if (count := sum(not record.get(name) for record in ours))
    ]
    if absent:
        parts.append(Passage("Missing in the records", [", ".join(absent) + "."]))
    if missing:
        parts.append(Passage("Other records would add", missing))
    return Chapter("sources", "Files read", [], parts)


def _facts(run: Run) -> Passage:
    """One run as its own report has it."""
    try:
        lines = list(report_lines(RunRecord.from_json(run.data)))
    except (UsageError, KeyError, TypeError) as error:
        return Passage("", [f"The report of this run is not shown: {error}."])
    return Passage(tables=[Table("The run", ["", ""], lines)])


def _block(policy: Json) -> list[str]:
    """Shape and placement of a policy."""
    try:
        return [block_text(policy), shares_text(policy)]
    except (KeyError, TypeError, AttributeError):
        return ["-", "-"]


def _plans(material: Material) -> Chapter:
    rows = []
    for plan in material.plans:
        policy, predicted = object_in(plan.data, "policy", plan.source), object_in(plan.data, "predicted", plan.source)
        moved = object_in(predicted, "bytes_moved", plan.source)
        rows.append([
            str(plan.data.get("model", plan.source)),
            *_block(policy),
            throughput.rate_text(predicted.get("gen_throughput")),
            ", ".join(f"{link} {format_bytes(nbytes)}" for link, nbytes in moved.items()) or "nothing",
            str(predicted.get("bound_text") or (predicted.get("bound") or {}).get("resource", "-")),
        ])  # fmt: skip
    head = ["model", "block", "placement", "predicted, tokens/s", "moved", "bound by"]
    text = "Plans that a search chose. Every figure here is predicted."
    return Chapter("plans", "Plans", [text], [Passage(tables=[Table("Plans", head, rows)])] if rows else [])
