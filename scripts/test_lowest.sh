#!/usr/bin/env bash
# The tests of transformers' modules with the lowest release that is trusted, beside the one of constraints.txt. Arguments go
# to pytest: ./scripts/test_lowest.sh --fast
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
lowest=$(grep '^transformers==' constraints-lowest.txt) folder=.venv/lowest
if [ "$(cat "$folder/installed" 2>/dev/null)" != "$lowest" ]; then
  rm -rf "$folder"
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target "$folder" "$lowest"
  echo "$lowest" >"$folder/installed"
fi
PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}" exec python -m pytest -n 2 --dist worksteal \
  tests/engine/test_modules.py tests/engine/test_modules_rows.py tests/engine/test_modules_sweep.py \
  tests/models/test_module_guards.py "$@"
