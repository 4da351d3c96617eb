"""One run of one system: a fresh process, waited for, its memory and its disk reads measured by the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from h2o_flexgen.baselines.work import REFUSED, read_bytes_of
from h2o_flexgen.openmp import SWITCH, without_short_spin

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0  # between asking a process to end and ending it
_KILLED = 128 + signal.SIGKILL
_OUT_OF_MEMORY = ("out of memory", "memoryerror", "can't allocate memory", "cannot allocate memory", "std::bad_alloc")


class Finished(NamedTuple):
    """How a process ended.

    exit_code        as the shell has it, negative for a signal
    last_line        of its stdout, "" where there was none
    errors           the end of its stderr
    seconds          from start to end, imports included
    peak_rss_bytes   the most memory it had resident, by the kernel's count, from start to end
    timed_out        whether it was ended because its time was up
    read_bytes       what it had read from disks, from start to end; None where the kernel does not say
    """

    exit_code: int
    last_line: str
    errors: str
    seconds: float
    peak_rss_bytes: int
    timed_out: bool
    read_bytes: int | None = None

    @property
    def out_of_memory(self) -> bool:
        """Whether it looks as if it had wanted more memory than there was."""
        said = self._last_error.lower()
        return self.exit_code in (_KILLED, -signal.SIGKILL) or any(text in said for text in _OUT_OF_MEMORY)

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        if self.timed_out:
            return f"gave up after {self.seconds:.0f} s"
        if self.exit_code == REFUSED:
            return self._last_error
        ended = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"{'out of memory: ' if self.out_of_memory else ''}{ended}: {self._last_error}"

    @property
    def _last_error(self) -> str:
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        own = [line for line in lines if not line.startswith("memcap: ")]
        killed = [line for line in lines if line.startswith("memcap: the command wanted")]
        return next(reversed(killed or own or lines), "no message").removeprefix("memcap: ")


def run_process(
    module: str,
    arguments: Sequence[str],
    threads: int,
    timeout: float,
    python: str = sys.executable,
    prefix: Sequence[str] = (),
    own: bool = False,
) -> Finished:
    """Runs `python -m module` with as many threads for every library, and waits for it; it never outlives this call.

    `prefix` is a command that runs the one after it, and passes on its streams and its exit code. Unless it is our
    `own`, OpenMP waits in it as it would without this package. The kernel counts a child's memory from that of its
    parent up: the caller should be a small process.
    """
    environment = {
        **without_short_spin(os.environ),
        **({} if own else {SWITCH: "0"}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")))),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(
            [*prefix, python, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
        )
        try:
            peak, read, timed_out = _wait(process, started + timeout, wrapped=bool(prefix))
        finally:
            _end(process)
        lines = _tail(out).strip().splitlines()
        return Finished(
            exit_code=process.returncode,
            last_line=lines[-1] if lines else "",
            errors=_tail(err),
            seconds=time.perf_counter() - started,
            peak_rss_bytes=peak,
            timed_out=timed_out,
            read_bytes=read,
        )


def _wait(process: subprocess.Popen[bytes], deadline: float, wrapped: bool) -> tuple[int, int | None, bool]:
    """Waits; past the deadline ends the process. (peak resident bytes, bytes read from disks, whether that was needed)

    A process that has ended but was not collected still says what it, and the children that it collected, had read.
    """
    timed_out = False
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        now = time.perf_counter()
        if now > deadline + _STOP_SECONDS or (now > deadline and not wrapped):
            _kill(process.pid, itself=True)
            timed_out = True
        elif now > deadline and not timed_out:
            _kill(process.pid, itself=False)  # the command before it then tidies up
            timed_out = True
        time.sleep(_POLL_SECONDS)
    read = read_bytes_of(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * 1024, read, timed_out


def _kill(pid: int, itself: bool) -> None:
    """Ends everything below a process, and the process."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [*top.children(recursive=True), *([top] if itself else [])]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that is still there because waiting for it was interrupted."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process.pid, itself=True)
        process.wait()


def _tail(file: IO[bytes], nbytes: int = 16 << 20) -> str:
    """The last `nbytes` of a file, as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - nbytes))
    return file.read().decode(errors="replace")
