#!/usr/bin/env bash
# How speed changes with batch, GPU batches with weights on disk, prompt, generated length and KV budget, and time per
# step and memory along 16,384 generated tokens at a fixed budget: benchmarks/scaling.py says how.
#   scripts/scaling.sh [--panels batch,stream,prompt,generated,budget,long] [--repetitions 3] [--output DIR] [--quick]
# Random weights, bfloat16, a process per run. Most of an hour on two cores, --quick two minutes. A quiet machine,
# please: the load average is in every record. A second call with the same --output adds what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.scaling "$@"
