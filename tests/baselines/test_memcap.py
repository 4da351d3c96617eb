"""scripts/memcap.sh: the cap holds, exit codes and streams pass through, nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "memcap.sh")
WASTE = "x = [b'x' * (1 << 20) for _ in range(300)]"
PATIENT = """
import time
try:
    print("on", flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    raise SystemExit(42)
"""


def memcap(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], input=stdin, capture_output=True, text=True, timeout=30)


def _usable() -> bool:
    return os.geteuid() == 0 and memcap("64M", "--", "true").returncode == 0


needs_groups = pytest.mark.skipif(not _usable(), reason="needs root and the memory controller of control groups")


def _group_of(pid: int) -> list[Path]:
    """The control group of a memcap.sh with this process id."""
    roots = map(Path, ("/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
    return [path for root in roots for path in root.glob(f"h2o_flexgen_memcap_{pid}")]


@needs_groups
def test_a_command_within_its_cap(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = memcap("64MiB", "--report", str(report), "--", "sh", "-c", "cat; echo err >&2; exit 7", stdin="hello")
    assert (done.returncode, done.stdout) == (7, "hello")
    assert "err\n" in done.stderr
    seen = json.loads(report.read_text())
    assert seen["limit_bytes"] == 64 << 20
    assert 0 < seen["peak_bytes"] <= 64 << 20
    assert (seen["oom_kills"], seen["exit_code"]) == (0, 7)


@needs_groups
def test_a_command_that_wants_more_is_ended(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = memcap("64M", "--report", str(report), "--", sys.executable, "-c", WASTE)
    assert done.returncode == 137
    assert "wanted more than 64M" in done.stderr
    assert json.loads(report.read_text())["oom_kills"] == 1


@needs_groups
def test_page_cache_counts_and_can_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    file, report = tmp_path / "sub" / "data", tmp_path / "report.json"
    file.write_bytes(os.urandom(40 << 20))
    arguments = ["16M", "--report", str(report), "--", "sh", "-c", f"cat {file} | wc -c"]
    assert memcap(*arguments).stdout.strip() == str(40 << 20)
    assert json.loads(report.read_text())["peak_bytes"] < 8 << 20  # it was in memory already, and not ours
    arguments[1:1] = ["--cold", str(tmp_path)]
    assert memcap(*arguments).stdout.strip() == str(40 << 20)
    seen = json.loads(report.read_text())
    assert seen["peak_bytes"] > 8 << 20
    assert seen["oom_kills"] == 0


@needs_groups
def test_signals_reach_the_command_and_nothing_stays() -> None:
    process = subprocess.Popen([SCRIPT, "64M", "--", sys.executable, "-c", PATIENT], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    assert _group_of(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 42
    process.stdout.close()
    pid = int(memcap("64M", "--", "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!").stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert not _group_of(process.pid)


@needs_groups
def test_the_exit_code_of_a_command_that_ends_while_its_signal_is_passed_on(tmp_path: Path) -> None:
    slow = tmp_path / "slow.sh"
    slow.write_text('kill() { local code=0; builtin kill "$@" || code=$?; sleep 0.5; return $code; }')
    process = subprocess.Popen(
        [SCRIPT, "64M", "--", sys.executable, "-c", PATIENT],
        stdout=subprocess.PIPE,
        env={**os.environ, "BASH_ENV": str(slow)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 42
    process.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["6", "--", "true"], "needed a number with a unit"),
        (["lots", "--", "true"], "LIMIT is 'lots'"),
        (["64M", "true"], "COMMAND comes after --"),
        (["64M", "--"], "no command"),
        ([], "usage:"),
    ],
)
def test_what_cannot_be_run_says_why(arguments: list[str], message: str) -> None:
    done = memcap(*arguments)
    assert (done.returncode, message in done.stderr) == (125, True), done.stderr


@needs_groups
def test_a_cold_path_that_is_not_there() -> None:
    done = memcap("64M", "--cold", "/nowhere", "--", "true")
    assert (done.returncode, done.stderr) == (125, "memcap: --cold /nowhere: not there\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give it up")
def test_without_root(tmp_path: Path) -> None:
    script = tmp_path / "memcap.sh"
    script.write_bytes(Path(SCRIPT).read_bytes())
    command = "import os; os.setuid(65534); os.execv('/bin/bash', ['bash', '-s', '64M', '--', 'true'])"
    with script.open("rb") as source:
        done = subprocess.run([sys.executable, "-c", command], stdin=source, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (125, "memcap: needs root, to make a control group\n")


def test_help() -> None:
    done = memcap("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: scripts/memcap.sh LIMIT")
