"""Shell scripts that make environments: what they are sourced with, and what an interruption leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_scripts_are_shell_files_of_a_screen() -> None:
    """What takes more is a module of benchmarks, and tested there."""
    files = [path for path in (ROOT / "scripts").rglob("*") if path.is_file()]
    assert [path.name for path in files if path.suffix != ".sh"] == []
    assert [path.name for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 60] == []


def test_every_script_names_what_it_needs() -> None:
    """Without an extra `source` would hand the script's own arguments on, as names of extras."""
    lines = [
        (path.name, line)
        for path in (ROOT / "scripts").glob("*.sh")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"source .*setup_env\.sh", line)
    ]
    assert len(lines) > 5
    assert [name for name, line in lines if not re.fullmatch(r"source scripts/setup_env\.sh \w+", line)] == []


def test_a_half_made_environment_is_mended(tmp_path: Path) -> None:
    """A venv gets its pip last: one that was interrupted has none, and no later run must trip over it."""
    for name in ("setup.py", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    fake = tmp_path / "python3"  # says what it is asked to do, and does nothing
    fake.write_text('#!/bin/sh\ncase "$*" in *venv*) echo "$*" >>asked ;; esac\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"source {ROOT}/scripts/setup_env.sh test"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": str(fake)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tmp_path / "asked").read_text() == "-m venv .venv\n"
    assert done.returncode == 2, done.stderr  # as the one that would have made it did nothing


def test_the_quickstart_installs_what_it_runs() -> None:
    """Tests, documentation and peers bring a hundred packages that the demo has no use for."""
    text = (ROOT / "scripts/quickstart.sh").read_text(encoding="utf-8")
    assert "source scripts/setup_env.sh run\n" in text
    tested = (ROOT / "scripts/test.sh").read_text(encoding="utf-8")
    assert "source scripts/setup_env.sh test\n" in tested


def test_kernels_are_compiled_while_torch_is_installed() -> None:
    """By the files that know how, without the package around them: nothing is installed yet."""
    script = (ROOT / "scripts/setup_env.sh").read_text(encoding="utf-8")
    (command,) = re.findall(r"python -c '(import sys, types; .*?)'", script, re.DOTALL)
    subprocess.run([sys.executable, "-Sc", command], cwd=ROOT, check=True)
