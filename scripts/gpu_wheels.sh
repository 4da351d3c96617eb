#!/usr/bin/env bash
# Fetches what scripts/gpu_check.sh needs and a GPU machine with torch, Triton and transformers may lack, where there is
# a network: wheels for Linux on x86-64 (MACHINE=aarch64: on ARM, as beside a Grace) and Python 3.12 (PYTHON_VERSION=3.11
# for another), without torch and without CUDA.
#   scripts/gpu_wheels.sh DIR
# DeepSpeed is published as source alone: its wheel is built here without its kernels, which ZeRO-Inference on a GPU
# should not need, if a Python with torch is at hand (that of scripts/peer_env.sh deepspeed, else DEEPSPEED_PYTHON).
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?usage: scripts/gpu_wheels.sh DIR}") limit=60000000
python=${PYTHON:-python3} version=${PYTHON_VERSION:-3.12} machine=${MACHINE:-x86_64}
mkdir -p "$folder"
pinned() { grep -hiE "^$1==" constraints.txt configs/peers/*.txt | head -n 1; } # the version that the tests run with
platforms=()
for glibc in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_$machine"); done
fetch() { # REQUIREMENT
  "$python" -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --dest "$folder" \
    --python-version "$version" --implementation cp "${platforms[@]}" --platform "manylinux2014_$machine" "$1"
}
for name in highspy pulp psutil safetensors xxhash tqdm jinja2 markupsafe pytest iniconfig pluggy pytest-xdist execnet \
  hypothesis sortedcontainers accelerate flexgen attrs hjson einops msgpack ninja py-cpuinfo pydantic pydantic_core \
  annotated-types typing-inspection; do
  fetch "$(pinned "$name")"
done
deepspeed=$(pinned deepspeed) builder=${DEEPSPEED_PYTHON:-.venv-peers/deepspeed/bin/python}
if [ -x "$builder" ]; then
  DS_ACCELERATOR=cuda DS_BUILD_OPS=0 "$builder" -m pip wheel -qq --disable-pip-version-check --no-deps \
    --no-build-isolation --wheel-dir "$folder" "$deepspeed" ||
    echo "DeepSpeed's wheel could not be built: it will be listed as not installed" >&2
else
  echo "no Python with torch to build DeepSpeed's wheel with (scripts/peer_env.sh deepspeed): left out" >&2
fi
size=$(du -sb "$folder" | cut -f1)
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $size bytes, in $folder" >&2
[ "$size" -le "$limit" ] || { echo "that is more than $limit bytes" >&2; exit 1; }
