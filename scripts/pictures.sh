#!/usr/bin/env bash
# Draws the pictures of README and docs/ anew, into docs/pictures/: pages of real runs, in a headless Chromium.
# Needs Debian's chromium (`apt-get install chromium`) and fetches the small real model (scripts/real_model.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
./scripts/real_model.sh gemma >/dev/null || echo "the real model cannot be had" >&2
exec python -m benchmarks.pictures
