#!/usr/bin/env bash
# Checks and measures everything that needs a GPU, in one call of under ten minutes, without a network. docs/gpu.md says
# what is measured and how to read it. Records go to results/DATE-gpu-NAME, one line of JSON each, tables to table.md.
#   scripts/gpu_check.sh [--wheels DIR] [--sections tests,kernels,decode,paper,cost] [--only PARTS] [--budget-s 540]
#                        [--output DIR] [--again] [--commit ID] [--dry-run]
#   scripts/gpu_check.sh --readme [--check]     the README's GPU block from the records
# torch, Triton and transformers are those of PYTHON (python3); torch is never installed. --wheels DIR, which
# scripts/gpu_wheels.sh fills where there is a network, brings what else is missing, into an environment in .venv-gpu.
# Without it: .venv where that is there, else PYTHON as it is. --dry-run walks all sections on a CPU with tiny shapes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} wheels='' rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=${2:?--wheels needs a folder}; shift 2 ;;
    --wheels=*) wheels=${1#*=}; shift ;;
    *) rest+=("$1"); shift ;;
  esac
done
if [ -n "$wheels" ]; then
  scripts/gpu_env.sh "$wheels" .venv-gpu
  python=.venv-gpu/bin/python rest=(--peers .venv-gpu/peers "${rest[@]}")
elif [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
  python=.venv/bin/python
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
exec "$python" -m benchmarks.gpu.check "${rest[@]}"
