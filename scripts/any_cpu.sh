#!/usr/bin/env bash
# The tests as other processors would run them: six runs, each setting of OpenBLAS, MKL, torch, threads and our kernels in
# at least two of them, every run with inputs of its own. Writes results/any-cpu.jsonl, a line per run and folder, and
# sums them up in results/any-cpu.md. Goes on where it was interrupted.
#   scripts/any_cpu.sh [--also COMMIT] [--seed 1] [--workers 2] [tests/kernels ...]
# --also counts records of an earlier commit as done. RUNNER="nice -n 9" is put before each piece's command.
# Six times what ./scripts/test.sh takes.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.any_cpu "$@"
