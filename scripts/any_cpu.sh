#!/usr/bin/env bash
# The tests as other processors would run them: six runs, each setting of OpenBLAS, MKL, torch, threads and our kernels in
# at least two of them, every run with inputs of its own. OPENBLAS_CORETYPE is of numpy's products, MKL_CBWR of torch's,
# ATEN_CPU_CAPABILITY of torch's other kernels; a setting that this processor cannot bear is left out.
#   scripts/any_cpu.sh [ARGUMENTS OF scripts/test.sh]...       e.g. tests/kernels; RUNS="1 4" for some of them
# Six times what ./scripts/test.sh takes. results/any-cpu.md has what runs of 2026-11-23 found.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
probe='import numpy, torch; x = numpy.ones((99, 99), "f"); x @ x; torch.tensor(x) @ x'
run=0 code=0
while read -r settings; do
  run=$((run + 1)) used=(H2O_TEST_SEED=$run)
  [[ " ${RUNS:-1 2 3 4 5 6} " = *" $run "* ]] || continue
  for setting in $settings; do
    if env "$setting" python -c "$probe" </dev/null 2>&1; then used+=("$setting"); fi
  done
  echo "run $run: ${used[*]}"
  env "${used[@]}" scripts/test.sh "$@" </dev/null || { code=$? && echo "run $run failed: ${used[*]}"; }
done <<'SETTINGS'
OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1
OPENBLAS_CORETYPE=SkylakeX ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2
OPENBLAS_CORETYPE=Zen MKL_CBWR=COMPATIBLE H2O_FLEXGEN_NATIVE=0 OMP_NUM_THREADS=1
OPENBLAS_CORETYPE=Zen ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2
OPENBLAS_CORETYPE=Haswell MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1
OPENBLAS_CORETYPE=SkylakeX H2O_FLEXGEN_NATIVE=0 OMP_NUM_THREADS=2
SETTINGS
exit "$code"
