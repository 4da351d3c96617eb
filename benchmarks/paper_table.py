"""The table of `scripts/paper_table.sh`: a JSON object per cell on stdin, Markdown on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from h2o_flexgen.reporting.tables import markdown_table

HEADER = ["model", "tokens", "cache", "block", "published", "predicted", "off by", "best block", "its tokens/s"]
RATIOS = ["model", "tokens", "H2O / full: published", "predicted", "best blocks"]
FAR = 0.25


def rate(cell: dict[str, Any], which: str) -> float:
    return float(cell["published"] if which == "published" else cell[which]["predicted"]["gen_throughput"])


def block(entry: dict[str, Any]) -> str:
    return f"{entry['policy']['num_gpu_batches']} x {entry['policy']['gpu_batch_size']}"


def work(cell: dict[str, Any]) -> list[str]:
    return [cell["alike"]["model"], f"512 + {cell['gen_len']}"]


def row(cell: dict[str, Any]) -> list[str]:
    published, predicted = rate(cell, "published"), rate(cell, "alike")
    off = f"{predicted / published - 1:+.0%}" + " *" * (abs(predicted / published - 1) > FAR)
    cache = "full" if cell["ratio"] == 1 else f"H2O {cell['ratio']:.0%}"
    alike = [cache, block(cell["alike"]), f"{published:g}", f"{predicted:.3g}", off]
    return [*work(cell), *alike, block(cell["best"]), f"{rate(cell, 'best'):.3g}"]


def ratios(full: dict[str, Any], h2o: dict[str, Any]) -> list[str]:
    columns = ("published", "alike", "best")
    return [*work(full), *(f"{rate(h2o, which) / rate(full, which):.2f}x" for which in columns)]


cells = [json.loads(line) for line in sys.stdin]
print(markdown_table(HEADER, [row(cell) for cell in cells], left=4))
print(f"\n*: off by more than {FAR:.0%}. Predicted for the profile {cells[0]['alike']['hardware']}; nothing was run.\n")
pairs = zip(cells[::2], cells[1::2], strict=True)
print(markdown_table(RATIOS, [ratios(*pair) for pair in pairs], left=2))
