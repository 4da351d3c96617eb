#!/usr/bin/env bash
# Perplexity along held-out streams of 16 times the model's context, at a fixed KV budget, by policy and positions.
# Writes docs/stream/stream.json and stream.png. Some minutes on two cores; arguments go to the program (--streams 2).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
mkdir -p docs/stream
exec python -m h2o_flexgen.evaluate --model demo-stream --policies full,local,random,streaming,h2o --stream 4096 \
  --kv-budget 128 --context 128 --streams 7 --stream-window 128 --output docs/stream/stream.json \
  --plot docs/stream/stream.png --overwrite "$@"
