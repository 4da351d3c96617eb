#!/usr/bin/env bash
# How close prefill comes to the rate of matrix products, measured right before and after it: benchmarks/prefill_rate.py.
#   scripts/prefill_rate.sh [--repetitions 3] [--rounds 3] [--only 1,2] [--output DIR]
# OPT shapes, random weights, bfloat16; a process per run, about three minutes per repetition. A quiet machine, please: the
# load average is in every record. A second call with the same --output adds what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.prefill_rate "$@"
