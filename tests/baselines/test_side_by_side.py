"""What a ratio is of: runs one after the other, on one machine and of one commit; adapters only pretend."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.baselines.runner import Runner
from h2o_flexgen.openmp import SHORT_SPIN

BOTH = [("ours", 2), ("theirs", 2)]


@pytest.fixture
def folder(pretend, tmp_path: Path) -> Path:
    """Of the records; both systems pretend."""
    pretend("ours", own=True)
    pretend("theirs")
    return tmp_path / "out"


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _elsewhere(path: Path) -> dict[str, Any]:
    return {**json.loads(path.read_text())["host"], "cpu": "Other"}


@pytest.mark.parametrize(("ago", "took", "ran"), [(60, 7200, BOTH[1:]), (180, 1, BOTH)])
def test_a_repetition_goes_on_at_once_or_never(ago: int, took: int, ran: list[Any], folder: Path, bench) -> None:
    """However long its runs take: what counts is the time from the end of one to the start of the next."""
    bench("-r", "1")
    (folder / "run-01-theirs.json").unlink()
    started = datetime.now(UTC) - timedelta(seconds=ago + took)
    _change(folder / "run-01-ours.json", date=started.isoformat(timespec="seconds"), process_s=took)
    found, summary, _ = bench("-r", "1")
    assert found == ran
    assert summary["ratios"]["ours/theirs"]["pairs"] == 1
    assert bench("-r", "1")[0] == []


@pytest.mark.parametrize("what", ["commit", "host"])
def test_another_machine_or_commit_begins_another_repetition(what: str, folder: Path, bench) -> None:
    bench("-r", "1")
    (folder / "run-01-theirs.json").unlink()
    path = folder / "run-01-ours.json"
    _change(path, **{what: "abc" if what == "commit" else _elsewhere(path)})
    assert bench("-r", "1")[0] == BOTH
    assert (folder / "run-02-theirs.json").is_file()


@pytest.mark.slow
def test_two_machines_or_commits_give_no_ratio(folder: Path, bench) -> None:
    bench("-r", "3")
    _change(folder / "run-01-ours.json", commit="abc")
    _change(folder / "run-02-theirs.json", host=_elsewhere(folder / "run-02-theirs.json"))
    for name in ("ours", "theirs"):  # what is not known is the same
        _change(folder / f"run-03-{name}.json", commit=None)
    ran, summary, _ = bench("-r", "3")
    assert (ran, summary["ratios"]["ours/theirs"]["pairs"]) == ([], 1)
    assert summary["systems"]["ours"]["repetitions"] == 3
    _change(folder / "run-03-ours.json", commit="abc")
    _, summary, _ = bench("-r", "3")
    assert summary["ratios"]["ours/theirs"]["decode_throughput"] is None
    assert "| ours / theirs | - | - | - | 0 |" in (folder / "table.md").read_text()


@pytest.mark.slow
def test_systems_are_prepared_before_a_repetition(pretend, bench, tmp_path: Path, monkeypatch) -> None:
    """It may take minutes, and runs apart from each other would be of different repetitions."""
    for name in ("ours", "theirs"):
        pretend(name, prepares=True, scratch="same")
    run, file, seen = Runner.run, tmp_path / "scratch" / "opt-125m" / "same" / "prepared", []

    def looked(self: Runner, *arguments: Any) -> Any:
        seen.append(file.read_text().splitlines())
        return run(self, *arguments)

    monkeypatch.setattr(Runner, "run", looked)
    assert bench("-r", "2", "--scratch-dir", str(tmp_path / "scratch"))[0] == BOTH * 2
    assert seen == [["once"] * 2] * 4


def test_what_cannot_be_prepared_is_listed_and_not_tried_again(pretend, folder: Path, bench) -> None:
    pretend("theirs", {"unready": "no disk"}, prepares=True)
    ran, summary, _ = bench("-r", "1")
    assert (ran, summary["failed"]) == (BOTH[:1], {"theirs": "no disk"})
    assert (folder / "failed-b2-theirs.json").is_file()
    assert bench("-r", "1")[:2] == ([], summary)


def test_a_failure_with_something_missing_is_told(folder: Path, bench) -> None:
    bench("-r", "1")
    settings = json.loads((folder / "run-01-ours.json").read_text())["settings"]
    (folder / "failed-b2-ours.json").write_text(json.dumps({"settings": settings, "system": "ours", "batch": 2}))
    _, _, err = bench("-r", "1", code=2)
    assert "failed-b2-ours.json is not a record of bench: it has no repetition, reason, out_of_memory, date" in err


def test_runs_that_shared_the_cores_are_named(pretend, bench, tmp_path: Path) -> None:
    """And records from before that was counted still load."""
    said = {"seconds": 9.0, "cores": 2, "own": 1.25, "others": 0.5, "idle": 0.25}
    pretend("ours", {"shared": said}, own=True)
    pretend("theirs", {"shared": {**said, "others": 0.1}})
    bench("-r", "2")
    record = tmp_path / "out" / "run-01-ours.json"
    assert json.loads(record.read_text())["shared"] == said
    _, summary, _ = bench("-r", "2")
    warning = "others used 0.50 of the 2 cores while this used 1.25: its speeds are not those of this machine alone"
    assert summary["systems"]["ours"]["disturbed"] == {"runs": 2, "worst": warning}
    assert summary["systems"]["theirs"]["disturbed"] is None
    assert f"- 2 of 2 runs of ours, at worst: {warning}.\n" in (tmp_path / "out" / "table.md").read_text()
    data = json.loads(record.read_text())
    del data["shared"]
    record.write_text(json.dumps(data))
    assert bench("-r", "2")[1]["systems"]["ours"]["disturbed"] == {"runs": 1, "worst": warning}


def test_how_our_threads_wait_is_not_handed_to_peers(pretend, bench, tmp_path: Path, monkeypatch) -> None:
    for name, value in SHORT_SPIN.items():  # as importing the package before torch leaves it
        monkeypatch.setenv(name, value)
    pretend("ours", own=True)
    pretend("theirs")
    bench("-r", "1")

    def seen(name: str) -> dict[str, Any]:
        detail = json.loads((tmp_path / "out" / f"run-01-{name}.json").read_text())["detail"]
        return dict(detail["openmp"])

    assert seen("ours") == SHORT_SPIN
    assert seen("theirs") == dict.fromkeys(SHORT_SPIN)
