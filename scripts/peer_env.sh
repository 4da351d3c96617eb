#!/usr/bin/env bash
# Makes the environment of a peer of the comparison, with the versions pinned in configs/peers/NAME.txt.
#   scripts/peer_env.sh accelerate|airllm|flexgen|deepspeed|kvpress|llamacpp|all [FOLDER]  default: .venv-peers/NAME
# h2o_flexgen.bench finds them there, or in the folder that --peers names. Once made, it is left until its pins change.
# llama.cpp is built for this machine's processor, or with INSTRUCTIONS=v3 for any with AVX2 (x86-64-v3), to lie beside
# H2O_FLEXGEN_KERNELS=avx2 on a processor that has more; give that a FOLDER of its own, such as .venv-peers/v3/llamacpp.
# INSTRUCTIONS=vnni is v3 with AVX-VNNI (Intel's since 2021 without AVX-512), to lie beside avxvnni.
# Needs Python 3.11 or newer with venv, a package index, 1.5 GB of disk each, and a C++ compiler for deepspeed and
# llamacpp, whose build takes ten minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-}
known=$(cd configs/peers && ls ./*.txt | sed 's|./||; s|\.txt$||' | tr '\n' ' ')
if [ "$name" = all ]; then
  for each in $known; do "scripts/peer_env.sh" "$each"; done
  exit
fi
case " $known" in *" $name "*) [ -n "$name" ] ;; *) false ;; esac || {
  echo "usage: scripts/peer_env.sh NAME [FOLDER], NAME one of: ${known}all" >&2; exit 2; }
pins=configs/peers/$name.txt folder=$(realpath -m "${2:-.venv-peers/$name}") python=${PYTHON:-python3}
case ${INSTRUCTIONS:=native} in
  native) instructions=(-DGGML_NATIVE=ON) ;;
  v3) instructions=(-DGGML_NATIVE=OFF -DGGML_{AVX2,FMA,F16C,BMI2}=ON -DGGML_{AVX_VNNI,AVX512}=OFF) ;;
  vnni) instructions=(-DGGML_NATIVE=OFF -DGGML_{AVX2,FMA,F16C,BMI2,AVX_VNNI}=ON -DGGML_AVX512=OFF) ;;
  *) echo "INSTRUCTIONS is $INSTRUCTIONS: needed native, v3 or vnni" >&2; exit 2 ;;
esac
wanted="$(cksum <"$pins")$([ "$INSTRUCTIONS" = native ] || echo " $INSTRUCTIONS")"
[ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ] || { echo "$folder is there already" >&2; exit; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python 3.11 or newer" >&2; exit 2; }

echo "setting up $folder ..." >&2
"$folder/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$folder" # interrupted, it has no pip
pip() { "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }
# torch by its exact version and first: a range may bring gigabytes of CUDA that a machine without a GPU has no use for.
torch=$(grep '^torch==' "$pins") && pip "$torch" -c "$pins"
pip --no-deps -r <(grep -vE '^(torch|deepspeed|llama_cpp_python)==' "$pins")
if grep -q '^deepspeed==' "$pins"; then # its build looks at the torch that is installed, and at what computes
  "$folder/bin/python" -c 'import torch; raise SystemExit(torch.cuda.is_available())' && export DS_ACCELERATOR=cpu
  pip --no-deps --no-build-isolation "$(grep '^deepspeed==' "$pins")"
  # What it would compile at its first use, under a memory cap and beside a clock.
  TORCH_EXTENSIONS_DIR=$folder/torch_extensions "$folder/bin/python" -c \
    'from deepspeed.ops.op_builder import ShareMemCommBuilder as op; op().load()' >/dev/null
fi
if sources=$(grep '^llama_cpp_python==' "$pins"); then # its programs alone
  package=${sources/==/-} build=$folder/build
  mkdir -p "$build"
  run() { "$folder/bin/python" -m "$@" >>"$build/log" 2>&1 || { tail -n 20 "$build/log" >&2; exit 1; }; }
  run pip download -q --disable-pip-version-check --no-deps --no-binary :all: -d "$build" "$sources"
  run tarfile -e "$build/$package.tar.gz" "$build"
  # Without a commit, the build would name that of the repository around it.
  run cmake -S "$build/$package/vendor/llama.cpp" -B "$build/made" -G Ninja -DCMAKE_MAKE_PROGRAM="$folder/bin/ninja" \
    -DCMAKE_BUILD_TYPE=Release "${instructions[@]}" -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_{TESTS,EXAMPLES,SERVER,APP}=OFF -DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT="$package"
  run cmake --build "$build/made" --target llama-batched-bench llama-quantize --parallel "$(nproc)"
  run cmake -E copy "$build"/made/bin/llama-{batched-bench,quantize} "$folder/bin"
  rm -rf "$build"
fi
echo "$wanted" >"$folder/installed"
echo "$folder is ready" >&2
