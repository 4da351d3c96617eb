"""benchmarks.shared_cores without measuring: its points, its neighbours, the table of made-up records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import shared_cores
from benchmarks.records import LLAMA, facts
from h2o_flexgen.baselines.process import Finished
from h2o_flexgen.baselines.work import Outcome
from h2o_flexgen.models.families import spec_from_config

QUIET = {"seconds": 2.0, "cores": 2, "own": 1.9, "others": 0.02, "idle": 0.08}


def _points(*flags: str) -> list[dict[str, Any]]:
    return shared_cores.points(shared_cores._arguments(list(flags)))


def test_every_shape_meets_every_neighbour() -> None:
    names = [point["name"] for point in _points()]
    assert len(names) == len(set(names)) == 5 * 4 * 2
    assert names[:3] == [
        "opt-125m, batch 1, full, alone",
        "opt-125m, batch 1, transformers, alone",
        "opt-125m, batch 1, full, one busy",
    ]
    few = _points("--shapes", "demo:2", "--systems", "h2o", "--dtype", "float32")
    assert [(point["batch"], point["system"], point["dtype"]) for point in few] == [(2, "h2o", "float32")] * 4


@pytest.mark.parametrize("flags", [("--shapes", "opt-125m"), ("--systems", "full,nobody")])
def test_what_makes_no_sense_is_refused(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shared_cores._arguments(list(flags))
    assert flags[1].split(",")[-1] in capsys.readouterr().err


def test_the_llama_is_of_the_size_that_its_name_says() -> None:
    spec = spec_from_config({**LLAMA, **shared_cores.LLAMA_1B}, "llama-1.1b")
    assert spec.num_parameters / 1e9 == pytest.approx(1.1, abs=0.05)


def _neighbours() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def test_neighbours_are_there_meanwhile_and_gone_after() -> None:
    before = _neighbours()
    with shared_cores.running(shared_cores.BESIDE["two busy"]):
        assert len(_neighbours()) == len(before) + 2
    assert _neighbours() == before
    with shared_cores.running(shared_cores.BESIDE["alone"]):
        assert _neighbours() == before


def test_a_neighbour_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="did not start"), shared_cores.running(("raise SystemExit",)):
        pass
    ends = "import sys; print(flush=True); sys.stdin.close()"
    with pytest.raises(RuntimeError, match="ended before it"), shared_cores.running((ends,)):
        os.waitid(os.P_PID, psutil.Process().children()[-1].pid, os.WEXITED | os.WNOWAIT)


def test_a_record_is_what_the_run_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the model of the script's own folder, by rule, in a process that is told the dtype."""
    asked: dict[str, Any] = {}

    def run(adapter: str, arguments: list[str], *rest: Any, **how: Any) -> Finished:
        asked.update(json.loads((Path(arguments[0]) / "work.json").read_text()))
        line = Outcome(1.0, 2.0, 3.0, 0.5, [[5] * 4] * 2, {"torch": "2"}, shared=QUIET).to_line()
        return Finished(0, line, "", 4.0, 1 << 20, False)

    monkeypatch.setattr("h2o_flexgen.baselines.runner.run_process", run)
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, **shared_cores.LLAMA_1B}))
    flags = ("--shapes", "tiny:2", "--systems", "full", "--prompt-len", "8", "--gen-len", "4", "--threads", "1")
    record = shared_cores.measure(_points(*flags)[0], tmp_path)
    assert (asked["model"], asked["plan"], asked["weights"]) == (str(folder), "rule", "dummy")
    assert (len(asked["prompts"]), asked["dtype"], asked["gen_len"]) == (2, "bfloat16", 4)
    assert (record["prefill_throughput"], record["decode_throughput"], record["shared"]) == (16.0, 3.0, QUIET)
    assert str(tmp_path) not in json.dumps(record)


def _record(point: dict[str, Any], number: int, speed: float, shared: dict[str, Any] | None = QUIET) -> dict[str, Any]:
    rates = {"prefill_throughput": 1000 * speed, "decode_throughput": 100 * speed, "shared": shared}
    return {**facts(["x"]), **rates, **point, "repetition": number}


def test_shares_are_of_the_same_repetition() -> None:
    points = _points("--shapes", "opt-125m:8", "--systems", "full")
    speeds = {"alone": (1.0, 2.0), "one busy": (0.5, 1.5), "two busy": (0.25, 0.5), "spinner": (0.4, 0.8)}
    records = [_record(point, n, speeds[point["beside"]][n]) for n in (0, 1) for point in points]
    lines = list(shared_cores.table(records))
    label = "| opt-125m, batch 8, 256+128, bfloat16"
    shares = "0.62 (0.50 to 0.75) | 0.25 (0.25 to 0.25) | 0.40 (0.40 to 0.40) | 2 |"
    assert f"{label} | decode | full | 150 (100 to 200) | {shares}" in lines
    assert f"{label} | prefill | full | 1500 (1000 to 2000) | {shares}" in lines
    assert not any("left out" in line for line in lines)


def test_a_run_that_was_not_alone_is_no_measure_of_the_others() -> None:
    points = _points("--shapes", "opt-125m:8", "--systems", "full")
    records = [_record(point, n, 1.0 if point["beside"] == "alone" else 0.5) for n in (0, 1) for point in points]
    records[0]["shared"] = {**QUIET, "own": 1.0, "others": 0.98}
    lines = list(shared_cores.table(records))
    assert any(line.endswith("| decode | full | 100 | 0.50 | 0.50 | 0.50 | 1 |") for line in lines)
    assert lines[-1] == (
        "- opt-125m, batch 8, 256+128, bfloat16, full, repetition 1: others used 0.98 of the 2 cores while this used "
        "1.00: its speeds are not those of this machine alone"
    )
    for record in records:  # nothing is left to compare with
        record["shared"] = records[0]["shared"]
    assert any(line.endswith("| decode | full |  |  |  |  | 0 |") for line in shared_cores.table(records))
