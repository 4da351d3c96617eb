"""Pictures of what eviction costs. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from h2o_flexgen.config.reports.quality import (
    Positions,
    QualityReport,
    QualityRow,
    RecallTally,
    StreamReport,
    SuiteRecord,
)
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
    from matplotlib.figure import Figure

    tallies = report.rows[0].recall
    later = any(tally.later_cases for tally in tallies)
    columns = len(tallies) + 1
    figure = Figure(figsize=(4.7 * columns, 8.2 if later else 4.6), layout="constrained")
    grid: Any = figure.subplots(2 if later else 1, columns, squeeze=False)
    for place, tally in enumerate(tallies):
        title = f"{tally.kind or 'recall'}: asked in the prompt, n = {tally.long_cases or tally.cases}"
        _recall_panel(grid[0][place], report, place, title, lambda tally: tally.shown)
        if later:
            title = f"{tally.kind}: asked after eviction, n = {tally.later_cases}"
            _recall_panel(grid[1][place], report, place, title, lambda tally: tally.later)
    _perplexity_panel(grid[0][-1], report)
    handles = grid[0][0].get_legend_handles_labels()
    if later:
        grid[1][-1].axis("off")
        grid[1][-1].legend(*handles, loc="center", frameon=False, fontsize=11)
    else:
        figure.legend(*handles, loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle(f"{report.model} ({report.dtype}): quality against the KV budget", fontsize=13)
    _save(figure, path)


def plot_suite(records: Sequence[SuiteRecord], path: Path) -> None:
    """A panel per model, task and metric: figures against budgets, intervals shaded. StorageError where that fails."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys((record.model, record.task, record.metric, record.kind) for record in records))
    policies = [name for name in dict.fromkeys(record.policy for record in records) if name != "full"]
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(5.2 * columns, 4.0 * rows + 0.03 * len(policies) + 0.6), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for place, (model, task, metric, kind) in enumerate(groups):
        axes = grid[place // columns][place % columns]
        own = [record for record in records if (record.model, record.task, record.metric) == (model, task, metric)]
        _suite_panel(axes, own, policies)
        axes.set(title=f"{model}, {task}", ylabel=metric)
        if kind in ("share", "increase"):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        if kind == "perplexity":
            _log_if_wide(axes, [record.value for record in own])
        elif kind == "increase":
            axes.set_yscale("symlog", linthresh=0.05)
    for place in range(len(groups), rows * columns):
        grid[place // columns][place % columns].axis("off")
    handles = dict[str, Any]()
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    _save(figure, path)


def _suite_panel(axes: Any, records: Sequence[SuiteRecord], policies: Sequence[str]) -> None:
    """A line per policy, its interval shaded where few are drawn; the full cache as a level."""
    from matplotlib import colormaps

    for policy in dict.fromkeys(record.policy for record in records):
        own = sorted((record for record in records if record.policy == policy), key=lambda record: record.budget)
        if policy == "full":
            axes.axhline(own[0].value, color="black", linestyle="--", linewidth=1.2, label="full cache", zorder=1)
            continue
        place = policies.index(policy)
        color, marker = LOOKS.get(policy, (colormaps["tab20"](place % 20), MARKERS[place % len(MARKERS)]))
        budgets = [record.budget for record in own]
        axes.plot(budgets, [record.value for record in own], color=color, marker=marker, linewidth=1.4, label=policy)
        if len(policies) <= 8:
            ends = [record.low for record in own], [record.high for record in own]
            axes.fill_between(budgets, *ends, color=color, alpha=0.12, linewidth=0)
    budgets = sorted({record.budget for record in records if record.policy != "full"})
    _budget_axis(axes, budgets)


def _recall_panel(
    axes: Any, report: QualityReport, place: int, title: str, value: Callable[[RecallTally], float | None]
) -> None:
    _panel(axes, report, lambda row: value(row.recall[place]))
    axes.set(ylabel="right answers", ylim=(-0.03, 1.03), title=title)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


def _perplexity_panel(axes: Any, report: QualityReport) -> None:
    _panel(axes, report, lambda row: row.perplexity)
    axes.set(ylabel="perplexity per token", title=f"held-out text: {report.rows[0].scored_tokens:,} tokens")
    _log_if_wide(axes, [row.perplexity for row in report.rows])


def _panel(axes: Any, report: QualityReport, value: Callable[[QualityRow], float | None]) -> None:
    """One line per policy; the full cache, which has no ratio, as a level."""
    for policy in dict.fromkeys(row.policy for row in report.rows):
        rows = [row for row in report.rows if row.policy == policy]
        points = sorted((row.ratio, y) for row in rows if (y := value(row)) is not None)
        if policy == "full":
            for _, level in points:
                axes.axhline(level, color="black", linestyle="--", linewidth=1.2, label="full cache", zorder=1)
            continue
        color, marker = LOOKS.get(policy, SPARE_LOOK)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, color=color, marker=marker, markersize=6, linewidth=1.8, alpha=0.9, label=policy)
    _budget_axis(axes, sorted({row.ratio for row in report.rows if row.policy != "full"}))


def _budget_axis(axes: Any, ratios: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ratios, [f"{ratio:.0%}" if ratio >= 0.01 else f"{ratio:.1%}" for ratio in ratios])
    axes.set_xlabel("KV budget, share of prompt and generated tokens")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    with writing(path):
        figure.savefig(path, dpi=120)


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
    _save(figure, path)
