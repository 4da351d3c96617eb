#!/usr/bin/env bash
# Eviction policies compared: every policy at several budgets, by the suites of configs/eval.
#   scripts/eviction_lab.sh FOLDER [SUITE ...]     all suites by default; "real" needs scripts/real_model.sh first
# Writes FOLDER/SUITE/records.jsonl, table.md and quality.png. A rerun measures only what has no record there yet.
set -euo pipefail
folder=$(realpath -m "${1:?give a folder for the records}")
shift
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
for suite in "${@:-demo demo-stream reasoning real}"; do
  for name in $suite; do
    mkdir -p "$folder/$name"
    python -m h2o_flexgen.evaluate --suite "configs/eval/$name.json" --output-dir "$folder/$name" \
      --plot "$folder/$name/quality.png" --overwrite --no-json >"$folder/$name/table.md.new"
    mv "$folder/$name/table.md.new" "$folder/$name/table.md"
  done
done
