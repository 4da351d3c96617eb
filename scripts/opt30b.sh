#!/usr/bin/env bash
# A model much larger than memory, run to the end: OPT-30B's shape, random weights, 60 GB on disk, 6 GiB of memory.
#   scripts/opt30b.sh [--dry-run] [--keep] [--limit 6G] [--batch 32] [--num-batches 2] [--prompt 64] [--new 8] [--layers N]
# Where the disk is short it runs as many layers as fit, and says so. --dry-run: how many, and about how long (a quarter
# of an hour with all of them). Needs root (scripts/memcap.sh). Weights go to --offload-dir and are removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m benchmarks.opt30b "$@"
