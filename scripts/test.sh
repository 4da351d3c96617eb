#!/usr/bin/env bash
# Everything that must hold: environment, lint, types, tests. `fast` takes one case of each quick test.
# Other arguments go to pytest: ./scripts/test.sh -k eviction, ./scripts/test.sh fast -k eviction
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
tier=()
if [ "${1:-}" = fast ]; then
  tier=(--fast --quick)
  shift
fi
unset PYTHONDONTWRITEBYTECODE # asserts are rewritten once, and what a hundred processes import is compiled once
ruff check .
# Tiny models are written, and read around the page cache, by the thousand, and a disk takes milliseconds for each read. In
# memory, where there is enough, direct reads are taken as well since Linux 6.6; those of tests/memory have a disk.
where=${TMPDIR:-/tmp} try=/dev/shm/direct-$$
room=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1) free=$(awk '/^MemAvailable/ {print $2}' /proc/meminfo || true)
if [ "${room:-0}" -gt 8000000 ] && [ "${free:-0}" -gt 12000000 ] &&
  dd if=/dev/zero of="$try" bs=4096 count=1 oflag=direct 2>/dev/null && rm "$try"; then
  where=/dev/shm
fi
made=$(mktemp -d -p "$where")
# Types are checked beside the tests, whose workers wait for one another at their beginning and end.
mypy >"$made/types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -rf "$made"' EXIT
export PYTEST_DEBUG_TEMPROOT=$made
# A worker that has nothing left takes tests of the other: some take seconds, most a few milliseconds.
code=0
python -m pytest -n 2 --dist worksteal -m "not gpu" "${tier[@]}" "$@" || code=$?
wait "$checker" || { code=$?; cat "$made/types" >&2; }
exit "$code"
