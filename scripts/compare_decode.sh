#!/usr/bin/env bash
# Decode and end-to-end speed beside transformers at equal batch: OPT-125M, random weights, bfloat16, 512+64 tokens.
#   scripts/compare_decode.sh [FLAGS OF h2o_flexgen.bench]...          e.g. --repetitions 3 --hh-ratio 0.1
# Batches of 32 and 8 (BATCHES="8" for one of them). The same OUTPUT_DIR again adds what is missing in it, repetition by
# repetition. Quiet machine, please: the load average goes into the records.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-decode}
for batch in ${BATCHES:-32 8}; do
  python -m h2o_flexgen.bench --systems h2o,full,transformers --model opt-125m --dtype bfloat16 --hh-ratio 0.2 \
    --prompt-len 512 --gen-len 64 --repetitions 5 --reference transformers "$@" --batch-size "$batch" \
    --output-dir "$out/b$batch"
done
