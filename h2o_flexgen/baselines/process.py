"""Programs that are measured: each a fresh process, waited for, its memory and its disk reads counted by the kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from h2o_flexgen.baselines.work import REFUSED, read_bytes_of
from h2o_flexgen.openmp import SWITCH, without_short_spin

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.05
_TIDYING_SECONDS = 30.0  # that a program has to end by itself once it is asked to
_KILLED = 128 + signal.SIGKILL
_OUT_OF_MEMORY = ("out of memory", "memoryerror", "can't allocate memory", "cannot allocate memory", "std::bad_alloc")
_TOLD = "error: "  # with which our programs begin the lines that say what was found, needed and can be changed


class RunFailed(RuntimeError):
    """A run that gave nothing: why, in one line, whether for want of memory, and the end of its stderr."""

    def __init__(self, reason: str, out_of_memory: bool = False, errors: str = "") -> None:
        super().__init__(reason)
        self.out_of_memory, self.errors = out_of_memory, errors


class Finished(NamedTuple):
    """How a process ended.

    exit_code        as the shell has it, negative for a signal
    output           the end of its stdout
    errors           the end of its stderr
    seconds          from start to end, imports included
    peak_rss_bytes   the most memory it had resident, by the kernel's count, from start to end
    timed_out        whether it was ended because its time was up
    read_bytes       what it had read from disks, from start to end; None where the kernel does not say
    """

    exit_code: int
    output: str
    errors: str
    seconds: float
    peak_rss_bytes: int
    timed_out: bool
    read_bytes: int | None = None

    @property
    def last_line(self) -> str:
        """Of its stdout, "" where stdout was empty."""
        return next(reversed(self.output.strip().splitlines()), "")

    @property
    def out_of_memory(self) -> bool:
        """Whether it looks as if it had wanted more memory than there was."""
        if self.timed_out:
            return False
        said = self.last_error.lower()
        return self.exit_code in (_KILLED, -signal.SIGKILL) or any(text in said for text in _OUT_OF_MEMORY)

    @property
    def reason(self) -> str:
        if self.timed_out:
            return f"gave up after {self.seconds:.0f} s"
        if self.exit_code == REFUSED:
            return self.last_error
        ended = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"{'out of memory: ' if self.out_of_memory else ''}{ended}: {self.last_error}"

    def checked(self) -> Finished:
        """This. RunFailed where it is a failure."""
        if self.exit_code != 0 or self.timed_out:
            raise RunFailed(self.reason, self.out_of_memory, self.errors)
        return self

    def json(self) -> dict[str, Any]:
        """The JSON object on the last line of its stdout. RunFailed where it failed, or where there is none."""
        try:
            found = json.loads(self.checked().last_line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RunFailed("no JSON on the last line of its output", errors=self.errors)
        return found

    @property
    def last_error(self) -> str:
        """Its last message, without the lines of memcap that give no reason."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        own = [line for line in lines if not line.startswith("memcap: ")]
        told = next((number for number, line in enumerate(own) if line.startswith(_TOLD)), -1)
        killed = [line for line in lines if line.startswith("memcap: the command wanted")]
        return "; ".join(killed[-1:] or own[told:] or lines[-1:] or ["no message"]).removeprefix("memcap: ")


def run_command(
    command: Sequence[str],
    timeout: float = float("inf"),
    *,
    loud: bool = False,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Runs a program and waits for it, `timeout` seconds at most; it never outlives this call.

    Where its time is up it is asked to end (SIGTERM; by Ctrl-C, which is passed on, SIGINT), and ended with all that it
    started where it does not. `loud` shows its stderr as it comes; `environment` is None for that of this process. The
    kernel counts a child's memory from that of its parent up: the caller should be a small process.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        show = _shown(err) if loud else lambda: None
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=environment,
            process_group=0,
        )
        try:
            timed_out = not _ended(process, timeout, show)
            if timed_out:
                _stop(process, signal.SIGTERM, show)
        except BaseException as error:
            _stop(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM, show)
            raise
        finally:
            read = read_bytes_of(process.pid)
            _, status, usage = os.wait4(process.pid, 0)  # of it, and of the children that it waited for
            process.returncode = os.waitstatus_to_exitcode(status)
            show()
        return Finished(
            exit_code=process.returncode,
            output=_tail(out),
            errors=_tail(err),
            seconds=time.perf_counter() - started,
            peak_rss_bytes=usage.ru_maxrss * 1024,
            timed_out=timed_out,
            read_bytes=read,
        )


def run_process(
    module: str,
    arguments: Sequence[str],
    threads: int,
    timeout: float,
    python: str = sys.executable,
    prefix: Sequence[str] = (),
    own: bool = False,
) -> Finished:
    """Runs `python -m module`, which finds this package, with as many threads for every library.

    `prefix` is a command that runs the one after it, and passes on its streams, its signals and its exit code. Unless
    it is our `own`, OpenMP waits in it as it would without this package. Its memory is counted as of `run_command`.
    """
    environment = {
        **without_short_spin(os.environ),
        **({} if own else {SWITCH: "0"}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")))),
    }
    return run_command([*prefix, python, "-m", module, *arguments], timeout, environment=environment)


def _ended(process: subprocess.Popen[bytes], seconds: float, show: Callable[[], None]) -> bool:
    """Waits so long, and says whether the process has ended. It is not collected yet: it still says what it read."""
    until = time.perf_counter() + seconds
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.perf_counter() > until:
            return False
        time.sleep(_POLL_SECONDS)
        show()
    return True


def _stop(process: subprocess.Popen[bytes], asked: int, show: Callable[[], None]) -> None:
    """Asks a process to end, then ends all its descendants, then itself: memcap has to tidy up after its command.

    The process has ended afterwards, even where that was interrupted.
    """
    top = psutil.Process(process.pid)
    below = set(top.children(recursive=True))
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, asked)
        ended = _ended(process, _TIDYING_SECONDS, show)
        for child in below.union(top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        if not ended:
            _ended(process, _TIDYING_SECONDS, show)
    finally:
        os.kill(process.pid, signal.SIGKILL)


def _shown(file: IO[bytes]) -> Callable[[], None]:
    """A function that copies to stderr all that was written to `file` since its last call."""
    place = 0

    def show() -> None:
        nonlocal place
        while new := os.pread(file.fileno(), 1 << 16, place):  # a position that the writer does not share
            place += len(new)
            sys.stderr.write(new.decode(errors="replace"))
        sys.stderr.flush()

    return show


def _tail(file: IO[bytes], nbytes: int = 16 << 20) -> str:
    """The last `nbytes` of a file, as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - nbytes))
    return file.read().decode(errors="replace")
