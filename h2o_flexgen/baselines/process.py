"""One run of one system: a fresh process, waited for, its memory measured by the kernel."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0  # between asking a process to end and ending it


class Finished(NamedTuple):
    """How a process ended.

    exit_code        as the shell has it, negative for a signal
    last_line        of its stdout, "" where there was none
    errors           the end of its stderr
    seconds          from start to end, imports included
    peak_rss_bytes   the most memory it had resident, by the kernel's count, from start to end
    timed_out        whether it was ended because its time was up
    """

    exit_code: int
    last_line: str
    errors: str
    seconds: float
    peak_rss_bytes: int
    timed_out: bool

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        if self.timed_out:
            return f"gave up after {self.seconds:.0f} s"
        last = next((line.strip() for line in reversed(self.errors.splitlines()) if line.strip()), "no message")
        ended = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"{ended}: {last}"


def run_process(module: str, arguments: Sequence[str], threads: int, timeout: float) -> Finished:
    """Runs `python -m module` with as many threads for every library, and waits for it; it never outlives this call.

    The kernel counts a child's memory from that of its parent up: the caller should be a small process.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")))),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
        )
        try:
            usage, timed_out = _wait(process, started + timeout)
        finally:
            _end(process)
        lines = _tail(out).strip().splitlines()
        return Finished(
            exit_code=process.returncode,
            last_line=lines[-1] if lines else "",
            errors=_tail(err),
            seconds=time.perf_counter() - started,
            peak_rss_bytes=usage.ru_maxrss * 1024,
            timed_out=timed_out,
        )


def _wait(process: subprocess.Popen[bytes], deadline: float) -> tuple[resource.struct_rusage, bool]:
    """Waits and takes what the kernel counted; past the deadline ends the process. (usage, whether that was needed)"""
    timed_out = False
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage, timed_out
        if not timed_out and time.perf_counter() > deadline:
            # Popen.kill would collect a process that has just ended, and its usage with it.
            os.kill(process.pid, signal.SIGKILL)
            timed_out = True
        time.sleep(_POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that is still there because waiting for it was interrupted."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(file: IO[bytes], nbytes: int = 16 << 20) -> str:
    """The last `nbytes` of a file, as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - nbytes))
    return file.read().decode(errors="replace")
