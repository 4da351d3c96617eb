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
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.records import default_output, engine, provenance, repeat, run_json, shown, spread
from benchmarks.scaling_plot import draw
from h2o_flexgen.baselines.store import Record, RecordFile

LINES = {"full cache": [], "H2O 20 %": ["--hh-ratio", "0.2"]}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
"""As many weights as OPT-125M has in its layers, and a context of 32,768."""


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
    "batch": _batch,
    "stream": _stream,
    "prompt": _prompt,
    "generated": _generated,
    "budget": _budget,
    "long": _long,
}


def measure(point: Record) -> Record:
    """One run."""
    if point["panel"] != "long":
        return run_json(engine(point["flags"]))
    return run_json([sys.executable, "-m", "benchmarks.scaling_long", json.dumps(point["settings"])])


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
    heads = {
        "batch": "batch",
        "stream": "GPU batches",
        "prompt": "prompt",
        "generated": "generated",
        "budget": "budget %",
    }
    yield f"| {heads[panel]} | cache | prefill | decode | end to end | peak resident | runs |"
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


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--panels", default=",".join(PANELS), help="which, with commas (default: all)")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of every point, in all (default: 3)")
    parser.add_argument("--quick", action="store_true", help="few small points")
    parser.add_argument("--model", default="opt-125m", help="of batch, stream and budget (default: opt-125m)")
    parser.add_argument("--long-model", help="of the others, a rotary one (default: a LLaMA of that size)")
    parser.add_argument("--offload-dir", type=Path, help="of weights on disk (default: the engine's own)")
    parser.add_argument("--output", type=Path, default=default_output("scaling"))
    args = parser.parse_args(argv)
    args.panels = [name.strip() for name in args.panels.split(",") if name.strip()]
    if unknown := set(args.panels) - set(PANELS):
        parser.error(f"no panel is called {', '.join(sorted(unknown))}; there are {', '.join(PANELS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    store = RecordFile.open(args.output.resolve())
    if args.long_model is None:
        folder = store.folder / "llama-110m"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA, indent=2) + "\n", encoding="utf-8")
        args.long_model = shown(folder)
    points = [point for name in args.panels for point in PANELS[name](args)]
    for point in points:
        point["name"] = f"{point['panel']}: {point['title']}; {point['line']}, {point['x']}"
    if args.offload_dir:
        args.offload_dir.mkdir(parents=True, exist_ok=True)
    failed = repeat(store, points, args.repetitions, measure, "name")
    print(store.write(table(store.records)))
    if store.records:
        draw(store.records, store.folder / "scaling.png")
    print(f"records, table.md and scaling.png are in {shown(store.folder)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
