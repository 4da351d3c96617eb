#!/usr/bin/env bash
# What parts of a long prompt save: one prompt of 8,192 tokens, 8 new ones, in one part and in parts of 2,048 and 512.
#   scripts/long_prompt.sh [MODEL] [REPETITIONS]             qwen2.5-0.5b, 3; random weights, bfloat16, H2O at 20 %
# Interleaved runs, each in a process of its own; prints a table of medians and ranges, the records go to OUTPUT_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.runs --vary prefill-chunk=8192,2048,512 --repetitions "${2:-3}" \
  --flags "--model ${1:-qwen2.5-0.5b} --hh-ratio 0.2 --num-prompts 1 --prompt-len 8192 --gen-len 8" \
  --output "${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-long-prompt}"
