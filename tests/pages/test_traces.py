"""Trace files come back as what was written, and stalls are laid to what was waited for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.pages.traces import stalls, thinned, trace_of
from h2o_flexgen.schedule.timeline import Level, Row, Timeline

ROWS = (
    Row("layers.0.attn step 0 batch 0", 0.0, 1.0, "compute"),
    Row("load_weights layers.0.mlp", 0.5, 3.0, "disk->cpu"),
    Row("layers.0.mlp step 0 batch 0", 3.0, 4.0, "compute"),
    Row("head step 0 batch 0", 4.5, 5.0, "compute"),
)


def test_a_trace_file_comes_back(tmp_path: Path) -> None:
    memory, predicted = (Level(0.0, "cpu", 5), Level(2.0, "cpu", 7)), Timeline(ROWS[:1])
    Timeline(ROWS, memory, {"cpu": 9}).write_chrome_trace(tmp_path / "trace.json", predicted=predicted)
    trace = trace_of(json.loads((tmp_path / "trace.json").read_text()), "trace.json")
    assert trace.measured == Timeline(ROWS, memory, {"cpu": 9})
    assert trace.predicted is not None
    assert trace.predicted.rows == ROWS[:1]


def test_stalls_and_their_causes() -> None:
    found = stalls(Timeline(ROWS))
    assert [(stall.start, stall.end) for stall in found] == [(1.0, 3.0), (4.0, 4.5)]
    assert [stall.cause for stall in found] == [
        "waiting for disk->cpu: weights",
        "no transfer ended meanwhile: choosing tokens, bookkeeping",
    ]
    assert stalls(Timeline(())) == []


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), min_size=1, max_size=200).map(sorted), st.integers(1, 50)
)
def test_thinned_rows_lose_no_time_and_no_task(spans: list[tuple[float, float]], most: int) -> None:
    rows = [Row("a", start, start + length, "compute") for start, length in spans]
    thin = thinned(rows, most)
    assert len(thin) <= most + 1 or len(thin) == len(rows) <= most
    counts = [int(row.task.split()[0]) if "tasks" in row.task else 1 for row in thin]
    assert sum(counts) == len(rows)
    assert (thin[0].start, max(row.end for row in thin)) == (rows[0].start, max(row.end for row in rows))


def test_a_trace_of_another_program_is_read_too() -> None:
    events = [{"ph": "X", "name": "a", "ts": 0, "dur": 5, "pid": 7, "tid": 1}, {"ph": "i", "name": "b", "ts": 1}]
    trace = trace_of({"traceEvents": events}, "x")
    assert trace.measured is not None
    assert trace.measured.rows == (Row("a", 0.0, pytest.approx(5e-6), "thread 1"),)
