"""scripts/memcap.sh: the cap holds, exit codes and streams pass through, nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from h2o_flexgen.baselines import memcap as module

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "memcap.sh")
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


USABLE = _usable()
needs_groups = pytest.mark.skipif(not USABLE, reason="needs root and the memory controller of control groups")


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


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder whose pages can be dropped: tmp_path may lie in memory."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@needs_groups
def test_page_cache_counts_and_can_be_dropped(on_disk: Path, tmp_path: Path) -> None:
    (on_disk / "sub").mkdir()
    file, report = on_disk / "sub" / "data", tmp_path / "report.json"
    file.write_bytes(os.urandom(40 << 20))
    arguments = ["16M", "--report", str(report), "--", "sh", "-c", f"cat {file} | wc -c"]
    assert memcap(*arguments).stdout.strip() == str(40 << 20)
    assert json.loads(report.read_text())["peak_bytes"] < 8 << 20  # it was in memory already, and not ours
    arguments[1:1] = ["--cold", str(on_disk)]
    assert memcap(*arguments).stdout.strip() == str(40 << 20)
    seen = json.loads(report.read_text())
    assert seen["peak_bytes"] > 8 << 20
    assert seen["oom_kills"] == 0


@pytest.mark.slow
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
    slow = "import os, time\nkill = os.killpg\nos.killpg = lambda *given: (kill(*given), time.sleep(0.5))\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    process = subprocess.Popen(
        [SCRIPT, "64M", "--", sys.executable, "-c", PATIENT],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
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
def test_without_root() -> None:
    call = "os.setuid(65534); main(['64M', '--', 'true'])"
    command = f"import os, shutil; from h2o_flexgen.baselines.memcap import main; {call}"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (125, "memcap: needs root, to make a control group\n")


def test_help() -> None:
    done = memcap("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: scripts/memcap.sh LIMIT")


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Whether processes can be capped is asked once in a process."""
    module.cap_problem.cache_clear()
    yield
    module.cap_problem.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", None),
        ("echo careful >&2; echo 'memcap: needs root' >&2; exit 1", "needs root"),
        ("exit 3", "memcap ended with 3, and said nothing"),
    ],
)
def test_the_last_line_says_why_nothing_is_capped(
    script: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memcap").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "memcap").chmod(0o755)
    monkeypatch.setattr(module, "COMMAND", (str(tmp_path / "memcap"),))
    assert module.cap_problem() == said


@pytest.mark.parametrize(("limit", "said"), [(6 << 30, "6G"), (1536 << 20, "1536M"), (1 << 40, "1T"), ("6GiB", "6GiB")])
def test_limits_as_they_are_typed(limit: int | str, said: str) -> None:
    command = module.cap_command(limit, [Path("a"), Path("b")], Path("c"))
    assert command[-8:] == [said, "--report", "c", "--cold", "a", "--cold", "b", "--"]


@pytest.mark.slow
def test_an_installed_package_runs_and_caps_its_own_engine(tmp_path: Path) -> None:
    """From a wheel, in a folder that has nothing else of the repository: `bench` within 2 GiB, where that can be."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "h2o_flexgen", "configs"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")
    bench = [sys.executable, "-m", "h2o_flexgen.bench", "--systems", "full", "--model", "demo", "--dtype", "float32"]
    bench += ["--weights", "checkpoint", "-r", "1", "-b", "2", "--prompt-len", "8", "--gen-len", "4", "--threads", "1"]
    done = subprocess.run(
        [*bench, "--cpu-mem", "2GiB", "--output-dir", str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    summary = json.loads(last)
    assert summary["systems"]["full"]["peak_rss_bytes"]["median"] > 1 << 26
    assert "| full |" in "\n".join(table)
    record = json.loads((tmp_path / "out" / "run-01-full.json").read_text())
    assert record["detail"]["eviction"]["name"] == "full"
    assert record["commit"] is None  # of no checkout: it is the installed one that ran
    assert summary["cap"]["enforced"] is USABLE
    if USABLE:
        assert summary["cap"] == {"cpu_mem": 2 << 30, "enforced": True, "why_not": None}
        assert 0 < record["peak_cgroup_bytes"] <= 2 << 30
