"""What unequal lengths cost: the same tokens in sequences of one length, and in sequences of long-tailed lengths.

    python -m benchmarks.ragged                                5 paired repetitions: some minutes
    python -m benchmarks.ragged --repetitions 9 --caches h2o

Three kinds of work with the same number of sequences, of prompt tokens and of generated tokens in all:
    uniform      every sequence has the mean lengths
    known        lognormal lengths, clipped at four times the mean; every sequence asks for as many tokens as it gets
    unforeseen   the same lengths, but every sequence asks for the most, and ends by a stop token that the engine first
                 hears of when it comes: the logits of that token are raised in the step of the drawn length
Each runs in a process of its own, with the full cache and with H2O at 20 %, all in turn within each repetition, and the
ratios are taken pair by pair. Records go to --output, a line each; table.md and ragged.png are made of all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.records import arguments, in_process, provenance, run_all, save_picture, spread, tidy
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.config.flags import between_commas

KINDS = ("uniform", "known", "unforeseen")
CACHES = {"full": 1.0, "h2o": 0.2}
NAMES = {"full": "full cache", "h2o": "H2O 20 %"}
TAIL = 4
"""The longest of ragged lengths, in means."""
SIGMA = 0.9
"""Standard deviation of the logarithms before clipping: half of all lengths are below 0.7 means."""
GOAL = 0.8


def lengths(count: int, mean: int, seed: int) -> list[int]:
    """`count` lengths of `count * mean` tokens in all: lognormal, at least 1 and at most TAIL means."""
    draw = Random(seed)
    drawn = [draw.lognormvariate(0.0, SIGMA) for _ in range(count)]
    low, high = 0.0, float(TAIL * count * mean)
    for _ in range(60):  # clipping takes from the sum: the factor that gives the mean after it, by bisection
        factor = (low + high) / 2
        total = sum(_clipped(factor * value, mean) for value in drawn)
        low, high = (factor, high) if total < count * mean else (low, factor)
    found = [_clipped(low * value, mean) for value in drawn]
    missing = count * mean - sum(found)
    for index in sorted(range(count), key=lambda i: drawn[i]):  # a few tokens that rounding left over
        if missing > 0 and found[index] < TAIL * mean:
            found[index], missing = found[index] + 1, missing - 1
    if missing:
        raise ValueError(f"{count} lengths with a mean of {mean} cannot be drawn")
    return found


def _clipped(value: float, mean: int) -> int:
    return max(1, min(TAIL * mean, int(value)))


def work(point: Record) -> tuple[list[int], list[int]]:
    """Prompt lengths and generated lengths of a point."""
    count = point["sequences"]
    if point["kind"] == "uniform":
        return [point["prompt"]] * count, [point["new"]] * count
    return lengths(count, point["prompt"], 1), lengths(count, point["new"], 2)


def run(point: Record) -> int:
    """One run, in this process; the record with the rows that were computed goes to stdout."""
    from h2o_flexgen import LLM, EvictionConfig, SamplingParams
    from h2o_flexgen.engine import engine
    from h2o_flexgen.engine.sampling.sampler import Sampler

    prompt_lengths, new = work(point)
    stop_at: dict[int, int] = {}
    row_steps = 0

    class Stopping(Sampler):
        """Makes the stop token the likeliest where a sequence is to end, and counts rows."""

        def step(self, rows: Any, logits: Any) -> Any:
            nonlocal row_steps
            row_steps += len(rows)
            for place, row in enumerate(rows):
                if not row.finished and stop_at.get(row.index) == len(row.token_ids) + 1:
                    logits[place, min(row.eos)] = logits[place].max() + 1
            return super().step(rows, logits)

    engine.Sampler = Stopping
    draw, places = Random(0), point["places"]
    eviction = EvictionConfig("h2o" if point["ratio"] < 1 else "full", ratio=point["ratio"])
    memory = {"weights": {"cpu": 1.0}, "cache": {"cpu": 1.0}, "hidden": {"cpu": 1.0}}
    policy = {"gpu_batch_size": places, "num_gpu_batches": 1, **memory}
    with LLM(point["model"], weights="dummy", dtype="bfloat16", eviction=eviction, policy=policy) as llm:
        vocabulary = llm.model.spec.vocab_size
        prompts = [[draw.randrange(4, vocabulary) for _ in range(length)] for length in prompt_lengths]
        llm.generate([prompt[:8] for prompt in prompts[:places]], max_new_tokens=2, ignore_eos=True)  # a warm-up
        row_steps = 0
        if point["kind"] == "unforeseen":
            stop_at.update(enumerate(new))
            params = [SamplingParams(max_new_tokens=max(new)) for _ in new]
        else:
            params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in new]
        outputs = llm.generate(prompts, params)
        record = llm.last_record.to_json()
    wrong = [output.index for output in outputs if len(output.token_ids) != new[output.index]]
    if wrong:
        raise RuntimeError(f"{len(wrong)} sequences have other lengths than drawn, the first is {wrong[0]}")
    print(json.dumps({**record, "row_steps": row_steps}))
    return 0


def speed(record: Record) -> float:
    """Generated tokens per second of the call: prefill, decode and what is between blocks; loading apart."""
    return float(record["generated_tokens"] / record["total_s"])


def ratios(records: list[Record], title: str, cache: str, kind: str) -> list[float]:
    """Speed of `kind` over that of uniform work, repetition by repetition."""
    own = [record for record in records if (record["title"], record["cache"]) == (title, cache)]
    by_kind = {name: {r["repetition"]: speed(r) for r in own if r["kind"] == name} for name in ("uniform", kind)}
    return [value / by_kind["uniform"][n] for n, value in sorted(by_kind[kind].items()) if n in by_kind["uniform"]]


def table(records: list[Record]) -> Iterator[str]:
    """Medians, in brackets least and most; ratios are medians of ratios."""
    yield "Generated tokens per second over the whole call but loading; medians, in brackets the least and the most."
    yield provenance(records)
    for title in dict.fromkeys(record["title"] for record in records):
        yield ""
        yield f"**{title}**"
        yield ""
        yield "| cache | lengths | tokens/s | against uniform, pair by pair | prefill s | decode s | rows per token |"
        yield "|---|---|---:|---:|---:|---:|---:|"
        for cache in CACHES:
            for kind in KINDS:
                rows = [r for r in records if (r["title"], r["cache"], r["kind"]) == (title, cache, kind)]
                if rows:
                    yield _line(records, title, rows)
    yield ""
    yield (
        f"Ragged lengths: lognormal (sigma {SIGMA}), clipped at {TAIL} means, the same sums. Known: every sequence "
        f"asks for its own length. Unforeseen: all ask for the most and end by a stop token. The goal is {GOAL:.0%} "
        "of uniform. Rows per token: decode rows and prompts that went through the model, 1 is the least."
    )


def _line(records: list[Record], title: str, rows: list[Record]) -> str:
    cache, kind = rows[0]["cache"], rows[0]["kind"]
    pairs = [] if kind == "uniform" else ratios(records, title, cache, kind)
    against = f"{spread(pairs, '.0%')}, n = {len(pairs)}" if pairs else ""
    seconds = [f"{median(row[key] for row in rows):.2f}" for key in ("prefill_s", "decode_s")]
    computed = median(row["row_steps"] / row["generated_tokens"] for row in rows)
    speeds = spread([speed(row) for row in rows])
    return f"| {NAMES[cache]} | {kind} | {speeds} | {against} | {' | '.join(seconds)} | {computed:.2f} |"


def picture(records: list[Record], path: Path) -> None:
    """The lengths of the newest work, and every pair's ratio."""
    from matplotlib.figure import Figure

    title = records[-1]["title"]
    point = next(record for record in reversed(records) if record["title"] == title)
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    prompts, new = work({**point, "kind": "known"})
    for values, color, name in ((prompts, "#1f5fa8", "prompt"), (new, "#e08e45", "generated")):
        left.plot(sorted(values, reverse=True), color=color, linewidth=1.8, label=f"{name} tokens")
        left.axhline(sum(values) / len(values), color=color, linestyle="--", linewidth=1)
    left.set(xlabel="sequences, longest first", ylabel="tokens", title="ragged lengths; dashed: uniform")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    groups = [(cache, kind) for cache in CACHES for kind in KINDS[1:]]
    for place, (cache, kind) in enumerate(groups):
        values = ratios(records, title, cache, kind)
        if values:
            right.plot([place] * len(values), values, "o", color="#c1121f", alpha=0.5, markersize=5)
            right.plot(place, median(values), "_", color="black", markersize=26, markeredgewidth=2)
    right.axhline(1, color="grey", linewidth=1)
    right.axhline(GOAL, color="grey", linestyle="--", linewidth=1)
    right.set_xticks(range(len(groups)), [f"{NAMES[cache]}\n{kind}" for cache, kind in groups], fontsize=9)
    right.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    right.set(ylim=(0, None), xlim=(-0.6, len(groups) - 0.4), title="speed against uniform; dashed: the goal")
    tidy(left, right)
    figure.suptitle(title, fontsize=11)
    save_picture(figure, path)


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, "ragged", 5, "pairs", takes_points=True)
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--sequences", type=int, default=192)
    parser.add_argument("--places", type=int, default=64, help="of the GPU batch (default: 64)")
    parser.add_argument("--prompt", type=int, default=32, help="mean prompt tokens (default: 32)")
    parser.add_argument("--new", type=int, default=32, help="mean generated tokens (default: 32)")
    parser.add_argument("--caches", default=",".join(CACHES), help="full, h2o or both (default)")
    args = parser.parse_args(argv)
    if args.run:
        return run(args.run)
    caches = between_commas(args.caches)
    if unknown := set(caches) - set(CACHES):
        parser.error(f"no cache is called {', '.join(sorted(unknown))}; there are {', '.join(CACHES)}")
    shape = {name: getattr(args, name) for name in ("model", "sequences", "places", "prompt", "new")}
    title = (
        f"{Path(args.model).name}, {args.sequences} sequences in {args.places} places, on average "
        f"{args.prompt}+{args.new} tokens"
    )
    points: list[Record] = [
        {"title": title, "cache": cache, "kind": kind, "ratio": CACHES[cache], **shape, "name": f"{cache}, {kind}"}
        for cache in caches
        for kind in KINDS
    ]
    return run_all(args, points, partial(in_process, "ragged"), "name", table, picture, "ragged.png")


if __name__ == "__main__":
    sys.exit(main())
