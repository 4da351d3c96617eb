#!/usr/bin/env bash
# The H2O paper's table 3 (arXiv 2306.14048) beside what the cost model predicts for a T4: generated tokens/s over prefill
# and decode, 512-token prompts. Nothing is run. docs/paper_table.md says how the columns differ, and why cells do.
#   scripts/paper_table.sh [FLAGS OF h2o_flexgen.search]...           e.g. --hardware my_t4.json
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
# Model, new tokens, ratio, published tokens/s; then the published settings: GPU batches, rows of each, placement.
cells="opt-6.7b 32   1   20.2  1 2  100 0 100 0 100 0
opt-6.7b 32   0.2 35.1  1 4  100 0 100 0 100 0
opt-6.7b 512  1   16.8  1 1  100 0 100 0 100 0
opt-6.7b 512  0.2 51.7  1 4  100 0 100 0 100 0
opt-6.7b 1024 1   16.9  1 1  100 0 100 0 100 0
opt-6.7b 1024 0.2 52.1  1 4  100 0 100 0 100 0
opt-30b  32   1   8.1   3 48 18 82 0 100 0 100
opt-30b  32   0.2 12.7  14 52 0 100 0 100 0 100
opt-30b  512  1   8.5   2 40 20 80 0 100 0 100
opt-30b  512  0.2 18.83 8 52  0 100 0 100 0 100
opt-30b  1024 1   7.1   1 48 20 80 0 100 0 100
opt-30b  1024 0.2 13.82 6 44  0 100 0 100 0 100"
while read -r model gen ratio published batches rows percent; do
  search=(python -m h2o_flexgen.search --hardware t4 --gpu-mem 15 --cpu-mem 204 --nvme-mem 0 --quiet --model "$model"
    --prompt-len 512 --gen-len "$gen" --hh-ratio "$ratio" "$@")
  # shellcheck disable=SC2086  # six numbers
  alike=$("${search[@]}" --num-gpu-batches "$batches" --gpu-batch-size "$rows" --percent $percent --cpu-cache-compute \
    --lookahead 1)
  echo "{\"published\": $published, \"gen_len\": $gen, \"ratio\": $ratio, \"alike\": $alike, \"best\": $("${search[@]}")}"
done <<<"$cells" | python -m benchmarks.paper_table
