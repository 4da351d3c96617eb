"""What the engine saves on prompts: a prefix that all share computed once, and a long prompt taken in parts.

    python -m benchmarks.prompts shared [MODEL] [--hh-ratio 0.2] [--repetitions 3] [--output DIR]
    python -m benchmarks.prompts long [MODEL] [--repetitions 3] [--output DIR]

Random weights in bfloat16. `shared`: 64 prompts of 2,000 common and 32 own tokens, with the prefix computed once and 64
times, by two engines in one process that take turns. `long`: one prompt of 8,192 tokens in one part and in parts of
2,048 and 512, runs in turn, each in a process of its own. Prints a table of medians and ranges; records go to --output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from statistics import median

from benchmarks.records import arguments, engine, repeat, report, run_json
from h2o_flexgen.baselines.store import Record, RecordFile

PARTS = (8192, 2048, 512)
MODELS = {"shared": "opt-125m", "long": "qwen2.5-0.5b"}


def shared(model: str, ratio: float, repetitions: int) -> Iterator[Record]:
    """Records of runs with the prefix computed once and for each prompt, after one of each that does not count."""
    from h2o_flexgen import LLM, EvictionConfig

    draw = Random(0)
    header = [draw.randrange(4, 30000) for _ in range(2000)]
    prompts = [header + [draw.randrange(4, 30000) for _ in range(32)] for _ in range(64)]
    shape, eviction = {"gpu_batch_size": 32, "num_gpu_batches": 2}, EvictionConfig("h2o", ratio=ratio)
    with ExitStack() as stack:
        engines = {
            share: stack.enter_context(
                LLM(model, weights="dummy", dtype="bfloat16", policy=shape, eviction=eviction, share_prefixes=share)
            )
            for share in (True, False)
        }
        for repetition in range(repetitions + 1):
            for share, llm in engines.items():
                llm.generate(prompts, max_new_tokens=16, ignore_eos=True)
                if repetition > 0:  # the first touches the memory of the caches
                    yield {"share_prefixes": share, **llm.last_record.to_json()}


def shared_table(records: list[Record]) -> Iterator[str]:
    """A row for each way, of the runs of all models and budgets that are there."""
    yield "| 64 prompts of 2,000 + 32 tokens, 16 new, bfloat16 | prompt tokens computed | prefill | end to end |"
    yield "|---|---:|---:|---:|"
    for model, budget in dict.fromkeys((record["model"], record["eviction"]["budget"]) for record in records):
        for share, label in ((True, "prefix computed once"), (False, "each prompt on its own")):
            rows = [r for r in records if (r["model"], r["eviction"]["budget"]) == (model, budget)]
            rows = [row for row in rows if row["share_prefixes"] == share]
            spans = [_seconds([row[key] for row in rows], ".2f") for key in ("prefill_s", "total_s")]
            kept = f"KV {rows[0]['eviction'].get('share_of_sequence', 1):.0%}"
            computed = f"{rows[0]['computed_prompt_tokens']:,}"
            yield f"| {model}, {kept}, {label} | {computed} | {' | '.join(spans)} |"


def long_table(records: list[Record]) -> Iterator[str]:
    """A row for each number of tokens in a part."""
    yield f"| one prompt of 8,192 tokens through {records[-1]['model']}, bfloat16 | prefill | peak of the process |"
    yield "|---|---:|---:|"
    for part in PARTS:
        rows = [record for record in records if record["policy"]["prefill_chunk"] == part]
        if rows:
            peak = median(row["peak_bytes"]["rss"] for row in rows) / 2**30
            label = "one part" if part == PARTS[0] else f"parts of {part:,}"
            yield f"| {label} | {_seconds([row['prefill_s'] for row in rows], '.1f')} | {peak:.2f} GiB |"


def _seconds(values: list[float], form: str) -> str:
    return f"{median(values):{form}} s ({min(values):{form}} to {max(values):{form}})"


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, "prompts", 3)
    parser.add_argument("what", choices=MODELS)
    parser.add_argument("model", nargs="?", help=f"defaults: {MODELS}")
    parser.add_argument("--hh-ratio", type=float, default=0.2)
    args = parser.parse_args(argv)
    model, store, failed = args.model or MODELS[args.what], RecordFile.open(args.output.resolve()), 0
    if args.what == "shared":
        for record in shared(model, args.hh_ratio, args.repetitions):
            store.add(record)
    else:
        work = ["--model", model, "--hh-ratio", args.hh_ratio, "--num-prompts", 1, "--prompt-len", 8192, "--gen-len", 8]
        points: list[Record] = [{"name": f"{model}, parts of {part}", "part": part} for part in PARTS]
        flags = [*work, "--prefill-chunk"]
        failed = repeat(
            store, points, args.repetitions, lambda point: run_json(engine([*flags, point["part"]])), "name"
        )
    report(store, shared_table if args.what == "shared" else long_table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
