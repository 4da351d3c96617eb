#!/usr/bin/env bash
# What a prefix that all prompts share costs: 64 prompts of 2,000 common and 32 own tokens, computed once or 64 times.
#   scripts/shared_prefix.sh [MODEL] [HH_RATIO] [REPETITIONS]      opt-125m (context 2,048), 0.2; random weights, bfloat16
# Interleaved runs on one set of prompts; prints a table of medians and ranges, the records go to OUTPUT_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.prompts shared "${1:-opt-125m}" --hh-ratio "${2:-0.2}" --repetitions "${3:-3}" \
  --output "${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-shared-prefix}"
