"""Bytes read from disk against the plan, and the verdict on the cap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offload_check import check, planned_disk_bytes
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.planning.llm import LLM
from tests.tiny import opt_config, prompts_of

CAPPED = {"limit_bytes": 1 << 40, "peak_bytes": 1 << 30, "oom_kills": 0, "exit_code": 0}


def _run(folder: Path, **policy: Any) -> tuple[RunRecord, ModelSpec]:
    opt_config().save_pretrained(folder)
    with LLM(str(folder), weights="dummy", policy={"gpu_batch_size": 2, "num_gpu_batches": 2, **policy}) as llm:
        llm.generate(prompts_of([9] * 6), max_new_tokens=5, ignore_eos=True)
        assert llm.last_record is not None
        return llm.last_record, llm.model.spec


@pytest.mark.parametrize("weights", [{"disk": 1.0}, {"cpu": 0.5, "disk": 0.5}, {"cpu": 1.0}], ids=str)
def test_bytes_moved_are_those_planned(weights: dict[str, float], tmp_path: Path) -> None:
    record, spec = _run(tmp_path, weights=weights)
    planned = planned_disk_bytes(record, spec)
    if len(weights) == 1:
        assert planned == record.bytes_moved.get("disk->cpu", 0)
    else:  # the achieved shares may not give the placement back; then nothing is claimed
        assert planned in (None, record.bytes_moved["disk->cpu"])
    assert check(record, spec, CAPPED)[1]


def test_bad_news(tmp_path: Path) -> None:
    record, spec = _run(tmp_path, weights={"disk": 1.0})
    more = replace(record, bytes_moved={"disk->cpu": record.bytes_moved["disk->cpu"] + 1})
    rows, good = check(more, spec, CAPPED)
    assert (rows[2][3], good) == ("not as planned", False)
    for over in ({"oom_kills": 1}, {"exit_code": 137}, {"limit_bytes": 1 << 20}):
        rows, good = check(record, spec, {**CAPPED, **over})
        assert (rows[0][3], good) == ("over the cap", False)
    assert check(record, spec, {**CAPPED, "peak_bytes": None})[0][0][2] == "not reported"


def test_a_cache_on_disk_is_not_compared(tmp_path: Path) -> None:
    record, spec = _run(tmp_path, weights={"disk": 1.0}, cache={"disk": 1.0})
    assert planned_disk_bytes(record, spec) is None
