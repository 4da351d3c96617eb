#!/usr/bin/env bash
# What others on the same cores cost: prefill and decode beside busy programs, over their speed alone, of this engine and
# of transformers: benchmarks/shared_cores.py says how.
#   scripts/shared_cores.sh [--shapes opt-125m:1,llama-1.1b:8] [--systems full,transformers] [--repetitions 3] [--output DIR]
# Random weights, bfloat16 (--dtype float32 where the processor has none), a process per run; an hour on two cores. A
# machine that is quiet but for what the script starts, please: runs that were to be alone and were not are left out, and
# named. A second call with the same --output adds what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.shared_cores "$@"
