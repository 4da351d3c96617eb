#!/usr/bin/env bash
# Sets up .venv (once), then does real work: the demo model completes the same prompts with the full KV cache and with
# H2O at 20 % of it, texts and figures side by side. Arguments go to the program: ./scripts/quickstart.sh --hh-ratio 0.5
# It ends with a page of one more run, report.html: what was kept of the prompts, the schedule, memory.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh run
python -m h2o_flexgen.demo --no-json "$@"
exec python -m h2o_flexgen.run --hh-ratio 0.2 --gen-len 24 --report report.html --output /dev/null --overwrite --quiet --no-json
