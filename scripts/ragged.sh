#!/usr/bin/env bash
# What unequal lengths cost: the same tokens in uniform and in long-tailed sequences, lengths known or not beforehand.
#   scripts/ragged.sh [--repetitions 5] [--caches full,h2o] [--sequences 192] [--places 64] [--output DIR]
# OPT-125M's shape, random weights, bfloat16; a process per run, a minute and a half per repetition. A quiet machine,
# please: the load average is in every record. A second call with the same --output adds what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.ragged "$@"
