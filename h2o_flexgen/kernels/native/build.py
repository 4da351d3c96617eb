"""Compiles a C source of this folder once per machine, and loads it.

The compiled library lies in the user's cache folder under a name that says all it depends on: the source, the headers
beside it, the compiler and the processor. H2O_FLEXGEN_NATIVE=0 leaves native kernels out, as does a machine without a
compiler.
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
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra")
_TIMEOUT_S = 120
_COMPILERS = 2  # at a time: each takes a processor and up to 200 MB


@cache
def library(name: str) -> ctypes.CDLL | None:
    """The compiled NAME.c of this folder; None where it cannot be had, which `why_not` explains.

    torch is imported first: its OpenMP runtime is then the one that the library gets, so that both share one team of
    threads.
    """
    if why_not() is not None:
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        return ctypes.CDLL(str(_compiled(source)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the kernels of %s could not be built, torch's are slower: %s", source.name, _reason(error))
        return None


def build_all() -> None:
    """Builds what is not built yet, so that no compiler runs within what somebody measures.

    Some seconds the first time on a machine, milliseconds from then on.
    """
    if why_not() is None:
        names = sorted(source.stem for source in Path(__file__).parent.glob("*.c"))
        with ThreadPoolExecutor(_COMPILERS) as pool:
            list(pool.map(library, names))


@cache
def why_not() -> str | None:
    """Why there are no native kernels here, in a few words; None where there are."""
    if os.environ.get("H2O_FLEXGEN_NATIVE", "1").lower() in ("0", "false", "no", "off"):
        return "H2O_FLEXGEN_NATIVE is 0"
    if platform.system() != "Linux" or not {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"} <= _cpu_flags():
        return "the processor has no AVX-512 with bfloat16"
    if _compiler() is None:
        return "no C compiler was found"
    return None


def _compiled(source: Path) -> Path:
    compiler = _compiler()
    assert compiler is not None, "`why_not` says so before"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    sources = [source, *sorted(source.parent.glob("*.h"))]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    facts = [*texts, version.stdout, *_FLAGS, *sorted(_cpu_flags()), torch.__version__]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20]
    target = _cache_folder() / f"{source.stem}-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [compiler, *_FLAGS, str(source), "-o", str(made), "-lm"]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
            made.replace(target)  # whoever else is building the same ends up with the same
    return target


@cache
def _compiler() -> str | None:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "h2o_flexgen" / "native"


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return f"{error}: {said.strip()[-500:]}" if said else str(error)
