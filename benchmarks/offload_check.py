"""Whether an offloaded run kept its cap and moved what its plan says: `python -m ... RECORD.json MEMCAP.json`.

RECORD.json holds the last line of `h2o_flexgen.run`, MEMCAP.json the report of scripts/memcap.sh. Prints a table; the
exit code is 1 where the cap was exceeded or the bytes differ from the plan.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import Placement, place
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.engine.model import open_model
from h2o_flexgen.reporting.tables import markdown_table
from h2o_flexgen.schedule.tasks import ScheduleShape
from h2o_flexgen.schedule.traffic import expected_loads
from h2o_flexgen.units import format_bytes, format_rate


def planned_disk_bytes(record: RunRecord, spec: ModelSpec) -> int | None:
    """Bytes of packed weights that the plan of `record` reads from disk: each streamed group once per step and block.

    Weights tied between head and embedding stay between two steps and are read once more in all. None where it cannot
    be told from the record: cache or hidden states on disk too, or shares that several placements have.
    """
    policy = OffloadPolicy(**{name: record.policy[name] for name in ("gpu_batch_size", "num_gpu_batches", "weights")})
    elsewhere = {*record.policy["cache"], *record.policy["hidden"]} - {"cpu", "gpu"}
    placement = place(spec, policy, record.dtype)
    if elsewhere or placement.achieved(spec, record.dtype)["weights"] != record.policy["weights"]:
        return None
    groups, blocks = spec.groups_by_key, -(-record.sequences // policy.block_size)
    loads = expected_loads(_shape(spec, placement, record.gen_len, policy.num_gpu_batches))
    return blocks * sum(count * groups[key].buffer_bytes(record.dtype) for key, count in loads.items())


def check(record: RunRecord, spec: ModelSpec, capped: dict[str, Any]) -> tuple[list[tuple[str, str, str, str]], bool]:
    """Rows (what, allowed or planned, measured, verdict), and whether all is as it should be."""
    limit, peak = capped["limit_bytes"], capped["peak_bytes"]
    resident, planned = record.peak_bytes["rss"] or 0, planned_disk_bytes(record, spec)
    moved = record.bytes_moved.get("disk->cpu", 0)
    kept = capped["oom_kills"] == 0 and capped["exit_code"] == 0 and resident <= limit
    equal = planned is None or planned == moved
    seen = "not reported" if peak is None else format_bytes(peak)
    rows = [
        ("memory, page cache included", format_bytes(limit), seen, "within the cap" if kept else "over the cap"),
        ("resident memory", format_bytes(limit), format_bytes(resident), "within the cap" if kept else "over the cap"),
        (
            "bytes read from disk",
            "not known" if planned is None else f"{planned:,}",
            f"{moved:,}",
            "not compared" if planned is None else "as planned" if equal else "not as planned",
        ),
    ]
    return rows, kept and equal


def main(argv: Sequence[str]) -> int:
    """Prints the table and the speed of the run; returns the exit code."""
    record = RunRecord.from_json(json.loads(Path(argv[0]).read_text(encoding="utf-8").strip().splitlines()[-1]))
    rows, good = check(record, _spec(record), json.loads(Path(argv[1]).read_text(encoding="utf-8")))
    head = ("what", "allowed or planned", "measured", "")
    decode, rate = record.decode_throughput, record.bandwidth.get("disk->cpu")
    print(markdown_table(head, rows), end="\n\n")
    print(
        f"{record.model}, {record.weights} weights, {record.dtype}, {record.sequences} sequences, "
        f"{record.prompt_len}+{record.gen_len} tokens: prefill {record.prefill_s:.1f} s, decode {record.decode_s:.1f} s"
        + (f", {decode:.3g} tokens/s in decode" if decode else "")
        + (f", disk {format_rate(rate)} while busy" if rate else "")
    )
    return 0 if good else 1


def _spec(record: RunRecord) -> ModelSpec:
    model = open_model(EngineConfig(model=record.model, weights="dummy", offline=True), torch.device("cpu"))
    model.source.close()
    return model.spec


def _shape(spec: ModelSpec, placement: Placement, steps: int, batches: int) -> ScheduleShape:
    return ScheduleShape(
        units=spec.units,
        num_steps=steps,
        num_batches=batches,
        streamed=frozenset(key for key, tier in placement.weights.items() if tier == "disk"),
        cache_moves=frozenset(),
        hidden_moves=frozenset(),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
