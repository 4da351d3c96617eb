#!/usr/bin/env bash
# All of tests/engine/test_guarantees.py: with one thread and with two, on kernels of AVX2 (on ARM of NEON without dot
# products) and on the processor's best, whose tokens must be the same. Each of the four takes seven to ten minutes of one
# core. Where AVX2 is the best, AVX-512 is emulated if simde is there, in its place. Arguments go to pytest:
# ./scripts/guarantees.sh -k llama
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
tokens=$(mktemp -u)
trap 'rm -f "$tokens"' EXIT
best=H2O_FLEXGEN_KERNELS=native
if ! grep -Eq "avx512_vnni|avx_vnni" /proc/cpuinfo &&
  python -c "from tests.kernels import emulated; exit(emulated.why_not())"; then
  best=H2O_TEST_KERNELS=avx512
fi
least=avx2
[ "$(uname -m)" != aarch64 ] || least=neon
for kernels in "$best" H2O_FLEXGEN_KERNELS=$least; do
  for threads in 1 2; do
    echo "$kernels, threads: $threads"
    env "$kernels" OMP_NUM_THREADS=$threads \
      python -m pytest tests/engine/test_guarantees.py --whole --tokens "$tokens" "$@"
  done
done
