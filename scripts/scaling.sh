#!/usr/bin/env bash
# How speed changes with batch, GPU batches with weights on disk, prompt, generated length and KV budget; `long`: that a
# step costs the same, and the process stays as large, along 16,384 generated tokens at a fixed budget.
#   scripts/scaling.sh [batch stream prompt generated budget long]       REPETITIONS=3; OUTPUT_DIR as of other scripts
# Random weights, bfloat16, a process per run (benchmarks/runs.py). Most of an hour on two cores. A quiet machine, please:
# the load average is in every record. A second call with the same OUTPUT_DIR adds what is missing; curves:
# python -m h2o_flexgen.report OUTPUT_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-scaling}
[ $# -gt 0 ] || set -- batch stream prompt generated budget long
runs() { # FLAGS OF EVERY RUN, THEN WHAT VARIES
  local flags="--num-gpu-batches 1 $1" each vary=()
  shift
  for each; do vary+=(--vary "$each"); done
  python -m benchmarks.runs --output "$out" --repetitions "${REPETITIONS:-3}" --flags "$flags" "${vary[@]}"
}
budgets=hh-ratio=1,0.2 long="--model qwen2.5-0.5b --gpu-batch-size 8"
for panel; do
  case $panel in
    batch) runs "--prompt-len 128 --gen-len 64" gpu-batch-size=1,2,4,8,16,32,64 $budgets ;;
    stream) runs "--gpu-batch-size 8 --prompt-len 64 --gen-len 16 --weights-placement disk=1" num-gpu-batches=1,2,4,8 $budgets ;;
    prompt) runs "$long --gen-len 32" prompt-len=128,256,512,1024,2048 $budgets ;;
    generated) runs "$long --prompt-len 128" gen-len=32,128,512,2048 $budgets ;;
    budget) runs "--gpu-batch-size 32 --prompt-len 512 --gen-len 64" hh-ratio=0.05,0.1,0.2,0.4,0.6,0.8,1 ;;
    long) runs "$long --prompt-len 256 --kv-budget 256" gen-len=512,16384 ;;
    *) echo "no panel is called $panel" >&2; exit 2 ;;
  esac
done
