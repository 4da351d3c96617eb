"""Timelines: what counts as busy and as overlap, the trace file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.schedule.timeline import Level, Row, Timeline

ROWS = (
    Row("load layers.0.mlp", 10.0, 12.0, "disk->cpu"),
    Row("layers.0.attn step 0 batch 0", 11.0, 14.0, "compute"),
    Row("load layers.1.attn", 11.5, 13.0, "disk->cpu"),  # two reader threads: overlaps the first row
    Row("layers.0.mlp step 0 batch 0", 18.0, 20.0, "compute"),
)


def test_busy_span_overlap() -> None:
    timeline = Timeline(ROWS)
    assert timeline.resources == ("disk->cpu", "compute")
    assert timeline.span == 10.0
    assert timeline.busy("disk->cpu") == 3.0
    assert timeline.busy("compute") == 5.0
    assert timeline.busy("gpu->cpu") == 0.0
    assert timeline.overlap == pytest.approx(0.2)  # 11 to 13


def test_an_empty_timeline() -> None:
    timeline = Timeline(())
    assert (timeline.span, timeline.overlap, timeline.resources) == (0.0, 0.0, ())


def test_rows_without_duration() -> None:
    timeline = Timeline((Row("a", 1.0, 1.0, "compute"),))
    assert timeline.overlap == 0.0


def test_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Timeline(ROWS).write_chrome_trace(path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["compute", "disk->cpu", "disk->cpu"], "two transfers at once are two threads"
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], names[e["tid"]], e["ts"], e["dur"]) for e in spans] == [
        ("load layers.0.mlp", "disk->cpu", 0.0, 2e6),
        ("layers.0.attn step 0 batch 0", "compute", 1e6, 3e6),
        ("load layers.1.attn", "disk->cpu", 1.5e6, 1.5e6),
        ("layers.0.mlp step 0 batch 0", "compute", 8e6, 2e6),
    ]
    assert all(isinstance(e["pid"], int) and isinstance(e["tid"], int) for e in trace["traceEvents"])


def test_chrome_trace_without_rows(tmp_path: Path) -> None:
    Timeline(()).write_chrome_trace(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]) == 1


TIMES = st.integers(0, 40)


@given(st.lists(st.tuples(TIMES, TIMES, st.sampled_from("abc")), max_size=12))
def test_busy_and_overlap_agree_with_counting_moments(raw: list[tuple[int, int, str]]) -> None:
    rows = [Row("task", min(a, b), max(a, b), resource) for a, b, resource in raw]
    timeline = Timeline(tuple(rows))
    moments = range(41)  # [m, m + 1) for whole m
    working = [{row.resource for row in rows if row.start <= m < row.end} for m in moments]
    for resource in timeline.resources:
        assert timeline.busy(resource) == sum(resource in now for now in working)
    together = sum(len(now) > 1 for now in working)
    assert timeline.overlap * timeline.span == pytest.approx(together)


def test_memory_and_a_prediction_in_a_trace_file(tmp_path: Path) -> None:
    path, memory = tmp_path / "trace.json", (Level(9.0, "cpu", 64), Level(12.5, "cpu", 96))
    expected = Timeline((Row("layers.0.attn step 0 batch 0", 0.0, 2.0, "compute"),))
    Timeline(ROWS, memory, {"cpu": 128}).write_chrome_trace(path, predicted=expected)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["otherData"] == {"caps": {"cpu": 128}}
    levels = [(e["name"], e["ts"], e["args"]["bytes"]) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert levels == [("memory cpu", 0.0, 64), ("memory cpu", 2.5e6, 96)]  # before the first row: as it starts
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "h2o_flexgen", 2: "predicted"}
    assert [e["dur"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 2] == [2e6]
