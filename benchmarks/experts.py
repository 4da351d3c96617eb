"""How fast is a mixture of experts at each size of block, and how near are predictions? Random weights.

    python -m benchmarks.experts --work 1:64+32,8:64+32,32:64+32,128:64+32
    python -m benchmarks.experts --work 128:16+16,128:16+16:32x1,128:16+16:64x1,128:16+16:64x2,128:16+16:128x1
    python -m benchmarks.experts --model qwen3-30b-a3b --cpu-mem 20GiB --work 64:32+16:64x1

A word of --work is SEQUENCES:PROMPT+NEW, by the plan that the search chooses, or with :ROWSxBATCHES of that block. One
process loads the weights once and does all of --work in order, behind a warm-up of two sequences. Where the machine is
calibrated for the model (python -m h2o_flexgen.calibrate --model M --weight-bits B), predictions stand beside what was
measured, and the last column has the rows that an expert computed at once in decode, if all are chosen alike often.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.records import arguments, in_process, provenance, run_all, spread
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.cli.prompts import random_prompts
from h2o_flexgen.errors import UsageError

KEPT = ("policy", "experts", "prefill_s", "decode_s", "load_s", "peak_bytes", "bytes_moved")
RATES = ("prefill", "decode", "gen")
_WORD = re.compile(r"(\d+):(\d+)\+(\d+)(?::(\d+)x(\d+))?")


def parsed(word: str) -> dict[str, Any]:
    """The sequences, lengths and policy of a word of --work. UsageError for another."""
    found = _WORD.fullmatch(word)
    if found is None:
        raise UsageError(f"--work has {word!r}", "needed SEQUENCES:PROMPT+NEW or SEQUENCES:PROMPT+NEW:ROWSxBATCHES")
    sequences, prompt, new, rows, batches = (None if text is None else int(text) for text in found.groups())
    policy = "auto" if rows is None else {"gpu_batch_size": rows, "num_gpu_batches": batches}
    return {"sequences": sequences, "prompt": prompt, "new": new, "policy": policy}


def run(point: Record) -> int:
    """All of one process's work; the record goes to stdout."""
    from h2o_flexgen import LLM

    with LLM(
        point["model"], weights="dummy", dtype="bfloat16", weight_bits=point["bits"], cpu_mem=point["cpu_mem"]
    ) as llm:
        vocabulary, runs = llm.model.spec.vocab_size, []
        llm.generate(random_prompts(2, 8, vocabulary, 0), max_new_tokens=2, ignore_eos=True)
        for word in point["work"]:
            work = parsed(word)
            llm.config = replace(llm.config, policy=work["policy"])
            prompts = random_prompts(work["sequences"], work["prompt"], vocabulary, 0)
            llm.generate(prompts, max_new_tokens=work["new"], ignore_eos=True)
            record = llm.last_record.to_json() if llm.last_record else {}
            keys = (*KEPT, *(f"{rate}_throughput" for rate in RATES))
            runs.append({"work": word, **{key: record[key] for key in keys}, "predicted": record["predicted"] or {}})
            print(f"{word}: {record['gen_throughput']:.4g} tokens/s", file=sys.stderr, flush=True)
    print(json.dumps({"runs": runs}))
    return 0


def table(records: list[Record]) -> Iterator[str]:
    """A row for each word of --work and bits (what a checkpoint has in MXFP4 stays so); errors are of generated tokens
    per second, over all runs."""
    runs: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        for each in record["runs"]:
            runs.setdefault((record["model"], record["bits"], each["work"]), []).append(each)
    errors = []
    yield "| model | bits | work | block | prefill tokens/s | decode | generated | predicted | rows an expert |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|"
    for (model, bits, word), found in runs.items():
        last = found[-1]
        block, experts = last["policy"], last["experts"]
        size = block["gpu_batch_size"] * block["num_gpu_batches"]
        cells = [spread([each[f"{key}_throughput"] for each in found]) for key in RATES]
        guesses = [each["predicted"]["gen_throughput"] for each in found if each["predicted"]]
        measured = median(each["gen_throughput"] for each in found)
        said = ""
        if guesses:
            errors.append(median(guesses) / measured - 1)
            said = f"{median(guesses):.3g} ({errors[-1]:+.0%})"
        rows = size * experts["active"] / experts["count"]
        shape = f"{block['gpu_batch_size']} x {block['num_gpu_batches']}"
        yield f"| {model} | {bits} | {word} | {shape} | {' | '.join(cells)} | {said} | {rows:.3g} |"
    if errors:
        worst = max(errors, key=abs)
        yield ""
        yield f"Predictions of {len(errors)} settings: median error {median(map(abs, errors)):.0%}, worst {worst:+.0%}."
    yield from ("", provenance(records))


def main() -> int:
    parser = arguments(__doc__, "experts", 1, "processes", takes_points=True)
    parser.add_argument("--model", default="olmoe-1b-7b", help="a mixture of configs/models")
    parser.add_argument("--weight-bits", type=int, default=4, help="16, 8 or 4")
    parser.add_argument("--cpu-mem", help="host memory of the engine (default: what is free)")
    parser.add_argument("--work", default="1:64+32,8:64+32,32:64+32", help="with commas between")
    args = parser.parse_args()
    if args.run:
        return run(args.run)
    words = args.work.split(",")
    try:
        for word in words:
            parsed(word)
    except UsageError as error:
        parser.error(str(error))
    point = {"model": args.model, "bits": args.weight_bits, "cpu_mem": args.cpu_mem, "work": words}
    return run_all(args, [point], partial(in_process, "experts"), "model", table)


if __name__ == "__main__":
    sys.exit(main())
