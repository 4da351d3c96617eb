"""`python -m h2o_flexgen.search`: the fastest policy for a model, its work and a machine, without running anything.

    python -m h2o_flexgen.search --model opt-30b --gpu-mem 16 --cpu-mem 200 --nvme-mem 1500 --prompt-len 512 \
        --gen-len 32 --hh-ratio 0.2 --hardware t4-16gb --output policy.json
    python -m h2o_flexgen.run --model opt-30b --hh-ratio 0.2 --policy policy.json

What is typed of the policy (--percent, placements, batch sizes) stays as it is; the rest is chosen. Every figure is
predicted. Notes go to stderr. The last line of stdout is one JSON object, unless stdout is a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from h2o_flexgen.cli.program import print_error, program, write_json, write_result
from h2o_flexgen.cli.search_arguments import parse_search
from h2o_flexgen.config.hardware.profile import misfits
from h2o_flexgen.cost.explain import cache_row, explain, to_json
from h2o_flexgen.cost.search import SearchResult, search
from h2o_flexgen.errors import writing
from h2o_flexgen.reporting.tables import markdown_table


@program
def main(argv: Sequence[str] | None) -> int:
    """Runs the program; returns its exit code: 5 where nothing fits."""
    arguments = parse_search(argv)
    request = arguments.request
    *_, fewest = (request.spec, *request.choices.values())
    for why in () if arguments.quiet else misfits(request.machine, fewest, request.dtype):
        print_error(f"note: {why}")
    result = search(request, arguments.solver)
    entry = to_json(result)
    if smaller := [cache_row(each, arguments.solver) for each in arguments.caches]:
        entry["caches"] = smaller
    if (path := arguments.output) is not None:
        made_for = {name: value for name, value in entry.items() if name != "policy"}
        policy = {**result.best.policy.to_json(), "made_for": made_for}
        with writing(path):
            path.write_text(json.dumps(policy, indent=1) + "\n", encoding="utf-8")
    if (path := arguments.simulate) is not None:
        with writing(path):
            result.best.prediction.block.timeline.write_chrome_trace(path, "predicted")
    if not arguments.quiet:
        write_result(_table(result))
        if smaller:
            write_result(f"\n{_cache_table(smaller)}\n")
    write_json(json.dumps(entry), arguments.json)
    return 0


def _table(result: SearchResult) -> str:
    return f"{explain(result)}\n\n{result.best.footprint.table()}\n"


def _cache_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """`cache_row`s under each other, the first of which the others are compared with."""
    cells = []
    for row in rows:
        share = "full" if row["kv_bytes"] is None else f"{row['kv_bytes']:.3g}"
        plan = ["none fits", "", ""]
        if (rate := row["gen_throughput"]) is not None:
            first = rows[0]["gen_throughput"]
            plan = [f"{row['sequences']}", f"{rate:.3g}", f"{rate / first:.2f}" if first else ""]
        cells.append([share, f"{row['tokens']}", f"{row['most_sequences']}", *plan])
    header = ["bytes of the cache", "tokens kept", "sequences that fit", "block", "tokens/s (predicted)", "times"]
    return markdown_table(header, cells)


if __name__ == "__main__":
    sys.exit(main())
