"""Where the package keeps things: at home, and where there is no home or it cannot be written."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from h2o_flexgen import folders
from h2o_flexgen.folders import cached, expanded

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    folders._temporary.cache_clear()


def test_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not yet there"))
    assert cached("native", "a.so") == tmp_path / "not yet there" / "h2o_flexgen" / "native" / "a.so"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cached() == tmp_path / ".cache" / "h2o_flexgen"


def test_what_cannot_be_written_is_read_where_it_is_and_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an image whose kernels were compiled when it was made, and whose file system is read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = tmp_path / "cache" / "h2o_flexgen" / "native" / "a.so"
    there.parent.mkdir(parents=True)
    there.touch()
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: tmp_path / "cache" not in Path(path).parents and may(path, mode)
    )
    with caplog.at_level(logging.WARNING):
        assert cached("native", "a.so") == there
        assert not caplog.records
        own = tmp_path / "temporary" / f"h2o_flexgen-{os.getuid()}"
        assert [cached("native", "b.so"), cached("offload")] == [own / "native" / "b.so", own / "offload"]
    assert len(caplog.records) == 1, "one warning"
    assert own.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_a_temporary_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch, trap: str) -> None:
    """Kernels are loaded from it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    own = tmp_path / "temporary" / f"h2o_flexgen-{os.getuid()}"
    if trap == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "theirs")
    elif trap == "open":
        own.mkdir()
        own.chmod(0o777)
    else:
        own.touch()
    found = cached("native")
    assert found.parent != own
    assert found.parent.stat().st_mode & 0o777 == 0o700


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(path))  # what it does for an unknown user id
    assert expanded("~/models") == Path("~/models")
    assert cached("offload").parent.parent == tmp_path / "temporary"


def test_nothing_that_can_be_written_is_no_error_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container of a read-only image."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "file")])
    assert cached("offload") == tmp_path / "file" / "h2o_flexgen" / "offload"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may take another user id")
@pytest.mark.slow
def test_a_user_without_a_name_or_a_home_runs_the_demo(tmp_path: Path) -> None:
    """As in a container that was started with a user id of its own."""
    code = """
import os, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
from h2o_flexgen.run import main
sys.exit(main(["--prompt", "Remember", "--gen-len", "2", "--no-json", "-q"]))
"""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TMPDIR": "/tmp"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    if "PermissionError" in ran.stderr or "ModuleNotFoundError" in ran.stderr:
        pytest.skip("the interpreter or the sources cannot be read by others")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("warning:") == ran.stderr.count("cannot be written") == 1
    assert ">>>" in ran.stdout
