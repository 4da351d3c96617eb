"""How the sources of this folder become a library. Of the standard library alone: `setup.py` makes wheels with it."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

FLAGS = ("-O3", "-fno-math-errno", "-std=c11", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-unused-parameter")
"""Tasks of threads share one signature, of which not each needs all: a parameter that is not used is no fault."""
_AVX512 = ("-march=x86-64-v4", "-mavx512vnni")
IS_ARM = platform.machine() == "aarch64"
MACHINES = {
    "neondot": ("-march=armv8.2-a+dotprod",),
    "neon": ("-march=armv8-a",),
    "avx512": (*_AVX512, "-mavx512bf16"),
    "avx512vnni": _AVX512,
    "avx512bw": ("-march=x86-64-v4",),
    "avxvnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx2": ("-march=x86-64-v3",),
}
"""A compiler's flags for each kind of processors that wheels have libraries for."""
SHIPPED = "shipped"
"""The folder beside the sources in which a wheel has them."""
FOLDER = Path(__file__).parent
TIMEOUT_S = 300  # a compiler takes seconds; beside others on few cores it may take minutes
_LINKER = "-Wl,-Bsymbolic,--no-undefined"  # calls stay within the library, whatever others define
_COMPILERS = 2  # at a time: each takes a processor and up to 200 MB


def find_compiler() -> str | None:
    """The first C compiler that there is, of $CC and the usual names."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def file_of(machine: str) -> str:
    """The name in a wheel of the library for a kind of processors."""
    return f"kernels-{machine}.so"


def of_this_family() -> dict[str, tuple[str, ...]]:
    """The MACHINES that a compiler here knows: 64-bit ARM's, or Intel's and AMD's."""
    return {name: flags for name, flags in MACHINES.items() if name.startswith("neon") == IS_ARM}


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.c"))


def build(compiler: str, flags: Sequence[str], target: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Compiles the library to `target`, at once: another process that builds the same ends up with the same. Raises
    subprocess.SubprocessError, also after `timeout_s` seconds of a compiler, or OSError."""
    started: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(dir=target.parent) as made, ThreadPoolExecutor(_COMPILERS) as pool:
        # Compilers that are killed leave temporary files behind.
        run = partial(_run, timeout_s=timeout_s, started=started, environment={**os.environ, "TMPDIR": made})
        objects = [str(Path(made) / f"{source.stem}.o") for source in sources()]
        each = [[compiler, *flags, "-c", str(c), "-o", o] for c, o in zip(sources(), objects, strict=True)]
        linked = Path(made, target.name)
        try:
            list(pool.map(run, each))
            run([compiler, "-shared", "-pthread", _LINKER, *objects, "-o", str(linked), "-lm"])
        except BaseException:
            for process in started:
                _stop(process)
            raise
        linked.replace(target)


def _run(
    command: list[str], timeout_s: float, started: list[subprocess.Popen[str]], environment: dict[str, str]
) -> None:
    """In a process group, which goes to `started`: a compiler that is killed alone leaves the programs it started."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        process_group=0,
    ) as process:
        started.append(process)
        try:
            output, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _stop(process)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, said)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
