#!/usr/bin/env bash
# All of tests/engine/test_guarantees.py: with one thread and with two, on kernels of AVX2 and on the processor's best,
# whose tokens must be the same. Each of the four takes seven minutes of one core. Arguments go to pytest:
# ./scripts/guarantees.sh -k llama
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
tokens=$(mktemp -u)
trap 'rm -f "$tokens"' EXIT
for kernels in native avx2; do
  for threads in 1 2; do
    echo "kernels: $kernels, threads: $threads"
    OMP_NUM_THREADS=$threads H2O_FLEXGEN_KERNELS=$kernels \
      python -m pytest tests/engine/test_guarantees.py --whole --tokens "$tokens" "$@"
  done
done
