"""How tokens per second change with batch, GPU batches, prompt, generated length and budget; and a very long answer.

    python -m benchmarks.scaling                               all panels, 3 repetitions: most of an hour on two cores
    python -m benchmarks.scaling --panels batch,budget --repetitions 5
    python -m benchmarks.scaling --quick --output DIR          every panel with few small points: does it work?

Every run is a process of its own, all points in turn within each repetition. Records go to --output, a line each, and
those that are there already are not measured again; table.md and scaling.png are made of all of them. The panel `long`
generates 16,384 tokens at a fixed budget: time per step and resident memory should not grow. OPT has 2,048 positions,
so panels with long sequences run a LLaMA of OPT-125M's size, whose config.json is written beside the records.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks.records import (
    arguments,
    engine,
    in_process,
    llama,
    provenance,
    run_all,
    run_json,
    save_picture,
    shown,
    spread,
)
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.config.flags import between_commas

LINES = {"full cache": [], "H2O 20 %": ["--hh-ratio", "0.2"]}
LLAMA_110M: dict[str, int | bool] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""As many weights as OPT-125M has in its layers, and a context of 32,768."""
LOOKS = {"full cache": ("black", "s"), "H2O 20 %": ("#c1121f", "o"), "H2O": ("#c1121f", "o")}
RATES = {"decode": "-", "gen": ":", "prefill": "--"}
NAMES = {"decode": "decode", "gen": "end to end", "prefill": "prefill"}


@dataclass(frozen=True)
class Panel:
    """Points that differ in one number, how its axis and its column are called, and the rates in the picture."""

    points: Callable[[argparse.Namespace], Iterator[Record]]
    axis: str = ""
    head: str = ""
    rates: tuple[str, str] = ("decode", "gen")


def _work(model: str, rows: int, batches: int, prompt: int, new: int) -> list[str]:
    flags = {"model": model, "gpu-batch-size": rows, "num-gpu-batches": batches, "prompt-len": prompt, "gen-len": new}
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


def _name(model: str) -> str:
    return Path(model).name


def _lines(panel: str, title: str, xs: tuple[int, ...], flags: Callable[[int], list[str]]) -> Iterator[Record]:
    """A point per line and value."""
    for x in xs:
        for line, budget in LINES.items():
            yield {"panel": panel, "title": title, "line": line, "x": x, "flags": [*flags(x), *budget]}


def _batch(args: argparse.Namespace) -> Iterator[Record]:
    prompt, new, xs = (16, 4, (1, 4)) if args.quick else (128, 64, (1, 2, 4, 8, 16, 32, 64))
    title = f"{_name(args.model)}, {prompt}+{new} tokens"
    return _lines("batch", title, xs, lambda x: _work(args.model, x, 1, prompt, new))


def _stream(args: argparse.Namespace) -> Iterator[Record]:
    rows, prompt, new, xs = (2, 16, 4, (1, 2)) if args.quick else (8, 64, 16, (1, 2, 4, 8))
    title = f"{_name(args.model)}, weights on disk, {rows} sequences each, {prompt}+{new} tokens"
    disk = ["--weights-placement", "disk=1"]
    disk += ["--offload-dir", str(args.offload_dir)] if args.offload_dir else []
    return _lines("stream", title, xs, lambda x: [*_work(args.model, rows, x, prompt, new), *disk])


def _prompt(args: argparse.Namespace) -> Iterator[Record]:
    rows, new, xs = (2, 4, (16, 32)) if args.quick else (8, 32, (128, 256, 512, 1024, 2048))
    title = f"{_name(args.long_model)}, batch {rows}, N+{new} tokens"
    return _lines("prompt", title, xs, lambda x: _work(args.long_model, rows, 1, x, new))


def _generated(args: argparse.Namespace) -> Iterator[Record]:
    rows, prompt, xs = (2, 16, (4, 8)) if args.quick else (8, 128, (32, 128, 512, 2048))
    title = f"{_name(args.long_model)}, batch {rows}, {prompt}+N tokens"
    return _lines("generated", title, xs, lambda x: _work(args.long_model, rows, 1, prompt, x))


def _budget(args: argparse.Namespace) -> Iterator[Record]:
    rows, prompt, new = (4, 32, 4) if args.quick else (32, 512, 64)
    title = f"{_name(args.model)}, batch {rows}, {prompt}+{new} tokens"
    for x in (20, 100) if args.quick else (5, 10, 20, 40, 60, 80, 100):
        flags = [*_work(args.model, rows, 1, prompt, new), "--hh-ratio", str(x / 100)]
        yield {"panel": "budget", "title": title, "line": "H2O", "x": x, "flags": flags}


def _long(args: argparse.Namespace) -> Iterator[Record]:
    rows, budget, new, window = (2, 16, 34, 8) if args.quick else (8, 256, 16384, 512)
    title = f"{_name(args.long_model)}, batch {rows}, H2O with {budget} tokens, {budget}+{new} tokens"
    settings = {"model": args.long_model, "batch": rows, "prompt": budget, "budget": budget, "new": new}
    yield {"panel": "long", "title": title, "line": "H2O", "x": new, "settings": {**settings, "window": window}}


PANELS = {
    "batch": Panel(_batch, "sequences in the GPU batch", "batch"),
    "stream": Panel(_stream, "GPU batches per pass over the weights", "GPU batches"),
    "prompt": Panel(_prompt, "prompt tokens", "prompt", ("decode", "prefill")),
    "generated": Panel(_generated, "generated tokens", "generated"),
    "budget": Panel(_budget, "KV budget, % of prompt and generated tokens", "budget %"),
    "long": Panel(_long),
}


def measure(point: Record) -> Record:
    """One run."""
    if point["panel"] != "long":
        return run_json(engine(point["flags"]))
    return in_process("scaling", point["settings"])


def table(records: list[Record]) -> Iterator[str]:
    """A table per panel and title; medians, and least and most where there are several runs."""
    yield "Tokens per second, in brackets the least and the most; end to end: generated tokens over prefill and decode."
    yield provenance(records)
    for panel, title in dict.fromkeys((record["panel"], record["title"]) for record in records):
        rows = [record for record in records if (record["panel"], record["title"]) == (panel, title)]
        yield ""
        yield f"**{panel}**: {title}"
        yield ""
        yield from _long_table(rows) if panel == "long" else _panel_table(panel, rows)


def _panel_table(panel: str, rows: list[Record]) -> Iterator[str]:
    yield f"| {PANELS[panel].head} | cache | prefill | decode | end to end | peak resident | runs |"
    yield "|---:|---|---:|---:|---:|---:|---:|"
    for x, line in sorted({(row["x"], row["line"]) for row in rows}):
        runs = [row for row in rows if (row["x"], row["line"]) == (x, line)]
        rates = [
            spread([run[f"{what}_throughput"] for run in runs if run[f"{what}_throughput"]], ".4g")
            for what in ("prefill", "decode", "gen")
        ]
        peak = median(run["peak_bytes"]["rss"] for run in runs) / 2**20
        yield f"| {x} | {line} | {' | '.join(rates)} | {peak:,.0f} MiB | {len(runs)} |"


def _long_table(rows: list[Record]) -> Iterator[str]:
    yield "| run | ms per step: first window | all windows | last window | trend in all | resident, first to last |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for number, row in enumerate(rows, 1):
        windows = row["windows"]
        steps = [window["median_s"] * 1e3 for window in windows]
        held = [window["rss_bytes"] / 2**20 for window in windows if window["rss_bytes"]]
        grown = f"{held[0]:,.0f} to {held[-1]:,.0f} MiB ({held[-1] - held[0]:+.1f})" if held else ""
        yield (
            f"| {number} | {steps[0]:.2f} | {spread(steps, '.2f')} | {steps[-1]:.2f} | {trend(steps):+.1%} | {grown} |"
        )
    yield ""
    yield (
        f"A window is {rows[0]['windows'][0]['step']} steps, its figure the median of their times; the trend is the "
        "median slope between all pairs of windows, over the whole run and against its median. Resident memory holds "
        "the answer itself: some 40 bytes for each token of each sequence, as Python keeps them."
    )


def trend(values: list[float]) -> float:
    """By how much of their median `values` change from first to last, by the median slope of all pairs (Theil-Sen)."""
    pairs = [(i, j) for i in range(len(values)) for j in range(i)]
    slopes = [(values[i] - values[j]) / (i - j) for i, j in pairs]
    return median(slopes) * (len(values) - 1) / median(values) if slopes else 0.0


def picture(records: list[Record], path: Path) -> None:
    """A panel for each panel and title among `records`: medians as points, least and most as bars."""
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys((record["panel"], record["title"]) for record in records))
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.9 * rows), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(keys) :]:
        axes.axis("off")
    for axes, key in zip(grid.flat, keys, strict=False):
        runs = [record for record in records if (record["panel"], record["title"]) == key]
        (_long_panel if key[0] == "long" else _panel)(axes, runs)
        what, _, rest = key[1].partition(", ")
        axes.set_title(f"{what}\n{rest}", fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines["top"].set_visible(False)
    save_picture(figure, path)


def _panel(axes: Any, runs: list[Record]) -> None:
    panel = PANELS[runs[0]["panel"]]
    xs = sorted({run["x"] for run in runs})
    for line in dict.fromkeys(run["line"] for run in runs):
        color, marker = LOOKS.get(line, ("#1f5fa8", "^"))
        for rate in panel.rates:
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
    axes.set_xlabel(panel.axis)
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.spines["right"].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _long_panel(axes: Any, runs: list[Record]) -> None:
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


def run_long(settings: Record) -> int:
    """One long generation at a fixed budget, in this process, so that its memory is its own; prints its record.

    To the engine's record it adds `windows`: for each window of decode steps the step it ends with, the mean, median
    and least seconds of a step, and the resident bytes of the process at its end. What is left over after the last
    whole window is dropped.
    """
    from h2o_flexgen import LLM, EvictionConfig

    process, draw = psutil.Process(), Random(0)
    times, resident, window = array("d"), array("q"), settings["window"]

    def note(what: str, done: int, total: int) -> None:
        """Called before every step: before the prompts, then before each decode step."""
        if what != "generating":
            return
        times.append(time.perf_counter())
        if len(times) % window == 2 % window:  # before decode step 1, and then after every window
            resident.append(process.memory_info().rss)
            print(f"{done:,} of {total:,} tokens", file=sys.stderr, flush=True)

    policy = {"gpu_batch_size": settings["batch"], "num_gpu_batches": 1, "weights": {"cpu": 1.0}, "cache": {"cpu": 1.0}}
    eviction = EvictionConfig("h2o", budget=settings["budget"])
    with LLM(settings["model"], weights="dummy", dtype="bfloat16", eviction=eviction, policy=policy) as llm:
        vocabulary = llm.model.spec.vocab_size
        prompts = [[draw.randrange(3, vocabulary) for _ in range(settings["prompt"])] for _ in range(settings["batch"])]
        llm.on_progress = note
        outputs = llm.generate(prompts, max_new_tokens=settings["new"], ignore_eos=True)
        record = llm.last_record.to_json()
    short = [output.index for output in outputs if len(output.token_ids) != settings["new"]]
    if short:
        raise RuntimeError(f"sequences {short} ended early: {outputs[short[0]].error}")
    steps = [later - earlier for earlier, later in pairwise(times[1:])]
    windows = []
    for index, end in enumerate(range(window, len(steps) + 1, window)):
        part = steps[end - window : end]
        windows.append(
            {"step": end, "mean_s": fmean(part), "median_s": median(part), "least_s": min(part)}
            | {"rss_bytes": resident[index + 1] if index + 1 < len(resident) else None}
        )
    print(json.dumps({**record, "windows": windows}))
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "scaling", 3, takes_points=True)
    parser.add_argument("--panels", default=",".join(PANELS), help="which, with commas (default: all)")
    parser.add_argument("--quick", action="store_true", help="few small points")
    parser.add_argument("--model", default="opt-125m", help="of batch, stream and budget (default: opt-125m)")
    parser.add_argument("--long-model", help="of the others, a rotary one (default: a LLaMA of that size)")
    parser.add_argument("--offload-dir", type=Path, help="of weights on disk (default: the engine's own)")
    args = parser.parse_args(argv)
    args.panels = between_commas(args.panels)
    if unknown := set(args.panels) - set(PANELS):
        parser.error(f"no panel is called {', '.join(sorted(unknown))}; there are {', '.join(PANELS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.run:
        return run_long(args.run)
    args.long_model = args.long_model or shown(llama(args.output.resolve() / "llama-110m", **LLAMA_110M))
    points = [point for name in args.panels for point in PANELS[name].points(args)]
    for point in points:
        point["name"] = f"{point['panel']}: {point['title']}; {point['line']}, {point['x']}"
    if args.offload_dir:
        args.offload_dir.mkdir(parents=True, exist_ok=True)
    return run_all(args, points, measure, "name", table, picture, "scaling.png")


if __name__ == "__main__":
    sys.exit(main())
