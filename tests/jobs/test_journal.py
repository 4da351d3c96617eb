"""Results and their journal under every failure of the file system, kills at every call among them, without a model."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from h2o_flexgen.errors import H2OFlexGenError, LockedError, StorageError, UsageError
from h2o_flexgen.jobs.journal import FAILED, OK, JobResults
from tests.seeds import moved

LINES = 5
JOB = {"model": "m", "seed": 0}


class Killed(BaseException):
    """Stands for kill -9: nothing is tidied up after it."""


class FaultyCalls:
    """Within it the `nth` of the system's calls for files fails by `fault`; a write may have written some of its bytes
    by then. None waits for the disk."""

    def __init__(self, nth: int, fault: BaseException) -> None:
        self.left, self.fault, self.fired = nth, fault, False
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> FaultyCalls:
        for name in ("open", "pread", "pwrite", "ftruncate", "fsync", "replace", "unlink"):
            self._patch.setattr(os, name, functools.partial(self._call, name, getattr(os, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _call(self, name: str, real: Callable[..., Any], *given: Any) -> Any:
        try:
            self._count()
        except BaseException:
            if name == "pwrite" and len(given[1]) > 1:
                real(given[0], given[1][: len(given[1]) // 2], given[2])
            raise
        if name == "pwrite":
            return real(given[0], given[1][: max(1, len(given[1]) // 2)], given[2])  # short, as a system may
        if name == "pread":
            return real(given[0], min(given[1], 300), given[2])
        return None if name == "fsync" else real(*given)

    def _count(self) -> None:
        self.left -= 1
        # A kill ends everything; a disk that is full stays so for a while.
        if self.left == 0 or (self.fired and isinstance(self.fault, Killed)):
            self.fired = True
            raise self.fault


def text_of(line: int) -> str:
    return f'{{"line": {line}, "text": "{"äö" * line}"}}\n'


def run(folder: Path, *, errors: bool = False, finish: Callable[[JobResults], Any]) -> None:
    """One attempt at a job of LINES requests, of which every third fails, in an order of its own."""
    results = JobResults(folder / "out", folder / "err" if errors else None)
    try:
        results.begin(JOB, LINES)
        order = [line for line in range(1, LINES + 1) if not results.state[line]]
        for line in sorted(order, key=lambda line: line * 5 % 8):
            results.add(line, text_of(line), failed=line % 3 == 0)
            if line == 4:
                results.sync()
        finish(results)
        results.close()
    except Killed:
        for file in (*results._outputs, results._journal):
            if file is not None:
                os.close(file.fd)  # as the system does for who is gone
        raise
    except BaseException:
        results.close()
        raise


def whole(folder: Path) -> list[str]:
    """The results in all output files."""
    texts = [
        path.read_text(encoding="utf-8", errors="replace") for path in (folder / "out", folder / "err") if path.exists()
    ]
    return [line for text in texts for line in text.splitlines(keepends=True)]


ENDS = {
    "sync": lambda results: results.sync(),
    "ordered": lambda results: results.rewrite(ordered=True),
}


FULL, FAILING = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("fault", "end", "errors"),
    [(FULL, "sync", False), (FAILING, "ordered", True), (Killed(), "sync", True), (Killed(), "ordered", False)],
    ids=["full", "failing", "killed", "killed while ordering"],
)
def test_whatever_fails_the_same_command_goes_on(tmp_path: Path, fault: BaseException, end: str, errors: bool) -> None:
    """The n-th call fails, for every n there is: then each result is there once, and finished ones did not change."""
    ours = {"out", "err", "out.journal"}
    for nth in range(1, 400):
        folder = tmp_path / str(nth)
        folder.mkdir()
        with contextlib.suppress(StorageError, Killed), FaultyCalls(nth, fault) as calls:
            run(folder, errors=errors, finish=ENDS[end])
        kept = set(whole(folder)) if end == "sync" else set()
        if not isinstance(fault, Killed) and not (folder / "out.journal.new").exists():
            assert {path.name for path in folder.iterdir()} <= ours, "half of a new file fills the disk"
        with FaultyCalls(0, fault):
            run(folder, errors=errors, finish=ENDS[end])
        found = whole(folder)
        assert sorted(found) == sorted(map(text_of, range(1, LINES + 1))), nth
        assert {line for line in kept if line.endswith("\n")} <= set(found)
        if end == "ordered":
            assert found == [*map(text_of, range(1, 6))] if not errors else [text_of(n) for n in (1, 2, 4, 5, 3)]
        assert {path.name for path in folder.iterdir()} <= ours
        if not calls.fired:
            assert nth > 30
            return
    pytest.fail("there was always another call")


def test_a_loss_of_power_takes_what_was_not_synced(tmp_path: Path) -> None:
    """Of what was appended since the last sync any part may be gone, or be zeros, in one file and not in the other."""
    source = random.Random(moved(3))
    for trial in range(25):
        folder = tmp_path / str(trial)
        folder.mkdir()
        results = JobResults(folder / "out")
        results.begin(JOB, LINES)
        sizes: list[int] = []
        for line in range(1, LINES + 1):
            results.add(line, text_of(line), failed=False)
            if line == 3:
                results.sync()
                sizes = [path.stat().st_size for path in (folder / "out", folder / "out.journal")]
        results._outputs[0].close()
        results._log.close()
        for path, safe in zip((folder / "out", folder / "out.journal"), sizes, strict=True):
            data = path.read_bytes()
            cut = source.randrange(safe, len(data) + 1)
            path.write_bytes(data[:cut] + b"\0" * source.choice([0, 0, len(data) - cut]))
        with JobResults(folder / "out") as again:
            again.begin(JOB, LINES)
            done = [line for line in range(1, LINES + 1) if again.state[line]]
            assert done[:3] == [1, 2, 3]
            assert whole(folder) == [text_of(line) for line in done]


def interrupted_add(results: JobResults, nth: int) -> bool:
    """Adds line 2, and is told to stop before the `nth` instruction of that; False where it has fewer."""
    left = nth

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("/jobs/journal.py", "/jobs/files.py")):
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        results.add(2, text_of(2), failed=False)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_told_to_stop_in_the_middle_of_a_result(tmp_path: Path) -> None:
    """It is finished, and the next run counts it, or nothing of it is in the file."""
    for nth in range(1, 1000):
        folder = tmp_path / str(nth)
        folder.mkdir()
        with JobResults(folder / "out") as results:
            results.begin(JOB, LINES)
            results.add(1, text_of(1), failed=False)
            more = interrupted_add(results, nth)
        written = whole(folder)
        with JobResults(folder / "out") as again:
            again.begin(JOB, LINES)
            assert written == [text_of(line) for line in range(1, LINES + 1) if again.state[line]], nth
        if not more:
            assert nth > 50
            return
    pytest.fail("there was always another instruction")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with JobResults(tmp_path / "out") as results:
        results.begin(JOB, LINES)
        with pytest.raises(LockedError, match=rf"process {os.getpid()} on ") as caught:
            JobResults(tmp_path / "out")
        assert caught.value.exit_code == 7
    with JobResults(tmp_path / "out") as results:  # and of one that is gone nothing is left
        results.begin(JOB, LINES)


def test_two_that_begin_at_once(tmp_path: Path) -> None:
    first, second = JobResults(tmp_path / "out"), JobResults(tmp_path / "out")
    first.begin(JOB, LINES)
    with pytest.raises(LockedError):
        second.begin(JOB, LINES)
    first.add(1, text_of(1), failed=False)
    first.close()
    assert whole(tmp_path) == [text_of(1)]


def test_what_failed_is_run_again(tmp_path: Path) -> None:
    run(tmp_path, finish=lambda results: None, errors=True)
    with JobResults(tmp_path / "out", tmp_path / "err") as results:
        results.begin(JOB, LINES)
        assert [results.state.count(state) for state in (OK, FAILED)] == [4, 1]
        results.rewrite(ordered=False, keep_failed=False)
        assert (tmp_path / "err").read_text() == ""
        for line in (3,):
            assert not results.state[line]
            results.add(line, text_of(line), failed=False)
    assert sorted(whole(tmp_path)) == sorted(map(text_of, range(1, LINES + 1)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda folder: (folder / "out").write_text("mine"), "no longer what was written"),
        (lambda folder: (folder / "out").unlink(), "no longer what was written"),
        (lambda folder: (folder / "out.journal").write_text("mine"), "not the journal of a job"),
        (lambda folder: (folder / "out.journal").unlink(), "no journal"),
    ],
)
def test_files_that_somebody_changed_are_left_alone(
    tmp_path: Path, change: Callable[[Path], object], found: str
) -> None:
    run(tmp_path, finish=lambda results: None)
    change(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=found), JobResults(tmp_path / "out") as results:
        results.begin(JOB, LINES)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_made_before_a_killed_job_made_its_own(tmp_path: Path) -> None:
    """The journal is there, the output is not yet; somebody else's file then is not taken for it."""
    run(tmp_path, finish=lambda results: None)
    header = (tmp_path / "out.journal").read_bytes().split(b"\n")[0] + b"\n"
    (tmp_path / "out.journal").write_bytes(header)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="no journal"), JobResults(tmp_path / "out") as results:
        results.begin(JOB, LINES)
    assert (tmp_path / "out").read_text() == "mine"
    with JobResults(tmp_path / "out", overwrite=True) as results:
        results.begin(JOB, LINES)
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize("where", ["nowhere/out", "."])
def test_places_where_no_results_can_be(tmp_path: Path, where: str) -> None:
    with pytest.raises(H2OFlexGenError) as caught:
        JobResults(tmp_path / where)
    assert caught.value.exit_code == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else for a while")
def test_a_folder_of_somebody_else_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        for name in ("new", "old"):
            with pytest.raises(UsageError, match=f"{name}: [pP]ermission denied"):
                JobResults(tmp_path / name, overwrite=True)
    finally:
        os.seteuid(0)


def test_a_journal_that_cannot_be_there_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "out.journal").mkdir()
    for name, why in (("out", "Is a directory"), ("x" * 250, "File name too long")):
        with pytest.raises(UsageError, match=rf"{why}\. needed a file that can be written\. name another --output"):
            JobResults(tmp_path / name)


def test_a_file_where_the_journal_has_to_be_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.journal").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"--overwrite replaces jobs only\. move it away, or name another"):
            JobResults(tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out.journal").read_text() == "mine"


@pytest.mark.parametrize("more", [b"", b"words of a size that no result has\n" * 9], ids=["cut", "written to"])
@pytest.mark.parametrize("name", ["out", "out.journal"])
def test_results_that_somebody_else_changes_meanwhile(tmp_path: Path, name: str, more: bytes) -> None:
    """A job ended well, with zeros or nothing in the place of results."""
    with JobResults(tmp_path / "out") as results:
        results.begin(JOB, LINES)
        results.add(1, text_of(1), failed=False)
        with open(tmp_path / name, "r+b") as file:
            file.truncate(0)
            file.write(more)
        for again in (lambda: results.add(2, text_of(2), failed=False), results.sync):
            with pytest.raises(StorageError, match=rf"{name} was changed by somebody else while the job wrote to it"):
                again()
    assert (tmp_path / name).read_bytes() == more


@pytest.mark.parametrize("copied", [False, True], ids=["removed", "replaced"])
@pytest.mark.parametrize("name", ["out", "out.journal"])
def test_results_that_are_removed_meanwhile(tmp_path: Path, name: str, copied: bool) -> None:
    """All later answers would have gone nowhere, and the job ended well; a copy in their place is an editor's."""
    with JobResults(tmp_path / "out") as results:
        results.begin(JOB, LINES)
        results.add(1, text_of(1), failed=False)
        (tmp_path / name).rename(tmp_path / "elsewhere")
        if copied:
            (tmp_path / name).write_bytes((tmp_path / "elsewhere").read_bytes())
        with pytest.raises(StorageError, match=f"{name} was removed or renamed while the job wrote to it"):
            results.sync()
        results.add(2, text_of(2), failed=False)
        (tmp_path / "elsewhere").rename(tmp_path / name)
    with JobResults(tmp_path / "out") as results:
        results.begin(JOB, LINES)
        assert [line for line in range(1, LINES + 1) if results.state[line]] == [1, 2]
