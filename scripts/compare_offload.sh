#!/usr/bin/env bash
# A model larger than memory: OPT-6.7B's shape, random weights, all 13.3 GB of them on disk, under a memory cap.
#   scripts/compare_offload.sh [FLAGS OF h2o_flexgen.run]...           e.g. --hh-ratio 0.2
# The weights are packed once, in OFFLOAD_DIR, and found there by later runs. Says whether the run stayed within the cap,
# page cache included, and whether it read as many bytes as its plan has. Needs root (scripts/memcap.sh) and 15 GB of disk.
# Other sizes: MODEL=opt-13b LIMIT=8G BATCH=16 PROMPT_LEN=128 GEN_LEN=16 OFFLOAD_DIR=/data/offload scripts/compare_offload.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
model=${MODEL:-opt-6.7b} limit=${LIMIT:-6G} batch=${BATCH:-8}
offload=${OFFLOAD_DIR:-$HOME/.cache/h2o_flexgen/offload}
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-offload-$model}
mkdir -p "$offload" "$out"

# All weights on disk, KV cache and hidden states in memory: then every step reads the whole model.
scripts/memcap.sh "$limit" --cold "$offload" --report "$out/memcap.json" -- \
  python -m h2o_flexgen.run --model "$model" --weights dummy --dtype bfloat16 --offload-dir "$offload" \
  --percent 0 0 0 100 0 100 --gpu-batch-size "$batch" --num-gpu-batches "${NUM_BATCHES:-1}" \
  --prompt-len "${PROMPT_LEN:-128}" --gen-len "${GEN_LEN:-8}" "$@" | tail -n 1 >"$out/record.json"

echo "records are in $out" >&2
python -m h2o_flexgen.baselines.offload_check "$out/record.json" "$out/memcap.json"
