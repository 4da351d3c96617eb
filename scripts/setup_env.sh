#!/usr/bin/env bash
# Makes .venv with this project in it, once: `source scripts/setup_env.sh run|test`, sourced by the other scripts. `run` is
# what the programs need, `test` what tests, documentation and comparisons need besides. Needs Python 3.11 or newer with
# venv, and a package index; takes uv where it is installed. PYTHON=python3.12 picks an interpreter.
setup_env() {
  local extras=${1:-test} python=${PYTHON:-python3} stamp wanted project=. install
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "needs Python 3.11 or newer as '$python'; set PYTHON=/path/to/python" >&2; return 2; }
  stamp=.venv/installed-$extras
  wanted=$(cat setup.py constraints.txt | cksum)
  [ "$extras" = run ] || project=".[$extras]"
  if [ "$(cat "$stamp" 2>/dev/null || cat .venv/installed-test 2>/dev/null)" != "$wanted" ]; then
    echo "setting up .venv (once): a virtual environment ..." >&2
    # pip is what a venv gets last: one that was interrupted has none.
    .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv || return 2
    # The native kernels need a compiler and nothing else: they are made meanwhile. What fails here is told by the programs.
    # The package around them imports torch: an empty one stands for it.
    (.venv/bin/python -c 'import sys, types; name = "h2o_flexgen.kernels"; it = sys.modules[name] = types.ModuleType(name)
it.__path__ = ["h2o_flexgen/kernels"]; from h2o_flexgen.kernels import native; native.library()' \
      </dev/null >/dev/null 2>&1 &)
    install=(.venv/bin/python -m pip install --disable-pip-version-check --no-compile)
    [ -t 2 ] || install+=(-qq) # a terminal sees what is downloaded
    # torch by its exact version first: a range may bring gigabytes of CUDA that a machine without a GPU has no use for.
    # A torch for CUDA brings the Triton that it wants; ours is pinned only beside one that brings none.
    grep -v '^triton==' constraints.txt >.venv/constraints.txt
    .venv/bin/python -c 'import torch' 2>/dev/null || {
      echo "setting up .venv: $(grep '^torch==' constraints.txt), the largest part ..." >&2
      "${install[@]}" "$(grep '^torch==' constraints.txt)" -c .venv/constraints.txt || return 2; }
    [ "$extras" = run ] || .venv/bin/python -c 'import triton' 2>/dev/null || cp constraints.txt .venv/constraints.txt
    ! command -v uv >/dev/null || install=(uv pip install -q --python .venv/bin/python)
    echo "setting up .venv: this project and what it needs to $extras, by ${install[0]##*/} ..." >&2
    "${install[@]}" -c .venv/constraints.txt -e "$project" || return 2
    echo "$wanted" >"$stamp"
  fi
  PATH="$PWD/.venv/bin:$PATH"
}
setup_env "$@"
