#!/usr/bin/env bash
# What a prefix that all prompts share costs: 64 prompts of 2,000 common and 32 own tokens, computed once or 64 times.
#   scripts/shared_prefix.sh [MODEL] [HH_RATIO] [REPETITIONS]      opt-125m (context 2,048), 0.2; random weights, bfloat16
# Interleaved runs on one set of prompts; prints a table of medians and ranges, the records go to OUTPUT_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-shared-prefix}
mkdir -p "$out"
python - "${1:-opt-125m}" "${2:-0.2}" "${3:-3}" "$out" <<'PYTHON'
import json, random, sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from h2o_flexgen import LLM, EvictionConfig

model, ratio, repetitions, out = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
draw = random.Random(0)
tokens = lambda n: [draw.randrange(4, 30000) for _ in range(n)]
header = tokens(2000)
prompts = [header + tokens(32) for _ in range(64)]
shape, work = {"gpu_batch_size": 32, "num_gpu_batches": 2}, {"max_new_tokens": 16, "ignore_eos": True}
settings = {"weights": "dummy", "dtype": "bfloat16", "policy": shape, "eviction": EvictionConfig("h2o", ratio=ratio)}
with ExitStack() as stack:
    engines = {share: stack.enter_context(LLM(model, share_prefixes=share, **settings)) for share in (True, False)}
    for llm in engines.values():
        llm.generate(prompts, **work)  # the memory of the caches is touched for the first time
    records = {share: [] for share in engines}
    for _ in range(repetitions):
        for share, llm in engines.items():
            llm.generate(prompts, **work)
            records[share].append(llm.last_record.to_json())
print(f"| {model}, 64 prompts of 2,000 + 32 tokens, 16 new, bfloat16 | prompt tokens computed | prefill | end to end |")
print("|---|---:|---:|---:|")
for share, rows in records.items():
    spans = []
    for key in ("prefill_s", "total_s"):
        seconds = [row[key] for row in rows]
        spans.append(f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
    label = "prefix computed once" if share else "each prompt on its own"
    print(f"| KV {ratio:.0%}, {label} | {rows[0]['computed_prompt_tokens']:,} | {' | '.join(spans)} |")
rows = [{"share_prefixes": share, **row} for share, runs in records.items() for row in runs]
(out / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
PYTHON
echo "records: $out/records.jsonl" >&2
