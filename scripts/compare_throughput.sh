#!/usr/bin/env bash
# The H2O paper's throughput table at this machine's size: OPT-125M and 1.3B, 512-token prompts, every system at its
# best batch (searched by short runs) and at a common one. Random weights, bfloat16.
#   scripts/compare_throughput.sh [FLAGS OF h2o_flexgen.bench]...      e.g. --cpu-mem 8 --search-time 300
# MODELS, GEN_LENS, SYSTEMS and OUTPUT_DIR choose otherwise. Peers need scripts/peer_env.sh all, once; those that are
# not there are listed as such. Hours for all of it, in pieces if need be: the same OUTPUT_DIR again adds what is missing
# in it, --repetitions 5 two more to three. A quiet machine, please: the load average goes into the records.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-throughput}
for model in ${MODELS:-opt-125m opt-1.3b}; do
  for gen_len in ${GEN_LENS:-32 128}; do
    python -m h2o_flexgen.bench --systems "${SYSTEMS:-h2o,full,transformers,accelerate,flexgen,deepspeed,kvpress}" \
      --model "$model" --dtype bfloat16 --hh-ratio 0.2 --prompt-len 512 --gen-len "$gen_len" --batch-size auto \
      --repetitions 3 "$@" --output-dir "$out/$model-512+$gen_len" | sed '$d' # the last line is JSON: in summary.json
    echo
  done
done
echo "records are in $out" >&2
