#!/usr/bin/env bash
# Runs a command as on a machine with less memory: `scripts/memcap.sh --help`. An installed package has the same as
# `python -m h2o_flexgen.baselines.memcap`. Needs Python 3.11 or newer and no package.
exec "${PYTHON:-python3}" -P "$(dirname "$0")/../h2o_flexgen/baselines/memcap.py" "$@"
