#!/usr/bin/env bash
# Everything that must hold: environment, lint, types, tests. Arguments go to pytest: ./scripts/test.sh -k eviction
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
ruff check .
mypy
exec python -m pytest -n 2 -m "not gpu" "$@"
