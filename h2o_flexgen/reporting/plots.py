"""Pictures of what eviction costs. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from h2o_flexgen.config.reports.quality import Point, Positions, QualityReport, StreamReport, SuiteRecord, panels
from h2o_flexgen.errors import UsageError, writing

SUFFIXES = (".png", ".svg", ".pdf")

LOOKS = {
    "h2o": ("#c1121f", "o"),
    "local": ("#1f5fa8", "s"),
    "streaming": ("#2a9d8f", "^"),
    "heavy": ("#e08e45", "D"),
    "random": ("#7b6d8d", "v"),
}
MARKERS = "osD^vP*X<>"
SPARE_LOOK = ("#444444", "P")
LINES: dict[Positions, str] = {"recomputed": "--", "rolling": "-", "absolute": ":"}
MARKS = 16
"""Markers to a line, at most."""


def check_plot(path: Path) -> None:
    """UsageError where no picture can be drawn to `path`: to be asked before the figures are measured."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", change="pip install 'h2o_flexgen[report]'")
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}", f"needed a name that ends in {', '.join(SUFFIXES)}")


def plot_quality(report: QualityReport, path: Path) -> None:
    """Writes the picture to `path`, in the format of its suffix. StorageError where that fails."""
    _plot(report.points(), path, f"{report.model} ({report.dtype}): quality against the KV budget")


def plot_suite(records: Sequence[SuiteRecord], path: Path) -> None:
    """A panel per model, task and metric. StorageError where it cannot be written."""
    points = []
    for each in records:
        title = f"{each.model}\n{each.task}: {each.metric}"
        figures = each.value, each.low, each.high
        points.append(Point(title, each.metric, each.kind, each.policy, each.budget, *figures))
    _plot(points, path)


def _plot(points: Iterable[Point], path: Path, title: str = "") -> None:
    """A panel per title, figures against budgets."""
    from matplotlib.figure import Figure

    drawn = panels(points)
    policies = list(dict.fromkeys(point.policy for own in drawn for point in own if point.policy != "full"))
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.0 * rows + 0.03 * len(policies) + 0.6), layout="constrained")
    handles = dict[str, Any]()
    for place, own in enumerate(drawn, start=1):
        axes: Any = figure.add_subplot(rows, columns, place)
        _panel(axes, own, policies)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title, fontsize=13)
    with writing(path):
        figure.savefig(path, dpi=120)


def _panel(axes: Any, points: Sequence[Point], policies: Sequence[str]) -> None:
    """A line per policy, its interval shaded where few are drawn; the full cache as a level."""
    from matplotlib import colormaps

    for policy in dict.fromkeys(point.policy for point in points):
        own = sorted((point for point in points if point.policy == policy), key=lambda point: point.budget)
        if policy == "full":
            axes.axhline(own[0].value, color="black", linestyle="--", linewidth=1.2, label="full cache", zorder=1)
            continue
        place = policies.index(policy)
        color, marker = LOOKS.get(policy, (colormaps["tab20"](place % 20), MARKERS[place % len(MARKERS)]))
        budgets = [point.budget for point in own]
        axes.plot(budgets, [point.value for point in own], color=color, marker=marker, linewidth=1.4, label=policy)
        if len(policies) <= 8:
            ends = [point.low for point in own], [point.high for point in own]
            axes.fill_between(budgets, *ends, color=color, alpha=0.12, linewidth=0)
    kind = points[0].kind
    axes.set(title=points[0].title, ylabel=points[0].measure)
    if kind == "share":
        axes.set_ylim(-0.03, 1.03)
    if kind == "increase":
        axes.set_yscale("symlog", linthresh=0.05)
    if kind in ("share", "increase"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if kind == "perplexity":
        _log_if_wide(axes, [point.value for point in points])
    ratios = sorted({point.budget for point in points if point.policy != "full"})
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ratios, [f"{ratio:.0%}" if ratio >= 0.01 else f"{ratio:.1%}" for ratio in ratios])
    axes.set_xlabel("KV budget, share of prompt and generated tokens")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _log_if_wide(axes: Any, values: list[float]) -> None:
    """A logarithmic axis, labelled in plain numbers, where the worst policy would flatten all others."""
    from matplotlib.ticker import LogLocator

    if max(values) > 4 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()


def plot_stream(report: StreamReport, path: Path) -> None:
    """Writes the picture to `path`, in the format of its suffix. StorageError where that fails."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5.0), layout="constrained")
    axes: Any = figure.subplots()
    middles = [start + report.window / 2 for start in report.starts()]
    for row in report.rows:
        color, marker = LOOKS.get(row.policy, SPARE_LOOK)
        name = "full cache" if row.policy == "full" else f"{row.policy}, {row.eviction['budget']} tokens"
        axes.plot(
            middles,
            row.perplexity,
            color=color,
            marker=marker,
            markevery=max(1, len(middles) // MARKS),
            markersize=4.5,
            linewidth=1.6,
            zorder=3 if row.positions == "recomputed" else 2,
            linestyle=LINES[row.positions],
            alpha=0.9,
            label=f"{name}, {row.positions}",
        )
    axes.axvline(report.context, color="grey", linestyle="--", linewidth=1)
    axes.annotate(f" context: {report.context:,}", (report.context, 0.98), xycoords=("data", "axes fraction"), va="top")
    axes.set(xlabel="position in the stream", ylabel=f"perplexity of {report.window} tokens", xlim=(0, report.length))
    _log_if_wide(axes, [value for row in report.rows for value in row.perplexity])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside right center", frameon=False, title="cache, positions"
    )
    times = f"{report.length / report.context:g} times its context"
    figure.suptitle(f"{report.model} ({report.dtype}): {report.streams} streams of {times}", fontsize=12)
    with writing(path):
        figure.savefig(path, dpi=120)
