#!/usr/bin/env bash
# What others on the same cores cost: bench alone, beside one and two busy programs, and beside one that multiplies
# matrices by two OpenMP threads which spin while they wait.
#   scripts/shared_cores.sh [FLAGS OF h2o_flexgen.bench]...       e.g. --systems full,transformers --batch-size 8
# A machine that is quiet but for what the script starts, please: every record says how much of the cores others used. The
# same OUTPUT_DIR again adds what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-shared-cores}
busy='while True: pass'
spinner='import torch; a, b = torch.randn(256, 768), torch.randn(768, 3072)
while True: a @ b'
flags=("$@") others=()
trap 'kill "${others[@]}" 2>/dev/null || true' EXIT
beside() { # NAME OF THE FOLDER, THEN PROGRAMS
  local name=$1 program
  shift
  others=()
  for program; do
    OMP_WAIT_POLICY=active OMP_NUM_THREADS=2 python -c "$program" &
    others+=($!)
  done
  python -m h2o_flexgen.bench --systems full,transformers --model opt-125m --weights dummy --no-search --prompt-len 256 \
    --gen-len 128 "${flags[@]}" --output-dir "$out/$name" | sed '$d' # the last line is JSON: in summary.json
  kill "${others[@]}" 2>/dev/null || true
}
beside alone
beside one-busy "$busy"
beside two-busy "$busy" "$busy"
beside spinner "$spinner"
echo "records are in $out" >&2
