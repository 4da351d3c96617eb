#!/usr/bin/env bash
# What eviction costs the demo model: recall and perplexity under every policy, at several shares of the full KV cache.
# Writes docs/demo/quality.json and quality.png. Some minutes on two cores; arguments go to the program (--limit 8).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
mkdir -p docs/demo
exec python -m h2o_flexgen.evaluate --model demo --policies full,h2o,local,streaming,heavy,random \
  --ratios 0.05,0.1,0.2,0.5 --output docs/demo/quality.json --plot docs/demo/quality.png --overwrite "$@"
