"""What the measuring scripts share: records that survive interruptions, points in turn, spreads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.records import ROOT, facts, provenance, repeat, run_json, shown, spread
from h2o_flexgen.baselines.process import RunFailed
from h2o_flexgen.baselines.store import Record, RecordFile


def test_records_are_appended_and_read_again(tmp_path: Path) -> None:
    for number in range(3):
        RecordFile.open(tmp_path).add({"a": number, "list": [1, "x"]})
    store = RecordFile.open(tmp_path)
    assert [record["a"] for record in store.records] == [0, 1, 2]
    assert store.done(a=1, list=[1, "x"])
    assert not store.done(a=1, list=[2])
    assert not store.done(b=1)


def test_a_torn_line_costs_one_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 0}\n{"a": 1', encoding="utf-8")
    store = RecordFile.open(tmp_path)
    assert store.records == [{"a": 0}]
    store.add({"a": 2})
    assert RecordFile.open(tmp_path).records == [{"a": 0}, {"a": 2}]


def test_points_take_turns_and_a_second_call_adds_what_is_missing(tmp_path: Path) -> None:
    points: list[Record] = [{"name": name, "flags": [name]} for name in "abc"]
    seen: list[str] = []

    def measure(point: Record) -> Record:
        seen.append(point["name"])
        if len(seen) == 5:
            raise RunFailed("this one fails")
        return {"value": len(seen)}

    store = RecordFile.open(tmp_path)
    assert repeat(store, points, 2, measure, "name") == 1
    assert "".join(seen) == "abccba"
    assert repeat(RecordFile.open(tmp_path), points, 3, measure, "name") == 0
    assert "".join(seen) == "abccba" + "b" + "abc"
    found = sorted((record["name"], record["repetition"]) for record in RecordFile.open(tmp_path).records)
    assert found == [(name, number) for name in "abc" for number in range(3)]


def test_a_run_leaves_its_last_line_and_what_it_ran_on() -> None:
    record = run_json([sys.executable, "-c", 'print(\'noise\'); print(\'{"x": 1, "date": "then"}\')'])
    assert (record["x"], record["date"]) == (1, "then")
    assert record["command"].startswith("python -c ")
    assert {"commit", "host", "torch", "threads", "load_average"} <= record.keys()
    with pytest.raises(RuntimeError, match=r"exit code 3(.|\n)*bad news"):
        run_json([sys.executable, "-c", "import sys; print('bad news', file=sys.stderr); sys.exit(3)"])


INTERRUPTED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from benchmarks.records import repeat
from h2o_flexgen.baselines.process import run_command
from h2o_flexgen.baselines.store import RecordFile
if len(sys.argv) > 3:
    try:
        print("asleep", file=sys.stderr, flush=True)
        time.sleep(60)
    finally:
        print("tidied", file=sys.stderr, flush=True)
def measure(point):
    return {} if point["name"] == "first" else run_command([sys.executable, *sys.argv[:3], "run"], loud=True).json()
repeat(RecordFile.open(Path(sys.argv[2])), [{"name": "first"}, {"name": "second"}], 1, measure, "name")
"""


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    """Ctrl-C reaches the script and its run: the run tidies up, the records so far stay."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED, encoding="utf-8")
    command = [sys.executable, str(script), str(ROOT), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        while process.stderr.readline() not in ("asleep\n", ""):
            pass
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "tidied" in said
    assert "interrupted: the same command goes on from here" in said
    assert [record["name"] for record in RecordFile.open(tmp_path).records] == ["first"]


def test_no_home_folder_in_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert facts(["run", "/home/somebody/x", "--dir=/home/somebody/x"])["command"] == "run '~/x' '--dir=~/x'"
    assert facts([sys.executable, "/data/disk1/x", "a/b"])["command"] == "python .../x a/b"
    assert shown(ROOT / "results" / "x") == "results/x"


def test_spreads() -> None:
    assert spread([]) == ""
    assert spread([2.0]) == "2"
    assert spread([3.0, 1.0, 2.5]) == "2.5 (1 to 3)"
    assert spread([0.8, 0.9], ".0%") == "85% (80% to 90%)"


def test_provenance_names_machine_and_commits() -> None:
    assert provenance([]) == "Nothing was measured."
    said = provenance([json.loads(json.dumps({**facts(["x"]), "commit": commit})) for commit in ("a", "b", "a")])
    assert said.startswith("3 runs on ")
    assert said.endswith("commit a, b.")
