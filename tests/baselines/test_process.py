"""The one runner of processes: what it gives back, what it shows, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_flexgen.baselines import process
from h2o_flexgen.baselines.process import Finished, RunFailed, run_command

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
INTERRUPTED = """
import sys
from h2o_flexgen.baselines.process import run_command
run_command([sys.executable, "-c", sys.argv[1]], loud=True)
"""
TIDY = """
import sys, time
try:
    print("asleep", file=sys.stderr, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("tidied", file=sys.stderr, flush=True)
"""


def python(code: str, *arguments: str, **options: float) -> Finished:
    return run_command([sys.executable, "-c", code, *arguments], **options)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_what_a_program_said_and_took() -> None:
    done = python("import sys; x = b'x' * (64 << 20); print('noise'); print('{\"a\": 1}'); print('e', file=sys.stderr)")
    assert (done.exit_code, done.timed_out, done.output, done.errors) == (0, False, 'noise\n{"a": 1}\n', "e\n")
    assert done.json() == {"a": 1}
    assert done.peak_rss_bytes > 64 << 20
    assert done.read_bytes is not None
    assert done.seconds > 0


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('a'); print('[1]')", "no JSON"),
        ("pass", "no JSON"),
        ("print('{'); raise SystemExit('why')", "exit code 1: why"),
        ("print('only on stdout'); raise SystemExit(3)", "exit code 3: only on stdout"),
        (
            "raise SystemExit('x\\nerror: too large\\n  needed 3 GiB\\n  give more')",
            "too large; needed 3 GiB; give more",
        ),
    ],
)
def test_a_program_without_a_result_has_a_reason(code: str, reason: str) -> None:
    with pytest.raises(RunFailed, match=reason):
        python(code).json()


def test_a_program_that_ends_when_asked() -> None:
    done = python("import time; time.sleep(600)", timeout=0.3)
    assert (done.exit_code, done.timed_out, done.out_of_memory) == (-signal.SIGTERM, True, False)
    with pytest.raises(RunFailed, match="gave up after"):
        done.checked()


@pytest.mark.slow
def test_one_that_does_not_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_TIDYING_SECONDS", 0.3)
    done = python(STUBBORN, str(tmp_path / "pids"), timeout=3)
    assert (done.exit_code, done.timed_out, done.out_of_memory) == (-signal.SIGKILL, True, False)
    assert [alive(int(pid)) for pid in (tmp_path / "pids").read_text().split()] == [False, False]


def test_its_stderr_is_shown_as_it_comes(capfd: pytest.CaptureFixture[str]) -> None:
    assert python("import sys; print('é', file=sys.stderr)", loud=True).errors == "é\n"
    assert capfd.readouterr().err == "é\n"


def test_an_interruption_is_passed_on() -> None:
    """Though the program has a process group of its own, which a terminal's Ctrl-C does not reach."""
    command = [sys.executable, "-c", INTERRUPTED, TIDY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as caller:
        assert caller.stderr is not None
        assert caller.stderr.readline() == "asleep\n"
        os.kill(caller.pid, signal.SIGINT)
        rest = caller.communicate(timeout=30)[1]
    assert rest.startswith("tidied\n")
    assert rest.endswith("KeyboardInterrupt\n")
