#!/usr/bin/env bash
# Makes .venv with this project in it, once: `source scripts/setup_env.sh [EXTRAS]`, sourced by the other scripts.
# Needs Python 3.11 or newer with venv, and a package index. PYTHON=python3.12 picks an interpreter.
setup_env() {
  local extras=${1:-test} python=${PYTHON:-python3} stamp wanted
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "needs Python 3.11 or newer as '$python'; set PYTHON=/path/to/python" >&2; return 2; }
  stamp=.venv/installed-$extras
  wanted=$(cat setup.py constraints.txt | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setting up .venv (once) ..." >&2
    # pip is what a venv gets last: one that was interrupted has none.
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv || return 2
    .venv/bin/python -m pip install -qq --disable-pip-version-check --upgrade pip || return 2
    # torch by its exact version first: a range may bring gigabytes of CUDA that a machine without a GPU has no use for.
    # A torch for CUDA brings the Triton that it wants; ours is pinned only beside one that brings none.
    grep -v '^triton==' constraints.txt >.venv/constraints.txt
    .venv/bin/python -c 'import torch' 2>/dev/null || .venv/bin/python -m pip install -qq --disable-pip-version-check \
      "$(grep '^torch==' constraints.txt)" -c .venv/constraints.txt || return 2
    .venv/bin/python -c 'import triton' 2>/dev/null || cp constraints.txt .venv/constraints.txt
    .venv/bin/python -m pip install -qq --disable-pip-version-check -c .venv/constraints.txt -e ".[$extras]" || return 2
    echo "$wanted" >"$stamp"
  fi
  PATH="$PWD/.venv/bin:$PATH"
}
setup_env "$@"
