"""Comparisons that go on in their folder: what is there stays, what is missing is measured; adapters only pretend."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.baselines.runner import Runner
from h2o_flexgen.baselines.store import commit


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*-*.json")}


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _long_ago(folder: Path, name: str = "run-*.json", **values: Any) -> None:
    for path in folder.glob(name):
        _change(path, date=(datetime.now(UTC) - timedelta(hours=1)).isoformat(timespec="seconds"), **values)


def test_more_repetitions_are_added_to_those_that_are_there(pretend, bench, tmp_path: Path) -> None:
    pretend("ours", {"speed": 4.0}, own=True)
    pretend("theirs")
    bench("-r", "1")
    (tmp_path / "out" / ".table.md.123").touch()  # what a write that was cut off left
    _long_ago(tmp_path / "out")
    before = _contents(tmp_path / "out")
    ran, summary, err = bench("-r", "3")
    assert ran == [("ours", 2), ("theirs", 2)] * 2
    assert [line.partition(":")[0] for line in err.splitlines() if "/3:" in line] == [
        "ours 2/3",
        "theirs 2/3",
        "ours 3/3",
        "theirs 3/3",
    ]
    after = _contents(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert (len(after), summary["systems"]["theirs"]["repetitions"]) == (6, 3)
    assert summary["ratios"]["ours/theirs"]["pairs"] == 3
    ran, again, _ = bench("-r", "3")
    assert (ran, again) == ([], summary)


@pytest.mark.slow
def test_an_interrupted_repetition_goes_on_in_the_same_minutes_and_is_done_again_later(
    pretend, bench, tmp_path: Path
) -> None:
    pretend("ours", own=True)
    pretend("theirs")
    folder = tmp_path / "out"
    bench("-r", "2")
    (folder / "run-02-theirs.json").unlink()
    assert bench("-r", "2")[0] == [("theirs", 2)]
    (folder / "run-02-theirs.json").unlink()
    _long_ago(folder)
    ran, summary, _ = bench("-r", "2")
    assert ran == [("ours", 2), ("theirs", 2)]
    assert (folder / "run-03-theirs.json").is_file()
    assert [summary["systems"][name]["repetitions"] for name in ("ours", "theirs")] == [3, 2]
    assert summary["ratios"]["ours/theirs"]["pairs"] == 2


def test_other_settings_are_refused_with_what_differs(pretend, bench, tmp_path: Path) -> None:
    pretend("ours", own=True)
    pretend("theirs")
    bench("-r", "1")
    ran, _, err = bench("-r", "2", "--prompt-len", "9", "--hh-ratio", "0.5", code=2)
    assert ran == []
    assert "--prompt-len: 8 there, 9 now; --hh-ratio: 0.2 there, 0.5 now" in err
    (tmp_path / "out" / "run-01-ours.json").write_text("{")
    assert "run-01-ours.json cannot be read" in bench("-r", "2", code=2)[2]


def test_systems_may_be_added(pretend, bench) -> None:
    pretend("ours", {"speed": 4.0}, own=True)
    pretend("theirs")
    pretend("third", {"speed": 2.0})
    bench("-r", "1")
    ran, summary, _ = bench("-r", "1", "--systems", "ours,third", "--reference", "third")
    assert ran == [("third", 2)]  # in the same minutes
    assert {name: pair["decode_throughput"]["median"] for name, pair in summary["ratios"].items()} == {
        "ours/third": 2.0,
        "ours/theirs": 4.0,
        "third/theirs": 2.0,
    }


@pytest.mark.slow
def test_what_failed_is_not_tried_again_unless_its_file_goes(pretend, bench, tmp_path: Path) -> None:
    pretend("ours", own=True)
    pretend("theirs", {"fail": "boom"})
    ran, summary, _ = bench("-r", "2")
    assert ran == [("ours", 2), ("theirs", 2), ("ours", 2)]
    failed = tmp_path / "out" / "failed-b2-theirs.json"
    assert json.loads(failed.read_text())["stderr"] == ["Traceback", "boom"]
    ran, again, err = bench("-r", "3")
    assert ran == [("ours", 2)]
    assert again["failed"] == summary["failed"] == {"theirs": "exit code 4: boom"}
    assert f"without {failed} it would be tried again" in err
    failed.unlink()
    pretend("theirs")
    assert bench("-r", "3")[0] == [("theirs", 2), *[("ours", 2), ("theirs", 2)] * 2]  # the third is still fresh


@pytest.mark.slow
def test_searched_batches_are_used_again(pretend, bench, tmp_path: Path) -> None:
    pretend("ours", {"flat": 16}, own=True)
    pretend("theirs", {"room": 8})
    _, summary, _ = bench("-r", "1", "-b", "auto")
    ran, again, _ = bench("-r", "2", "-b", "auto")
    assert ran == [("ours", 8), ("theirs", 8), ("ours", 16), ("theirs", 8)]
    assert again["tried"] == summary["tried"]
    assert again["best"]["batches"] == {"ours": 16, "theirs": 8}
    pretend("third", {"flat": 8})
    pretend("broken", {"refuse": "no"})
    ran, _, _ = bench("-r", "1", "-b", "auto", "--systems", "third,broken")
    assert ran[0] == ("third", 8)
    ran, summary, err = bench("-r", "1", "-b", "auto", "--systems", "third,broken")
    assert (ran, summary["failed"]) == ([], {"broken": "no"})
    assert "broken: no batch worked before" in err


@pytest.mark.slow
def test_only_the_best(pretend, bench, tmp_path: Path) -> None:
    pretend("ours", {"flat": 16}, own=True)
    pretend("theirs", {"room": 8})
    ran, summary, _ = bench("-r", "2", "-b", "8,16,32", "--only-best", "--search-tokens", "2")
    # Beyond one that has no room nothing is tried.
    assert (
        ran
        == [*[("ours", size) for size in (8, 16, 32)], ("theirs", 8), ("theirs", 16)]
        + [
            ("ours", 16),
            ("theirs", 8),
        ]
        * 2
    )
    assert summary["batches"] == {"ours": 16, "theirs": 8}
    assert "best" not in summary
    assert len(list((tmp_path / "out" / "best").glob("run-*.json"))) == 4
    assert "best,ours,16" in (tmp_path / "out" / "table.csv").read_text()


@pytest.mark.slow
def test_ctrl_c_loses_the_run_in_progress_alone(pretend, bench, monkeypatch) -> None:
    """In the search and in the comparison."""
    pretend("ours", {"room": 8}, own=True)
    pretend("theirs", {"room": 8})
    run, until = Runner.run, {"left": 1}

    def cut(self: Runner, *arguments: Any) -> Any:
        if until["left"] == 0:
            raise KeyboardInterrupt
        until["left"] -= 1
        return run(self, *arguments)

    monkeypatch.setattr(Runner, "run", cut)
    bench("-r", "2", "-b", "auto", code=130)  # one try of four
    until["left"] = 4
    assert bench("-r", "2", "-b", "auto", code=130)[0] == [("ours", 16), ("theirs", 8), ("theirs", 16), ("ours", 8)]
    until["left"] = -1
    ran, summary, _ = bench("-r", "2", "-b", "auto")
    assert ran == [("theirs", 8), ("ours", 8), ("theirs", 8)]
    assert summary["ratios"]["ours/theirs"]["pairs"] == 2


@pytest.mark.slow
def test_a_smaller_batch_that_took_over_stays(pretend, bench, tmp_path: Path) -> None:
    """At its full length the best batch has no room: the next one is taken, by the next call too."""
    pretend("ours", own=True)
    pretend("theirs")
    bench("-r", "1", "-b", "2,3", "--only-best")
    folder = tmp_path / "out" / "best"
    data = json.loads((folder / "run-01-ours.json").read_text())
    (folder / "run-01-ours.json").unlink()
    failure = {"system": "ours", "batch": 3, "repetition": 1, "reason": "no room", "out_of_memory": True}
    failure |= {"date": data["date"], "settings": data["settings"]}
    (folder / "failed-b3-ours.json").write_text(json.dumps(failure))
    ran, summary, _ = bench("-r", "1", "-b", "2,3", "--only-best")
    assert ran == [("ours", 2)]
    assert summary["batches"] == {"ours": 2, "theirs": 3}
    assert bench("-r", "2", "-b", "2,3", "--only-best")[0] == [("ours", 2), ("theirs", 3)]


@pytest.mark.slow
def test_the_table_says_where_each_part_comes_from(pretend, bench, tmp_path: Path) -> None:
    pretend("ours", own=True)
    pretend("theirs")
    bench("-r", "3")
    folder = tmp_path / "out"
    _long_ago(folder, "run-0[13]-*.json", commit="abc")
    for path in folder.glob("run-02-*.json"):
        host = {**json.loads(path.read_text())["host"], "cpu": "Other"}
        _change(path, date="2026-01-02T00:00:00+00:00", commit="def+", host=host, versions={"fake": "0"})
    _, summary, _ = bench("-r", "3")
    table = (folder / "table.md").read_text()
    assert "Measured repetition 2: 2026-01-02, commit def+, " in table
    assert "; repetitions 1, 3: " in table
    assert "More than one machine: medians mix them, ratios do not." in table
    assert summary["systems"]["ours"]["versions"] == {"fake": "1 and 0"}
    assert [part["repetitions"] for part in summary["measured_in"]] == [[2], [1, 3]]


@pytest.mark.slow
def test_the_table_says_what_a_newcomer_asks(pretend, bench, tmp_path: Path) -> None:
    """Every pair with ours, others by the reference, and where each system put its weights."""
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 3, "chosen": "search", "hidden": {"cpu": 1.0}}
    policy |= {"weights": {"cpu": 0.25, "disk": 0.75}, "cache": {"cpu": 1.0}}
    pretend("ours", {"speed": 4.0, "detail": {"policy": policy}}, own=True)
    everything = {kind: {"cpu": 1.0} for kind in ("weights", "cache", "hidden")}
    pretend("also", {"speed": 2.0, "detail": {"policy": {**policy, **everything}}}, own=True)
    pretend("theirs", {"detail": {"modules_by_place": {"cpu": 3, "disk": 9}}})
    pretend("third")
    bench("-r", "1", "--systems", "third,ours,also,theirs", "--reference", "theirs", "-b", "2,4", "--only-best")
    table = (tmp_path / "out" / "table.md").read_text()
    pairs = [line.split("|")[1].strip() for line in table.splitlines() if " / " in line]
    assert pairs == ["ours / third", "ours / also", "ours / theirs", "also / third", "also / theirs", "third / theirs"]
    batches = "GPU batches of 2, 3 in a block"
    assert (
        f"- ours ran with {batches}, weights 25% cpu and 75% disk, cache 100% cpu, hidden 100% cpu (by search)."
        in table
    )
    assert f"- also ran with {batches}, everything 100% cpu (by search)." in table
    assert "- theirs ran with modules: 3 on cpu, 9 on disk." in table
    plans = [json.loads(path.read_text())["detail"]["plan"] for path in (tmp_path / "out" / "best").glob("run-*")]
    assert sorted(plans) == ["all", "all", "rule", "rule"]  # where batches are searched, ours choose their blocks, too


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "h2o_flexgen").mkdir()
    file = tmp_path / "h2o_flexgen" / "a.py"
    file.touch()
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *arguments], check=True)
    clean = commit(tmp_path)
    assert clean is not None
    assert len(clean) >= 7
    file.write_text("1\n")
    assert commit(tmp_path) == f"{clean}+"
