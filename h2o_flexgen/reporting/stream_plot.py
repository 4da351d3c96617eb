"""Perplexity along the stream, a line per policy and kind of positions. matplotlib is imported when it draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from h2o_flexgen.config.reports.stream import Positions, StreamReport
from h2o_flexgen.errors import StorageError
from h2o_flexgen.reporting.quality_plot import LOOKS, SPARE_LOOK, log_if_wide

LINES: dict[Positions, str] = {"recomputed": "--", "rolling": "-", "absolute": ":"}
MARKS = 16
"""Markers to a line, at most."""


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
    log_if_wide(axes, [value for row in report.rows for value in row.perplexity])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside right center", frameon=False, title="cache, positions"
    )
    times = f"{report.length / report.context:g} times its context"
    figure.suptitle(f"{report.model} ({report.dtype}): {report.streams} streams of {times}", fontsize=12)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None
