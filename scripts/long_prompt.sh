#!/usr/bin/env bash
# What parts of a long prompt save: one prompt of 8,192 tokens, 8 new ones, in one part and in parts of 2,048 and 512.
#   scripts/long_prompt.sh [MODEL] [REPETITIONS]             qwen2.5-0.5b, 3; random weights, bfloat16, H2O at 20 %
# Interleaved runs, each in a process of its own; prints a table of medians and ranges, the records go to OUTPUT_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh test
model=${1:-qwen2.5-0.5b} repetitions=${2:-3} out=${OUTPUT_DIR:-results/local/$(date -u +%Y%m%d-%H%M%S)-long-prompt}
mkdir -p "$out"
for _ in $(seq "$repetitions"); do
  for part in 8192 2048 512; do
    python -m h2o_flexgen.run --model "$model" --weights dummy --dtype bfloat16 --hh-ratio 0.2 --num-prompts 1 \
      --prompt-len 8192 --gen-len 8 --prefill-chunk "$part" --no-calibrate --quiet | tail -n 1 >>"$out/records.jsonl"
  done
done
python - "$out/records.jsonl" <<'PYTHON'
import json, sys
from pathlib import Path
from statistics import median

records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
print(f"| one prompt of 8,192 tokens through {records[0]['model']}, bfloat16 | prefill | peak of the process |")
print("|---|---:|---:|")
for part in (8192, 2048, 512):
    rows = [record for record in records if record["policy"]["prefill_chunk"] == part]
    seconds, peaks = [row["prefill_s"] for row in rows], [row["peak_bytes"]["rss"] / 2**30 for row in rows]
    spans = f"{median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})", f"{median(peaks):.2f} GiB"
    print(f"| parts of {part:,} | {' | '.join(spans)} |" if part < 8192 else f"| one part | {' | '.join(spans)} |")
PYTHON
echo "records: $out/records.jsonl" >&2
