#!/usr/bin/env bash
# A model larger than memory: OPT-6.7B's shape, random weights, 13.3 GB of them, under a 6 GiB memory cap.
#   scripts/compare_offload.sh [FLAGS OF h2o_flexgen.bench]...         e.g. --repetitions 3 --search-time 300
# First this engine alone with all weights on disk: its peak, page cache included, and the bytes that it reads (CHECK=
# leaves it out). Then every system within the same cap, each at its best batch and
# placing weights as it sees fit, ours by its search, with a cold page cache: a long prompt with a short answer, 128+32
# tokens, and a short one with a long answer, 16+128 (PROMPT_LEN and GEN_LEN for one of your own). BATCHES is auto
# (doubling while that pays) or a list to try, by runs of SEARCH_TOKENS tokens; what is known from before is given by
# BATCHES=48 and the flag --batch-of h2o=128.
# Needs root (scripts/memcap.sh), 15 GB of disk, four times that with the peers (scripts/peer_env.sh all). SYSTEMS=
# (empty): no comparison. What systems write once, later runs find in OFFLOAD_DIR. Hours for all of it, in pieces: the
# same OUTPUT_DIR again goes on after the last run that ended, and adds repetitions. One piece, and other sizes:
# OUTPUT_DIR=results/offload SYSTEMS=h2o,accelerate PROMPT_LEN=128 GEN_LEN=32 BATCHES=16,64 scripts/compare_offload.sh
# MODEL=opt-13b LIMIT=8G OFFLOAD_DIR=/data/offload scripts/compare_offload.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
model=${MODEL:-opt-6.7b} limit=${LIMIT:-6G} ratio=${HH_RATIO:-0.2}
systems=${SYSTEMS-h2o,full,transformers,accelerate,flexgen,deepspeed,kvpress}
workloads="128+32 16+128"
[ -z "${PROMPT_LEN:-}${GEN_LEN:-}" ] || workloads=${PROMPT_LEN:-128}+${GEN_LEN:-32}
offload=${OFFLOAD_DIR:-$HOME/.cache/h2o_flexgen/offload}
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-offload-$model}
mkdir -p "$offload" "$out"

good=0
if [ -n "${CHECK-yes}" ]; then
  # All weights on disk, KV cache and hidden states in memory: then every step reads the whole model.
  python -m benchmarks.runs --limit "$limit" --repetitions 1 --offload-dir "$offload" --output "$out/check" \
    --flags "--model $model --percent 0 0 0 100 0 100 --gpu-batch-size ${BATCH:-8} --num-gpu-batches ${NUM_BATCHES:-1} \
    --prompt-len 128 --gen-len 8 --hh-ratio $ratio" || good=$?
  echo
fi

for workload in ${systems:+$workloads}; do
  python -m h2o_flexgen.bench --systems "$systems" --model "$model" --weights dummy --dtype bfloat16 --hh-ratio "$ratio" \
    --cpu-mem "$limit" --batch-size "${BATCHES:-auto}" --search-tokens "${SEARCH_TOKENS:-4}" --only-best \
    --prompt-len "${workload%+*}" --gen-len "${workload#*+}" --repetitions "${REPETITIONS:-1}" \
    --scratch-dir "$offload/bench" "$@" --output-dir "$out/$workload" | sed '$d' # the last line is JSON: in summary.json
  echo
done
echo "records are in $out" >&2
exit "$good"
