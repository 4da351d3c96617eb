#!/usr/bin/env bash
# A model larger than memory: OPT-6.7B's shape, random weights, 13.3 GB of them, under a 6 GiB memory cap.
#   scripts/compare_offload.sh [FLAGS]...       that h2o_flexgen.run and h2o_flexgen.bench both have: --hh-ratio 0.2
# First this engine alone with all weights on disk: did the run stay within the cap, page cache included, and read as
# many bytes as its plan has? Then every system beside it within the same cap, each placing weights as it sees fit, with
# a cold page cache. Needs root (scripts/memcap.sh), 15 GB of disk, four times that with the peers (scripts/peer_env.sh
# all), and most of an hour. What systems write once, later runs find in OFFLOAD_DIR. SYSTEMS= (empty): no comparison.
# Other sizes:
# MODEL=opt-13b LIMIT=8G BATCH=16 PROMPT_LEN=128 GEN_LEN=16 OFFLOAD_DIR=/data/offload scripts/compare_offload.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
model=${MODEL:-opt-6.7b} limit=${LIMIT:-6G} batch=${BATCH:-8} prompt_len=${PROMPT_LEN:-128} gen_len=${GEN_LEN:-8}
systems=${SYSTEMS-h2o,full,transformers,accelerate,flexgen,deepspeed,kvpress}
offload=${OFFLOAD_DIR:-$HOME/.cache/h2o_flexgen/offload}
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-offload-$model}
mkdir -p "$offload" "$out"

# All weights on disk, KV cache and hidden states in memory: then every step reads the whole model.
scripts/memcap.sh "$limit" --cold "$offload" --report "$out/memcap.json" -- \
  python -m h2o_flexgen.run --model "$model" --weights dummy --dtype bfloat16 --offload-dir "$offload" \
  --percent 0 0 0 100 0 100 --gpu-batch-size "$batch" --num-gpu-batches "${NUM_BATCHES:-1}" \
  --prompt-len "$prompt_len" --gen-len "$gen_len" "$@" | tail -n 1 >"$out/record.json"
python -m h2o_flexgen.baselines.offload_check "$out/record.json" "$out/memcap.json" && good=0 || good=$?

if [ -n "$systems" ]; then
  echo
  python -m h2o_flexgen.bench --systems "$systems" --model "$model" --weights dummy --dtype bfloat16 \
    --cpu-mem "$limit" --batch-size "$batch" --prompt-len "$prompt_len" --gen-len "$gen_len" \
    --repetitions "${REPETITIONS:-1}" --scratch-dir "$offload/bench" "$@" --output-dir "$out/systems" | sed '$d' # the last line is JSON: in summary.json
fi
echo "records are in $out" >&2
exit "$good"
