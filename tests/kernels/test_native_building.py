"""Building of the native library, by compilers that do not do what they should."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from h2o_flexgen.kernels.native import building


def test_a_compiler_in_time_out_takes_its_programs_along(tmp_path: Path) -> None:
    compiler, pids = tmp_path / "cc", tmp_path / "pids"
    compiler.write_text(f"#!/bin/sh\nsleep 600 & echo $! >> {pids}\nwait\n")
    compiler.chmod(0o755)
    begun, pipes = time.monotonic(), psutil.Process().num_fds()
    with pytest.raises(subprocess.TimeoutExpired) as held:
        building.build(str(compiler), [], tmp_path / "kernels.so", timeout_s=3)
    assert time.monotonic() - begun < 60
    time.sleep(0.2)
    left = [int(pid) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]
    assert all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in left)
    assert not list(tmp_path.glob("tmp*"))
    assert psutil.Process().num_fds() == pipes, held  # Python warns of what it has to close itself


def test_what_a_compiler_leaves_behind_goes_with_the_rest(tmp_path: Path) -> None:
    """One that is killed leaves its temporary files, whose folder may be full as well."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ntouch "${TMPDIR:-/tmp}/left.s"\nexit 1\n')
    compiler.chmod(0o755)
    (tmp_path / "built").mkdir()
    with pytest.raises(subprocess.CalledProcessError):
        building.build(str(compiler), [], tmp_path / "built" / "kernels.so")
    assert not list((tmp_path / "built").iterdir())
    assert not (Path(tempfile.gettempdir()) / "left.s").exists()


@pytest.mark.parametrize("machine", ["avx2", "avx512bw", "avx512"])
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_compilers_have_nothing_to_warn_of(tmp_path: Path, name: str, machine: str) -> None:
    compiler = shutil.which(name)
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip(f"no {name} for x86-64 here")
    flags = [*building.FLAGS, *building.MACHINES[machine], "-O1", "-Werror"]  # gcc's headers have other macros at -O0
    source = building.FOLDER / "few.c"  # the smallest that includes all
    done = subprocess.run([compiler, *flags, "-c", str(source), "-o", str(tmp_path / "few.o")], capture_output=True)
    assert not done.returncode, done.stderr.decode()
