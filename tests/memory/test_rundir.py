from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from h2o_flexgen.errors import StorageError, UsageError
from h2o_flexgen.memory.rundir import OffloadDir

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
from h2o_flexgen.memory.rundir import OffloadDir
folder = OffloadDir(sys.argv[1])
folder.new_file("region")
print(folder.run_path, flush=True)
{then}
"""


def another_run(path: Path, then: str = "time.sleep(60)") -> tuple[subprocess.Popen[str], Path]:
    """A run in a process of its own, and its run folder."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(then=then), str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_a_run_folder_is_private_and_goes_at_close(tmp_path: Path) -> None:
    with OffloadDir(tmp_path / "a" / "off") as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert folder.run_path.stat().st_mode & 0o777 == 0o700
        words = (folder.run_path / "lock").read_text().split()
        assert words[0] == str(os.getpid())
        path, fd = folder.new_file("region")
        os.close(fd)
        assert Path(path).parent == folder.run_path
        assert Path(path).stat().st_mode & 0o777 == 0o600
        folder.remove_file(path)
        folder.remove_file(path)
        assert not Path(path).exists()
        with pytest.raises(ValueError, match="plain word"):
            folder.new_file("../evil")
    folder.close()
    assert os.listdir(folder.path) == ["lock"]


def test_two_runs_share_the_folder(tmp_path: Path) -> None:
    child, theirs = another_run(tmp_path / "off")
    try:
        with OffloadDir(tmp_path / "off") as folder, OffloadDir(tmp_path / "off") as second:
            assert len({theirs, folder.run_path, second.run_path}) == 3
            assert theirs.is_dir(), "a living run's folder stays"
    finally:
        child.terminate()
        assert child.wait(10) == 143
    assert not theirs.exists(), "SIGTERM, turned into an exit by the program, leaves nothing"


def test_a_crashed_run_is_cleaned_up_with_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    child, theirs = another_run(tmp_path / "off")
    child.kill()
    child.wait(10)
    assert len(os.listdir(theirs)) == 2
    nameless = tmp_path / "off" / "run-1-0123456789abcdef"
    nameless.mkdir()
    mine = tmp_path / "off" / "run-notes"
    mine.mkdir()
    with caplog.at_level(logging.WARNING), OffloadDir(tmp_path / "off"):
        assert not theirs.exists()
        assert not nameless.exists()
        assert mine.is_dir(), "only names of our own making are touched"
    assert f"left behind by pid {child.pid} on" in caplog.text


def test_removal_never_follows_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (tmp_path / "off").mkdir()
    link = tmp_path / "off" / "run-7-0123456789abcdef"
    link.symlink_to(precious)
    with OffloadDir(tmp_path / "off") as folder:
        (folder.run_path / "inner").symlink_to(precious)
    assert link.is_symlink()
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_exit_without_close_removes_the_folder(tmp_path: Path) -> None:
    child, theirs = another_run(tmp_path / "off", then="")
    assert child.wait(10) == 0
    assert not theirs.exists()


def test_interrupt_removes_the_folder(tmp_path: Path) -> None:
    child, theirs = another_run(tmp_path / "off")
    child.send_signal(signal.SIGINT)
    assert child.wait(10) != 0
    assert not theirs.exists()


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    child, theirs = another_run(tmp_path / "off", then="import os\nif os.fork() == 0: sys.exit()\nos.wait(); print(1)")
    assert child.stdout is not None
    assert child.stdout.readline() == "1\n"
    child.wait(10)
    assert not theirs.exists()


def test_paths_that_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(UsageError, match="symbolic link"):
        OffloadDir(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="symbolic link"):
        OffloadDir(tmp_path / "dangling")
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="folder"):
            OffloadDir(path)
    real.chmod(0o1777)
    with pytest.raises(UsageError, match="written by every user"):
        OffloadDir(real)
    OffloadDir(real / "inside").close()
    assert not (tmp_path / "nowhere").exists()


def test_a_link_above_the_folder_is_fine(tmp_path: Path) -> None:
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big-disk")
    OffloadDir(tmp_path / "link" / "off").close()


def test_a_parent_that_others_may_rename_in_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    OffloadDir(tmp_path / "off").close()
    tmp_path.chmod(0o700)
    assert "written by every user" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's folder")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "off").mkdir()
    os.chown(tmp_path / "off", 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        OffloadDir(tmp_path / "off")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "off").mkdir(mode=0o500)
    with pytest.raises(StorageError):
        OffloadDir(tmp_path / "off")


def test_links_planted_at_our_names_are_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "lock").symlink_to(victim)
    with pytest.raises(StorageError, match="lock"):
        OffloadDir(tmp_path / "off")
    (tmp_path / "off" / "lock").unlink()
    with OffloadDir(tmp_path / "off") as folder:
        with folder.packed("model") as path:
            pass
        (path / "lock").unlink()
        path.rmdir()
        path.symlink_to(tmp_path)
        with pytest.raises(StorageError, match="packed-"), folder.packed("model"):
            pass
        (folder.run_path / "region-000001.bin").symlink_to(victim)
        with pytest.raises(StorageError, match="region-000001"):
            folder.new_file("region")
    assert victim.read_text() == "keep"


def test_packed_folders_stay_and_are_held_by_one_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order = []
    entered = threading.Event()

    def second() -> None:
        with OffloadDir(tmp_path / "off") as other:
            entered.set()
            with other.packed("opt/../x") as path:
                order.append(f"second sees {sorted(os.listdir(path))}")

    with OffloadDir(tmp_path / "off") as folder:
        with folder.packed("opt/../x") as path, folder.packed("another model") as elsewhere:
            assert elsewhere != path
            assert path.parent == folder.path
            thread = threading.Thread(target=second)
            thread.start()
            entered.wait(10)
            deadline = time.monotonic() + 10
            while "waiting for the packed weights" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
            order.append("first done")
            (path / "unit-0001.bin").write_text("x")
        thread.join(10)
    assert order == ["first done", "second sees ['lock', 'unit-0001.bin']"]
    assert f"held by pid {os.getpid()} on" in caplog.text
    assert path.is_dir(), "packed weights are for later runs"


def test_a_folder_that_is_locked_for_an_instant_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that begin at once: the lock of the one is not signed yet, and free before that could be told."""
    OffloadDir(tmp_path / "off").close()
    fd = os.open(tmp_path / "off/lock", os.O_RDWR | os.O_TRUNC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    monkeypatch.setattr("time.sleep", lambda _: os.close(fd))
    OffloadDir(tmp_path / "off").close()
    assert caplog.text == ""


def test_free_space(tmp_path: Path) -> None:
    with OffloadDir(tmp_path / "off") as folder:
        assert folder.free_bytes() > 0
        folder.require_free(1, "kv cache")
        with pytest.raises(StorageError, match="kv cache needs") as full:
            folder.require_free(1 << 62, "kv cache")
        assert full.value.exit_code == 6


def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StorageError, match="cannot lock"):
        OffloadDir(tmp_path / "off")


def test_a_folder_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: object, *rest: object, **named: object) -> int:
        raise OSError(5, os.strerror(5), str(path))

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(StorageError, match="cannot open the offload folder"):
        OffloadDir(tmp_path / "offload")
