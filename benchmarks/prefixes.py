"""What a store of prefixes saves a job: prompt tokens computed, FLOPs and seconds of prefill.

    python -m benchmarks.prefixes --requests 10000 --headers 50 --output results/local/prefixes.jsonl

Requests in any order over headers of 64 to 512 tokens, on the demo model: without a store, with an empty one, and by an
engine that finds the files that the run before left on disk.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import facts, print_record
from h2o_flexgen import LLM, EvictionConfig, SamplingParams
from h2o_flexgen.cache.prefix_store import GRAIN

WINDOW = 8192
"""Requests that a job reads at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--headers", type=int, default=50)
    parser.add_argument("--output", type=Path, help="append the record here")
    args = parser.parse_args()
    command = ["python", "-m", "benchmarks.prefixes", "--requests", str(args.requests)]
    print_record({"what": "job", **facts(command), **job(args.requests, args.headers)}, args.output)


def job(requests: int, headers: int) -> dict[str, Any]:
    """Prompt tokens computed, FLOPs predicted and counted, seconds of prefill; the same tokens each time."""
    source = random.Random(0)
    tops = [[source.randrange(4, 4096) for _ in range(source.randrange(64, 512))] for _ in range(headers)]
    chosen = [source.randrange(headers) for _ in range(requests)]
    own = [[source.randrange(4, 4096) for _ in range(source.randrange(8, 40))] for _ in range(requests)]
    prompts = [tops[header] + tail for header, tail in zip(chosen, own, strict=True)]
    found: dict[str, Any] = {"prompt_tokens": sum(map(len, prompts))}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, dict[str, Any]] = {"none": {}, "empty": {"prefix_dir": folder}, "warm": {"prefix_dir": folder}}
        for name, settings in runs.items():
            found[name] = _run(prompts, settings)
    found["same_tokens"] = len({each.pop("answers") for each in (found["none"], found["empty"], found["warm"])}) == 1
    kept = [len(top) // GRAIN * GRAIN for top in tops]
    used = sorted(set(chosen))
    rests = [(len(prompt) - kept[header], kept[header]) for prompt, header in zip(prompts, chosen, strict=True)]
    found["empty"]["predicted_flops"] = _flops([*((kept[header], 0) for header in used), *rests], requests)
    found["warm"]["predicted_flops"] = _flops(rests, requests)
    return found


def _run(prompts: list[list[int]], settings: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    with LLM("demo", dtype="float32", eviction=EvictionConfig("h2o", ratio=0.2), **settings) as llm:
        answers, flops, computed, seconds, started = list[Any](), 0, 0, 0.0, time.monotonic()
        for at in range(0, len(prompts), WINDOW):
            answers += [tuple(output.token_ids) for output in llm.generate(prompts[at : at + WINDOW], params)]
            assert llm.last_record is not None
            flops += llm.last_record.flops
            computed += llm.last_record.computed_prompt_tokens or 0
            seconds += llm.last_record.prefill_s
        counts = {} if llm.prefixes is None else vars(llm.prefixes.counts)
    whole = time.monotonic() - started
    made = {"computed": computed, "flops": flops, "prefill_s": seconds, "seconds": whole, "answers": tuple(answers)}
    return {**made, **counts}


def _flops(parts: Sequence[tuple[int, int]], rows: int) -> int:
    """Of the demo model's prefill: of (tokens, tokens before them) that go through it, and `rows` last tokens."""
    layers, width, inner, vocabulary = 6, 256, 1024, 4096
    tokens = sum(own for own, _ in parts)
    pairs = sum(own * (own + before) for own, before in parts)
    products = 8 * width**2 * layers * tokens + 4 * width * inner * ((layers - 1) * tokens + rows)
    return products + 4 * width * layers * pairs + 2 * width * vocabulary * rows


if __name__ == "__main__":
    main()
