#!/usr/bin/env bash
# The tests as other processors would run them: each setting twice, every run with inputs of its own.
# Arguments go to pytest: ./scripts/any_cpu.sh tests/kernels. Writes $OUTPUT (results/any-cpu.md). SEED is that of the
# first run; a run is repeated by `SETTING H2O_FLEXGEN_TEST_SEED=N ./scripts/test.sh`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
OUTPUT=${OUTPUT:-results/any-cpu.md}
seed=${SEED:-1}
settings=(
  OPENBLAS_CORETYPE=Haswell OPENBLAS_CORETYPE=SkylakeX OPENBLAS_CORETYPE=Zen # numpy's products
  MKL_CBWR=COMPATIBLE                                                       # torch's products
  ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2                      # torch's other kernels
  H2O_FLEXGEN_NATIVE=0 OMP_NUM_THREADS=1 OMP_NUM_THREADS=2
)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0

row() { echo "| $1 | $2 | $3 |" | tee -a "$OUTPUT"; }

processor=$(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -1)
flags=$(grep -m1 ^flags /proc/cpuinfo | grep -oE '\b(avx2|avx512f|avx512_bf16|amx_bf16)\b' | paste -sd ' ' || true)
cat >"$OUTPUT" <<END
# The tests under other settings
By \`scripts/any_cpu.sh $*\`, $(date -u +%F), commit $(git rev-parse --short HEAD), ${processor:-?} (${flags:-none of avx2, avx512f}).

| setting | seed | result |
| --- | --- | --- |
END
sed -n '4,5p' "$OUTPUT"
for setting in "${settings[@]}"; do
  if ! (env "$setting" python -c 'import numpy, torch; x = numpy.ones((99, 99), "f"); x @ x; torch.tensor(x) @ x' 2>&1
  ) >"$log"; then
    row "$setting" - "left out: this processor has not the instructions for it"
    continue
  fi
  for _ in 1 2; do
    env "$setting" H2O_FLEXGEN_TEST_SEED=$seed python -m pytest -n 2 -m "not gpu" "$@" >"$log" 2>&1 || failed=1
    row "$setting" $seed "$(tail -1 "$log")"
    grep -E '^(FAILED|ERROR)' "$log" | sed 's/^/- /' || true
    seed=$((seed + 1))
  done
done
exit $failed
