#!/usr/bin/env bash
# Predicted beside measured throughput, and the chosen policy beside a grid of others: benchmarks/cost_check.py says how.
#   scripts/cost_check.sh [--grid] [--only 1,2,5] [--repetitions N] [--offload-dir DIR] [--output DIR]
# Needs root (memory caps), 20 GB of disk and a quiet machine; all settings take most of an hour, with --grid some hours.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.cost_check "$@"
