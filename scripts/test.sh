#!/usr/bin/env bash
# Everything that must hold: environment, lint, types, tests. `fast` takes one case of each test, and none that is slow.
# Other arguments go to pytest: ./scripts/test.sh -k eviction, ./scripts/test.sh fast -k eviction
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
tier=()
if [ "${1:-}" = fast ]; then
  tier=(--fast)
  shift
fi
unset PYTHONDONTWRITEBYTECODE # asserts are rewritten once, and what a hundred processes import is compiled once
ruff check .
# Types are checked beside the tests, whose workers wait for one another at their beginning and end.
types=$(mktemp)
mypy >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
# A worker that has nothing left takes tests of the other: some take seconds, most a few milliseconds.
code=0
python -m pytest -n 2 --dist worksteal -m "not gpu" "${tier[@]}" "$@" || code=$?
wait "$checker" || { code=$?; cat "$types" >&2; }
exit "$code"
