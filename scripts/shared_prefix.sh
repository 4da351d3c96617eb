#!/usr/bin/env bash
# What a prefix that all prompts share costs: 64 prompts of 2,000 common and 32 own tokens, computed once or 64 times.
#   scripts/shared_prefix.sh [MODEL] [HH_RATIO] [REPETITIONS]      opt-125m (context 2,048), 0.2; random weights, bfloat16
# Interleaved runs on one set of prompts; prints a table of medians and ranges, the records go to OUTPUT_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-shared-prefix}
mkdir -p "$out"
python -c 'import json, random
ids = lambda count: [random.randrange(4, 30000) for _ in range(count)]
random.seed(0)
header = ids(2000)
for _ in range(64): print(json.dumps({"prompt": header + ids(32)}))' >"$out/prompts.jsonl"
exec python -m benchmarks.runs --vary share-prefixes=true,false --repetitions "${3:-3}" --output "$out" \
  --flags "--model ${1:-opt-125m} --hh-ratio ${2:-0.2} --prompts $out/prompts.jsonl --gen-len 16 --ignore-eos
  --gpu-batch-size 32 --num-gpu-batches 2"
