"""What eviction cost: recall and perplexity against the budget, suites of tasks, and perplexity along streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from h2o_flexgen.config.reports.quality import QualityReport, QualityRow, RecallTally, StreamReport
from h2o_flexgen.pages.page import Chapter, Figure, Passage, Table
from h2o_flexgen.pages.reading import Json, Material, model_name
from h2o_flexgen.units import format_bytes, format_seconds


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
    figures: list[Figure] = []
    for place, tally in enumerate(tallies):

        def shown(row: QualityRow, place: int = place) -> float | None:
            return row.recall[place].shown if place < len(row.recall) else None

        def later(row: QualityRow, place: int = place) -> float | None:
            return row.recall[place].later if place < len(row.recall) else None

        kind = tally.kind or "recall"
        figures += _against_budget(report, f"{kind}: asked in the prompt, {_asked(tally)} answers", shown, True)
        figures += _against_budget(report, f"{kind}: asked after eviction, {tally.later_cases} answers", later, True)
    figures += _against_budget(report, "perplexity of held-out text", lambda row: row.perplexity, False)
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
    figures = []
    shown = [row for row in rows if row["kind"] != "increase"]
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in shown):
        here = [row for row in shown if (row["task"], row["metric"]) == (task, metric)]
        others = [row for row in here if row["policy"] != "full"]
        points: dict[str, list[list[float]]] = {}
        for row in others:
            points.setdefault(row["policy"], []).append([row["budget"], row["value"]])
        lines: list[Json] = [{"name": policy, "points": sorted(each)} for policy, each in points.items()]
        ends = (min((row["budget"] for row in others), default=0.1), 1.0)
        lines += [_level([[end, row["value"]] for end in ends]) for row in here if row["policy"] == "full"]
        share = here[0]["kind"] == "share"
        form = {"form": "percent", "min": 0, "max": 1} if share else {"free": True}
        form["log"] = here[0]["kind"] == "perplexity"
        axes = {"x": {"name": "KV budget", "log": True, "form": "percent"}, "y": {"name": metric, **form}}
        name = f"{task}: {metric}"
        label = f"{name}, against the budget: {', '.join(str(line['name']) for line in lines)}."
        figures.append(Figure("lines", name, label, {**axes, "lines": lines}, height=24))
    head = ["task", "metric", "policy", "budget", "value", "95 % interval", "n"]
    cells = [
        [row["task"], row["metric"], row["policy"], f"{row['budget']:.0%}", *_value(row), str(row.get("n", "-"))]
        for row in rows
    ]
    return Passage(title, [], figures, [Table("All figures", head, cells)])


def _level(points: list[list[float]]) -> Json:
    """The full cache's line."""
    return {"name": "full cache", "points": points, "dashed": True, "plain": True, "colour": 7}


def _value(row: Json) -> list[str]:
    """The value and its interval."""
    form = {"share": "{:.0%}", "increase": "{:+.1%}"}.get(row["kind"], "{:.3g}").format
    return [form(row["value"]), f"{form(row['low'])} to {form(row['high'])}"]


def _asked(tally: RecallTally) -> int:
    return tally.long_cases or tally.cases


def _against_budget(
    report: QualityReport, title: str, value: Callable[[QualityRow], float | None], share: bool
) -> Iterator[Figure]:
    lines: list[Json] = []
    ratios = [row.ratio for row in report.rows if row.policy != "full"]
    for policy in dict.fromkeys(row.policy for row in report.rows):
        points = sorted([row.ratio, y] for row in report.rows if row.policy == policy and (y := value(row)) is not None)
        if policy == "full" and points:
            ends = (min(ratios, default=0.1), max([*ratios, 1.0]))
            lines.append(_level([[end, points[0][1]] for end in ends]))
        elif points:
            lines.append({"name": policy, "points": points})
    if not lines:
        return
    form = {"form": "percent", "min": 0, "max": 1} if share else {"log": True, "free": True}
    yield Figure(
        "lines",
        title,
        f"{title}, against the budget: {', '.join(line['name'] for line in lines)}.",
        {
            "x": {"name": "KV budget, share of the sequence", "log": True, "form": "percent"},
            "y": {"name": "right answers" if share else "perplexity", **form},
            "lines": lines,
        },
        height=20,
    )


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
