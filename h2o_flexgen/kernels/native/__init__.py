"""Kernels in C for x86-64 CPUs: written for AVX-512 with bfloat16, run on AVX2 as well. How to compile and call them.

The sources of this folder are compiled once per machine and loaded as one library. It lies in the user's cache folder
under a name made of everything it depends on: the sources, the compiler and the processor. H2O_FLEXGEN_NATIVE=0 leaves
native kernels out, as does a machine without a compiler; torch then does the same work, as for other dtypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c11", "-fPIC", "-pthread", "-Wall", "-Wextra")
_SLOW_BF16 = "-DSLOW_BF16"  # Intel's: half the products of float32's instructions on a Xeon of 2023, 85 and 175 GFLOP/s
_LINKER = "-Wl,-Bsymbolic,--no-undefined"  # calls stay within the library, whatever others define
_TIMEOUT_S = 300  # a compiler takes seconds; beside others on few cores it may take minutes
_FOLDER = Path(__file__).parent
_building = Lock()
_COMPILERS = 2  # at a time: each takes a processor and up to 200 MB
_LETTERS: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "l": ctypes.c_long,
    "i": ctypes.c_int,
    "d": ctypes.c_double,
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled sources of this folder, one library; None where it cannot be had, which `why_not` explains.

    Some seconds the first time on a machine, milliseconds from then on: called before anything is measured, so that no
    compiler runs within it.
    """
    if why_not() is not None:
        return None
    try:
        with _building:  # threads that call at the same time get one compilation
            return ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the native kernels could not be built, torch's are slower: %s", _reason(error))
        return None


@cache
def function(name: str, arguments: str, result: str = "") -> Callable[..., Any]:
    """The compiled function `name`. RuntimeError where there are no native kernels, which `library` tells before.

    `arguments` and `result` have a letter for each type, those of the `struct` module: P for pointers, q for int64_t.
    """
    found = library()
    if found is None:
        raise RuntimeError(f"no native kernel {name}: {why_not() or 'they could not be built'}")
    call = found[name]
    call.argtypes, call.restype = [_LETTERS[letter] for letter in arguments], _LETTERS.get(result)
    return call


def fields(*groups: str) -> list[tuple[str, Any]]:
    """The fields of a C structure, in order: `fields("P k v", "q rows")` are two pointers and a number."""
    return [(name, _LETTERS[letter]) for letter, *names in map(str.split, groups) for name in names]


def must_compile() -> bool:
    """Whether `library` would take some seconds now, to compile what no earlier run on this machine has."""
    try:
        return why_not() is None and not library.cache_info().currsize and not _target().exists()
    except (OSError, subprocess.SubprocessError):  # which `library` reports
        return False


@cache
def why_not() -> str | None:
    """Why there are no native kernels here, in a few words; None where there are."""
    if os.environ.get("H2O_FLEXGEN_NATIVE", "1").lower() in ("0", "false", "no", "off"):
        return "H2O_FLEXGEN_NATIVE is 0"
    if platform.system() != "Linux" or not {"avx2", "fma"} <= cpu_flags():
        return "the processor has no AVX2"
    if _compiler() is None:
        return "no C compiler was found"
    return None


def has_matrix_unit() -> bool:
    """Whether the processor multiplies tiles of bfloat16 numbers (AMX), and shows it to this system."""
    return "amx_bf16" in cpu_flags()


def _target() -> Path:
    """Where the library is, or has to be, whose name says all that it depends on."""
    compiler = _compiler()
    assert compiler is not None, "`why_not` says so before"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    texts = [path.read_text(encoding="utf-8") for path in (*_sources(), *sorted(_FOLDER.glob("*.h")))]
    facts = [*texts, version.stdout, *_flags(), *sorted(cpu_flags())]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20]
    return _cache_folder() / f"kernels-{digest}.so"


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.c"))


def _compiled() -> Path:
    compiler, sources, target = _compiler(), _sources(), _target()
    assert compiler is not None, "`why_not` says so before"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as made, ThreadPoolExecutor(_COMPILERS) as pool:
            objects = [str(Path(made) / f"{source.stem}.o") for source in sources]
            each = [[compiler, *_flags(), "-c", str(c), "-o", o] for c, o in zip(sources, objects, strict=True)]
            list(pool.map(_run, each))
            linked = Path(made, target.name)
            _run([compiler, "-shared", "-pthread", _LINKER, *objects, "-o", str(linked), "-lm"])
            linked.replace(target)  # another process that builds the same ends up with the same
    return target


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)


@cache
def _compiler() -> str | None:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, _SLOW_BF16) if "GenuineIntel" in _of_the_cpu("vendor_id") else _FLAGS


def cpu_flags() -> frozenset[str]:
    return frozenset(_of_the_cpu("flags"))


@cache
def _of_the_cpu(field: str) -> tuple[str, ...]:
    """The words that Linux has under `field` for the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(next((line.split(":", 1)[1].split() for line in lines if line.startswith(field)), []))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "h2o_flexgen" / "native"


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return f"{error}: {said.strip()[-500:]}" if said else str(error)
