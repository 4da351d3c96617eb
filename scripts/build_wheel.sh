#!/usr/bin/env bash
# A wheel with the native kernels inside, compiled for x86-64 processors with AVX2, AVX-VNNI, and AVX-512 with VNNI and
# bfloat16, or on 64-bit ARM for NEON with and without dot products: for machines without a C
# compiler. It is compiled here, by $CC, cc, gcc or clang. PYTHON picks an interpreter.
#   scripts/build_wheel.sh [FOLDER]     (default: dist)
# Then, anywhere: pip install FOLDER/h2o_flexgen-*.whl
set -euo pipefail
cd "$(dirname "$0")/.."
H2O_FLEXGEN_SHIP_KERNELS=1 "${PYTHON:-python3}" -m pip wheel --disable-pip-version-check --no-deps ${PIP_WHEEL_FLAGS:-} -w "${1:-dist}" .
