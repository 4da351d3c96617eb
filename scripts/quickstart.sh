#!/usr/bin/env bash
# Sets up .venv (once), then does real work: the demo model completes the same prompts with the full KV cache and with
# H2O at 20 % of it, texts and figures side by side. Arguments go to the program: ./scripts/quickstart.sh --hh-ratio 0.5
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
exec python -m h2o_flexgen.demo --no-json "$@"
