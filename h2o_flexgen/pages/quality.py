"""What eviction cost: recall and perplexity against the budget, suites of tasks, and perplexity along streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from h2o_flexgen.config.reports.quality import QualityReport, QualityRow, RecallTally, StreamReport
from h2o_flexgen.pages.page import Chapter, Figure, Passage, Table
from h2o_flexgen.pages.reading import Json, Material, model_name
from h2o_flexgen.units import format_bytes, format_seconds

_FORMS: dict[str, Json] = {
    "share": {"form": "percent", "min": 0, "max": 1},
    "perplexity": {"log": True, "free": True},
}
"""Axes of what is measured, by its kind."""


def section(material: Material) -> Chapter | None:
    """The evaluations; None without one."""
    suites: dict[tuple[str, str], list[Json]] = {}
    for each in material.suites:
        suites.setdefault((each.data["suite"], each.data["model"]), []).append(each.data)
    parts = [_quality(each.data) for each in material.qualities] + [_stream(each.data) for each in material.streams]
    parts += [_suite(f"{model_name(model)}: suite {suite}", rows) for (suite, model), rows in suites.items()]
    if not parts:
        return None
    text = "Right answers and perplexity of a model with its KV cache at a budget; the full cache is a dashed level."
    return Chapter("quality", "Quality", [text], parts)


def _quality(report: QualityReport) -> Passage:
    tallies = report.rows[0].recall if report.rows else ()
    figures = list[Figure]()

    def draw(title: str, name: str, kind: str, value: Callable[[QualityRow], float | None]) -> None:
        points = [(row.policy, row.ratio, y) for row in report.rows if (y := value(row)) is not None]
        figures.extend(_against_budget(title, points, {"name": name, **_FORMS[kind]}))

    for place, tally in enumerate(tallies):

        def shown(row: QualityRow, place: int = place) -> float | None:
            return row.recall[place].shown if place < len(row.recall) else None

        def later(row: QualityRow, place: int = place) -> float | None:
            return row.recall[place].later if place < len(row.recall) else None

        kind = tally.kind or "recall"
        draw(f"{kind}: asked in the prompt, {_asked(tally)} answers", "right answers", "share", shown)
        draw(f"{kind}: asked after eviction, {tally.later_cases} answers", "right answers", "share", later)
    draw("perplexity of held-out text", "perplexity", "perplexity", lambda row: row.perplexity)
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
    return Passage(f"{report.model}: quality against budget", [text], figures, [Table("All rows", head, rows)])


def _suite(title: str, rows: list[Json]) -> Passage:
    """A figure for each task and metric, and all figures with their intervals as a table, increases only there."""
    figures = list[Figure]()
    shown = [row for row in rows if row["kind"] != "increase"]
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in shown):
        here = [row for row in shown if (row["task"], row["metric"]) == (task, metric)]
        form = _FORMS.get(here[0]["kind"], {"free": True})
        points = [(row["policy"], row["budget"], row["value"]) for row in here]
        figures += _against_budget(f"{task}: {metric}", points, {"name": metric, **form})
    head = ["task", "metric", "policy", "budget", "value", "95 % interval", "n"]
    cells = [
        [row["task"], row["metric"], row["policy"], f"{row['budget']:.0%}", *_value(row), str(row.get("n", "-"))]
        for row in rows
    ]
    return Passage(title, [], figures, [Table("All figures", head, cells)])


def _value(row: Json) -> list[str]:
    """The value and its interval."""
    form = {"share": "{:.0%}", "increase": "{:+.1%}"}.get(row["kind"], "{:.3g}").format
    return [form(row["value"]), f"{form(row['low'])} to {form(row['high'])}"]


def _asked(tally: RecallTally) -> int:
    return tally.long_cases or tally.cases


def _against_budget(title: str, points: list[tuple[str, float, float]], y: Json) -> Iterator[Figure]:
    """A line per policy through (policy, budget, value), the full cache's as a dashed level; nothing without points."""
    of_policy: dict[str, list[list[float]]] = {}
    for policy, budget, value in points:
        of_policy.setdefault(policy, []).append([budget, value])
    full = of_policy.pop("full", None)
    lines: list[Json] = [{"name": policy, "points": sorted(each)} for policy, each in of_policy.items()]
    if full:
        ends = (min((budget for each in of_policy.values() for budget, _ in each), default=0.1), 1.0)
        level = [[end, full[0][1]] for end in ends]
        lines.append({"name": "full cache", "points": level, "dashed": True, "plain": True, "colour": 7})
    if lines:
        label = f"{title}, against the budget: {', '.join(line['name'] for line in lines)}."
        x = {"name": "KV budget, share of the sequence", "log": True, "form": "percent"}
        yield Figure("lines", title, label, {"x": x, "y": y, "lines": lines}, height=22)


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
    figure = Figure(
        "lines",
        title,
        f"{title}: {', '.join(str(line['name']) for line in lines)}.",
        {
            "x": {"name": "position in the stream", "min": 0},
            "y": {"name": "perplexity", "log": True, "free": True},
            "lines": lines,
        },
        wide=True,
        height=22,
    )
    return Passage(
        f"{report.model}: streams",
        [f"{report.text_file}, {report.streams} streams, {report.dtype} on {report.device}."],
        [figure],
    )
