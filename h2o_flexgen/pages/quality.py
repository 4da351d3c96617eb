"""The cost of eviction: recall and perplexity against the budget, suites of tasks, and perplexity along streams."""

from __future__ import annotations

from h2o_flexgen.config.reports.quality import Point, QualityReport, StreamReport, panels
from h2o_flexgen.pages.page import Chapter, Figure, Passage, Table, line_figure
from h2o_flexgen.pages.reading import Json, Material, model_name
from h2o_flexgen.units import format_bytes, format_seconds

_FORMS: dict[str, Json] = {
    "share": {"form": "percent", "min": 0, "max": 1},
    "perplexity": {"log": 2, "free": True},
}
"""Axes of what is measured, by its kind."""


def section(material: Material) -> Chapter:
    suites: dict[tuple[str, str], list[Json]] = {}
    for each in material.suites:
        suites.setdefault((each.data["suite"], each.data["model"]), []).append(each.data)
    parts = [_quality(each.data) for each in material.qualities] + [_stream(each.data) for each in material.streams]
    parts += [_suite(f"{model_name(model)}: suite {suite}", rows) for (suite, model), rows in suites.items()]
    text = "Right answers and perplexity of a model with its KV cache at a budget; the full cache is a dashed level."
    return Chapter("quality", "Quality", [text], parts)


def _quality(report: QualityReport) -> Passage:
    head = ["policy", "budget", "right answers", "perplexity", "KV cache", "seconds"]
    rows = []
    for row in report.rows:
        right = "-" if row.recall_accuracy is None else f"{row.recall_accuracy:.0%}"
        measured = [right, f"{row.perplexity:.4g}", format_bytes(row.kv_bytes), format_seconds(row.seconds)]
        rows.append([row.policy, f"{row.ratio:.0%}", *measured])
    text = (
        f"{report.model} in {report.dtype} on {report.device}, {report.date[:10]}: {report.recall_file}; "
        f"{report.text_file}, {report.windows} windows of {report.context} + {report.continuation} tokens."
    )
    figures = [_against_budget(panel) for panel in panels(report.points())]
    return Passage(f"{report.model}: quality against budget", [text], figures, [Table("All rows", head, rows)])


def _suite(title: str, rows: list[Json]) -> Passage:
    """A figure for each task and metric, and all figures with their intervals as a table, increases only there."""
    points = [
        Point(f"{row['task']}: {row['metric']}", row["metric"], *(row[name] for name in Point._fields[2:]))
        for row in rows
        if row["kind"] != "increase"
    ]
    head = ["task", "metric", "policy", "budget", "value", "95 % interval", "n"]
    cells = [
        [row["task"], row["metric"], row["policy"], f"{row['budget']:.0%}", *_value(row), str(row.get("n", "-"))]
        for row in rows
    ]
    return Passage(title, [], [_against_budget(panel) for panel in panels(points)], [Table("All figures", head, cells)])


def _value(row: Json) -> list[str]:
    form = {"share": "{:.0%}", "increase": "{:+.1%}"}.get(row["kind"], "{:.3g}").format
    return [form(row["value"]), f"{form(row['low'])} to {form(row['high'])}"]


def _against_budget(points: list[Point]) -> Figure:
    """A line per policy, the full cache's as a dashed level."""
    title, measure, kind = points[0][:3]
    of_policy: dict[str, list[list[float]]] = {}
    for point in points:
        of_policy.setdefault(point.policy, []).append([point.budget, point.value])
    full = of_policy.pop("full", None)
    lines: list[Json] = [{"name": policy, "points": sorted(each)} for policy, each in of_policy.items()]
    if full:
        ends = (min((budget for each in of_policy.values() for budget, _ in each), default=0.1), 1.0)
        level = [[end, full[0][1]] for end in ends]
        lines.append({"name": "full cache", "points": level, "dashed": True, "plain": True, "colour": 7})
    label = f"{title}, against the budget: {', '.join(line['name'] for line in lines)}."
    x = {"name": "KV budget, share of the sequence", "log": 2, "form": "percent"}
    y = {"name": measure, **_FORMS.get(kind, {"free": True})}
    return line_figure(title, x, y, lines, label)


def _stream(report: StreamReport) -> Passage:
    starts = report.starts()
    lines = [
        {
            "name": f"{row.policy}, {row.positions}",
            "points": [[at + report.window / 2, y] for at, y in zip(starts, row.perplexity, strict=False)],
            "plain": True,
            "dashed": row.positions == "recomputed",
        }
        for row in report.rows
    ]
    title = f"perplexity along streams of {report.length:,} tokens; the model's context is {report.context:,}"
    x, y = {"name": "position in the stream", "min": 0}, {"name": "perplexity", "log": 2, "free": True}
    return Passage(
        f"{report.model}: streams",
        [f"{report.text_file}, {report.streams} streams, {report.dtype} on {report.device}."],
        [line_figure(title, x, y, lines, wide=True)],
    )
