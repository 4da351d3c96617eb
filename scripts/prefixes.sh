#!/usr/bin/env bash
# What a store of prefixes saves a job: 10,000 prompts in any order over 50 headers of 64 to 511 tokens, one new token
# each, on the demo model: without a store, with an empty one, and with the files that the run before left on disk.
#   scripts/prefixes.sh [PROMPTS] [HEADERS]        prompt tokens computed, prefill and decode; the records go to OUTPUT_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-prefixes}
mkdir -p "$out"
python -c 'import json, random, sys
prompts, headers = map(int, sys.argv[1:])
random.seed(0)
ids = lambda least, most: [random.randrange(4, 4096) for _ in range(random.randrange(least, most))]
tops = [ids(64, 512) for _ in range(headers)]
for _ in range(prompts): print(json.dumps({"prompt": random.choice(tops) + ids(8, 40)}))' \
  "${1:-10000}" "${2:-50}" >"$out/prompts.jsonl"
store=$(mktemp -d)
trap 'rm -rf "$store"' EXIT
run="--model demo --weights checkpoint --dtype float32 --hh-ratio 0.2 --gen-len 1 --ignore-eos --prompts $out/prompts.jsonl"
for each in "" " --prefix-dir $store"; do # the second time the store is empty at first, and then full
  python -m benchmarks.runs --output "$out" --repetitions "$([ -z "$each" ] && echo 1 || echo 2)" --flags "$run$each"
done
