"""FAULTS rows 8 to 10 through the program: offload folders that are shared, left behind or not to be trusted."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.planning.llm import LLM
from tests.faults.test_interrupts import slow_steps
from tests.programs import Child, Run, answers, left_in, until

DISK_CACHE = ("--cache-placement", "disk", "--gpu-batch-size", 2, "--num-gpu-batches", 2)
PACKED = ("--weights-placement", "disk", "--dtype", "bfloat16")
WORK = ("--prompt-len", 9, "--num-prompts", 4, "--gen-len", 4)


def test_row_08_two_runs_share_an_offload_folder(tmp_path: Path, model: Path, run: Run) -> None:
    offload, marker = tmp_path / "offload", tmp_path / "marker"
    arguments = ("--model", model, *PACKED, *DISK_CACHE, *WORK, "--offload-dir", offload)
    outputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with Child(tmp_path, *arguments, "-o", outputs[0], before=slow_steps(marker, 1, 0.02)) as child:
        until(marker.exists)
        theirs = left_in(offload)
        assert len(theirs) == 1, "each run has a folder of its own"
        mine = run(*arguments, "-o", outputs[1])
        assert (mine.code, left_in(offload)) == (0, theirs)
        assert child.wait().code == 0
    assert answers(outputs[0]) == answers(outputs[1])
    assert left_in(offload) == []


def test_row_09_a_run_that_was_killed_is_cleaned_up_with_a_notice(tmp_path: Path, model: Path, run: Run) -> None:
    offload, marker = tmp_path / "offload", tmp_path / "marker"
    arguments = ("--model", model, *DISK_CACHE, *WORK, "--offload-dir", offload)
    with Child(tmp_path, *arguments, before=slow_steps(marker, 1)) as child:
        until(marker.exists)
        child.kill(signal.SIGKILL)
        pid = child.pid
        assert child.wait().code == 128 + signal.SIGKILL
    (left,) = left_in(offload)
    ran = run(*arguments)
    assert ran.code == 0
    assert f"warning: removing {offload / left}, left behind by pid {pid} on " in ran.err
    assert left_in(offload) == []


def hostile(kind: str, folder: Path) -> Path:
    path = folder / "offload"
    if kind == "a file":
        path.write_text("mine")
    elif kind == "a link":
        (folder / "elsewhere").mkdir()
        path.symlink_to(folder / "elsewhere")
    elif kind == "writable by all":
        path.mkdir()
        path.chmod(0o777)
    elif kind == "below a file":
        (folder / "file").write_text("")
        path = folder / "file" / "offload"
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("a file", "is not a folder"),
        ("below a file", "a file stands where a folder is needed"),
        ("a link", "is a symbolic link"),
        ("writable by all", "can be written by every user"),
    ],
)
def test_row_10_offload_folders_that_are_refused(tmp_path: Path, model: Path, run: Run, kind: str, words: str) -> None:
    path = hostile(kind, tmp_path)
    ran = run("--model", model, *DISK_CACHE, *WORK, "--offload-dir", path)
    assert ran.code == 2
    assert str(path) in ran.err
    assert words in ran.err
    if kind == "a link":
        assert list((tmp_path / "elsewhere").iterdir()) == []


def test_row_10_an_offload_folder_that_cannot_be_made(model: Path, run: Run) -> None:
    ran = run("--model", model, *DISK_CACHE, *WORK, "--offload-dir", "/proc/offload")
    assert ran.code == 6
    assert "cannot make the offload folder /proc/offload" in ran.err
    assert "name another with --offload-dir" in ran.err


def test_row_10_a_name_that_no_folder_can_have(tmp_path: Path, model: Path, run: Run) -> None:
    """Which only a run that puts something there minds. So it is below a folder that may not be looked into."""
    path = tmp_path / ("a" * 300)
    assert run("--model", model, *WORK, "--offload-dir", path).code == 0
    ran = run("--model", model, *DISK_CACHE, *WORK, "--offload-dir", path)
    assert ran.code == 6
    assert f"cannot make the offload folder {path}: File name too long" in ran.err
    assert "name another with --offload-dir" in ran.err


def test_row_10_the_run_folder_is_private(
    tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: dict[str, int] = {}
    original = LLM._runner

    def look(self: LLM, loaded: Any, *rest: Any) -> Any:
        for path in [tmp_path / "offload", *(tmp_path / "offload").rglob("*")]:
            modes[path.name] = path.stat().st_mode & 0o777
        return original(self, loaded, *rest)

    monkeypatch.setattr(LLM, "_runner", look)
    assert run("--model", model, *PACKED, *DISK_CACHE, *WORK, "--offload-dir", tmp_path / "offload").code == 0
    assert len(modes) > 5
    assert not [name for name, mode in modes.items() if mode & 0o077]
