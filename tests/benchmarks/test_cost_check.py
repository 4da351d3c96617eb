"""benchmarks.cost_check without measuring: how long a competitor may take, what failed, and torn records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost_check
from h2o_flexgen.baselines.process import RunFailed
from h2o_flexgen.baselines.store import RecordFile

SETTING = next(one for one in cost_check.SETTINGS if one.cpu_mem is None and one.sequences == 8)
LOAD, START = 29.7, 4.0


def _record(seconds: float) -> dict[str, Any]:
    rates = {"gen_throughput": 100 / seconds, "predicted": {"gen_throughput": 100 / seconds}}
    times = {"prefill_s": seconds - 5, "decode_s": 5.0, "load_s": LOAD, "process_s": seconds + LOAD + START}
    return {**rates, **times, "policy": {"gpu_batch_size": 8, "num_gpu_batches": 1}, "sequences": 8}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch):
    """`runs(answer)` has `answer(number)` give the record of a run, or raise; a list of the seconds each was given."""

    def pretend(answer: Callable[[int], dict[str, Any]]) -> list[float | None]:
        given: list[float | None] = []

        def run(setting: Any, offload: Path, extra: Iterable[str] = (), seconds: float | None = None) -> dict[str, Any]:
            given.append(seconds)
            return answer(len(given) - 1)

        monkeypatch.setattr(cost_check, "run", run)
        return given

    return pretend


def test_a_competitor_may_start_and_load_as_long_as_the_chosen_one(runs, tmp_path: Path) -> None:
    given = runs(lambda number: _record(37.2))
    assert cost_check.measure(SETTING, tmp_path, True, RecordFile.open(tmp_path))
    assert given[0] is None
    assert given[1:] == [pytest.approx(1.1 * 37.2 + LOAD + START + cost_check._SPARE_S)] * 4
    assert all(seconds is not None and seconds > _record(37.2)["process_s"] for seconds in given[1:])


def test_what_failed_is_recorded_counted_and_no_competitor(runs, tmp_path: Path, capsys) -> None:
    def answer(number: int) -> dict[str, Any]:
        if number == 1:
            raise RunFailed("exit code 137: the kernel ended it")
        if number == 2:
            raise cost_check.TooSlow("over 60 s")
        return _record(37.2 + number)

    runs(answer)
    store = RecordFile.open(tmp_path)
    assert cost_check.measure(SETTING, tmp_path, True, store)
    assert store.records == RecordFile.open(tmp_path).records
    assert store.records[1]["failed"] == "exit code 137: the kernel ended it"
    assert store.records[2]["slower_than_s"] == pytest.approx(1.1 * 37.2)
    flags = store.records[1]["flags"]
    assert f"{SETTING.label}, {flags}: failed, exit code 137" in capsys.readouterr().out
    said = "\n".join(cost_check.report(store.records))
    assert "100% of the best of 4 (as chosen), 1 of them ended unfinished after 1.1 times its seconds; 1 more" in said
    assert f"1 of 5 runs failed:\n- {SETTING.label}, {flags}: exit code 137: the kernel ended it" in said


def test_a_chosen_policy_that_fails_has_no_grid(runs, tmp_path: Path) -> None:
    def answer(number: int) -> dict[str, Any]:
        raise RunFailed("exit code 1: boom")

    given, store = runs(answer), RecordFile.open(tmp_path)
    assert not cost_check.measure(SETTING, tmp_path, True, store)
    assert len(given) == 1
    assert f"- {SETTING.label}, as chosen: exit code 1: boom" in list(cost_check.report(store.records))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            ["error: it does not fit", "  needed 3 GiB", "memcap: peak 1 of 2 bytes"],
            "error: it does not fit; needed 3 GiB",
        ),
        (["Traceback", "ValueError: no"], "ValueError: no"),
        (["x", "memcap: peak 2 of 2 bytes", "memcap: the command wanted more"], "the command wanted more"),
        ([], "no message"),
    ],
)
def test_why_a_run_failed(said: list[str], reason: str, tmp_path: Path, monkeypatch, capsys) -> None:
    program = tmp_path / "python"
    (tmp_path / "said").write_text("\n".join(said))
    program.write_text(f"#!/bin/sh\ncat '{tmp_path}/said' >&2\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(RunFailed) as raised:
        cost_check.run(SETTING, tmp_path)
    assert str(raised.value) == f"exit code 9: {reason}"
    assert capsys.readouterr().err == "\n".join(said)


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(cost_check.TooSlow):
        cost_check.run(SETTING, tmp_path, seconds=0.1)


def test_a_torn_line_costs_one_record(runs, tmp_path: Path, monkeypatch, capsys) -> None:
    runs(lambda number: _record(10.0))
    monkeypatch.setattr(cost_check, "calibrate", lambda model, offload: None)
    output = tmp_path / "out"
    number = cost_check.SETTINGS.index(SETTING) + 1
    arguments = ["--only", str(number), "--offload-dir", str(tmp_path / "offload"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["cost_check.py", *arguments])
    assert cost_check.main() == 0
    with (output / "records.jsonl").open("a") as file:
        file.write('{"setting": "')
    assert cost_check.main() == 0
    assert "a line that is not JSON is left out" in capsys.readouterr().err
    lines = (output / "records.jsonl").read_text().splitlines()
    assert [json.loads(lines[index])["flags"] for index in (0, 2)] == ["as chosen"] * 2
    assert "error over 2 runs" in (output / "table.md").read_text()
