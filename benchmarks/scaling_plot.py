"""The picture of `benchmarks.scaling`: a panel per measurement, medians as points, least and most as bars."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.records import save_picture

LOOKS = {"full cache": ("black", "s"), "H2O 20 %": ("#c1121f", "o"), "H2O": ("#c1121f", "o")}
LABELS = {
    "batch": "sequences in the GPU batch",
    "stream": "GPU batches per pass over the weights",
    "prompt": "prompt tokens",
    "generated": "generated tokens",
    "budget": "KV budget, % of prompt and generated tokens",
}
RATES = {"decode": "-", "gen": ":", "prefill": "--"}
NAMES = {"decode": "decode", "gen": "end to end", "prefill": "prefill"}
SHOWN = {"prompt": ("decode", "prefill")}
"""What a panel shows; all others decode and end to end."""


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Writes the picture; a panel for each panel and title among `records`."""
    keys = list(dict.fromkeys((record["panel"], record["title"]) for record in records))
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.9 * rows), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(keys) :]:
        axes.axis("off")
    for axes, key in zip(grid.flat, keys, strict=False):
        runs = [record for record in records if (record["panel"], record["title"]) == key]
        (_long if key[0] == "long" else _panel)(axes, runs)
        what, _, rest = key[1].partition(", ")
        axes.set_title(f"{what}\n{rest}", fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines["top"].set_visible(False)
    save_picture(figure, path)


def _panel(axes: Any, runs: list[dict[str, Any]]) -> None:
    panel = runs[0]["panel"]
    xs = sorted({run["x"] for run in runs})
    for line in dict.fromkeys(run["line"] for run in runs):
        color, marker = LOOKS.get(line, ("#1f5fa8", "^"))
        for rate in SHOWN.get(panel, ("decode", "gen")):
            points = [
                (x, sorted(values))
                for x in xs
                if (
                    values := [run[f"{rate}_throughput"] or 0.0 for run in runs if (run["x"], run["line"]) == (x, line)]
                )
            ]
            middles = [median(values) for _, values in points]
            bars = [
                [middle - values[0] for middle, (_, values) in zip(middles, points, strict=True)],
                [values[-1] - middle for middle, (_, values) in zip(middles, points, strict=True)],
            ]
            axes.errorbar(
                [x for x, _ in points],
                middles,
                yerr=bars,
                color=color,
                marker=marker,
                markersize=4.5,
                linestyle=RATES[rate],
                linewidth=1.6,
                capsize=2.5,
                label=f"{line}, {NAMES[rate]}",
            )
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(xs, [f"{x:,}" for x in xs])
    axes.set_xlabel(LABELS[panel])
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.spines["right"].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _long(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Milliseconds per step on the left, resident memory on the right; a line for each run."""
    memory = axes.twinx()
    most, held = 0.0, 0.0
    for index, run in enumerate(runs):
        steps = [window["step"] for window in run["windows"]]
        times = [window["median_s"] * 1e3 for window in run["windows"]]
        resident = [(window["rss_bytes"] or float("nan")) / 2**20 for window in run["windows"]]
        label = None if index else "a step (median of a window)"
        axes.plot(steps, times, color="#c1121f", linewidth=1.4, alpha=0.8, label=label)
        memory.plot(
            steps, resident, color="#1f5fa8", linestyle="--", linewidth=1.4, label=None if index else "resident memory"
        )
        most, held = max(most, *times), max(held, *resident)
    axes.set_ylim(0, 1.5 * most)
    memory.set_ylim(0, 1.15 * held)
    axes.set_xlabel("generated tokens of a sequence")
    axes.set_ylabel("milliseconds per step", color="#c1121f")
    memory.set_ylabel("resident memory, MiB", color="#1f5fa8")
    memory.spines["top"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.xaxis.get_major_locator().set_params(nbins=5)
    handles, labels = axes.get_legend_handles_labels()
    more, others = memory.get_legend_handles_labels()
    axes.legend(handles + more, labels + others, frameon=False, fontsize=8, loc="lower left")
