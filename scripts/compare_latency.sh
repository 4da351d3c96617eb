#!/usr/bin/env bash
# Seconds of prefill and decode at equal batch, one sequence and eight: OPT-125M, random weights, bfloat16, 512+64.
#   scripts/compare_latency.sh [FLAGS OF h2o_flexgen.bench]...         e.g. --model opt-1.3b --repetitions 3
# BATCHES, SYSTEMS and OUTPUT_DIR choose otherwise. Peers need scripts/peer_env.sh all, once; those that are not there
# are listed as such. Half an hour or so, in pieces if need be: the same OUTPUT_DIR again adds what is missing in it. A
# quiet machine, please: the load average goes into the records.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-latency}
for batch in ${BATCHES:-1 8}; do
  python -m h2o_flexgen.bench --systems "${SYSTEMS:-h2o,full,transformers,accelerate,flexgen,deepspeed,kvpress}" \
    --model opt-125m --dtype bfloat16 --hh-ratio 0.2 --prompt-len 512 --gen-len 64 --repetitions 5 "$@" \
    --batch-size "$batch" --output-dir "$out/b$batch" | sed '$d' # the last line is JSON: in summary.json
  echo
done
echo "records are in $out" >&2
