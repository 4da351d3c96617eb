"""Kernels in C, written for AVX-512 with bfloat16, for AVX2 and for ARM's NEON too. How to compile and call them.

The sources of this folder are compiled once per machine and loaded as one library. It lies in the user's cache folder
under a name made of everything it depends on: the sources, the compiler and the processor. Without a compiler those are
loaded that a wheel has brought along, the best that the processor runs. H2O_FLEXGEN_NATIVE=0 leaves
native kernels out; torch then does the same work, as for other dtypes. `tiers.py` says what instructions they have.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from h2o_flexgen.folders import cached
from h2o_flexgen.kernels.native.building import FLAGS, FOLDER, TIMEOUT_S, build, find_compiler, sources
from h2o_flexgen.kernels.native.tiers import LIBRARIES, best_tier, cpu_flags, machine_flags, shipped

log = logging.getLogger(__name__)

_building = Lock()
_compiler = cache(find_compiler)
_LETTERS: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "l": ctypes.c_long,
    "i": ctypes.c_int,
    "d": ctypes.c_double,
}
_NUMBERS = {name: _LETTERS[letter] for name, letter in (("int64_t", "q"), ("int", "i"), ("double", "d"))}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled sources of this folder, one library; None where it cannot be had, which `why_not` explains.

    Some seconds the first time on a machine, milliseconds from then on: called before anything is measured, so that no
    compiler runs within it.
    """
    if why_not() is not None:
        return None
    with _building:  # threads that call at the same time get one compilation
        for path_of in (_compiled, shipped):
            try:
                if (path := path_of()) is not None:
                    return ctypes.CDLL(str(path))
            except (OSError, subprocess.SubprocessError) as error:
                log.warning("the native kernels could not be built, torch's are slower: %s", _reason(error))
    return None


def what_computes() -> str:
    """In a line: the instructions of the native kernels and where these are from, or why torch computes instead."""
    found, tier = library(), best_tier()
    if found is None or tier is None:
        return f"torch, which is slower: {why_not() or 'the kernels could not be compiled'}"
    return f"{tier.title}, {'shipped' if Path(found._name).parent == LIBRARIES else 'compiled here'}"


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


@cache
def structure(source: str, name: str) -> type[ctypes.Structure]:
    """The structure `name` of a C file of this folder, with the fields that are declared there."""
    text = re.sub(r"/\*.*?\*/", "", (FOLDER / source).read_text(encoding="utf-8"), flags=re.DOTALL)
    body = re.search(rf"typedef struct \{{([^{{}}]*)\}} {name};", text)
    assert body is not None, f"{source} declares no structure {name}"
    found: list[tuple[str, Any]] = []
    for declaration in filter(None, map(str.strip, body[1].split(";"))):
        kind, declared = declaration.removeprefix("const ").split(maxsplit=1)
        for each in declared.split(","):
            made = _LETTERS["P"] if "*" in each else _NUMBERS.get(kind) or structure(source, kind)
            found.append((each.split("*")[-1].strip(), made))

    class Declared(ctypes.Structure):
        _fields_ = found

        def point(self, **tensors: Any) -> None:
            """Has fields point to tensors, which must outlive their use; to none for None."""
            for field, x in tensors.items():
                setattr(self, field, None if x is None else x.data_ptr())

    return Declared


def must_compile() -> bool:
    """Whether `library` would take some seconds now, to compile what no earlier run on this machine has."""
    try:
        there = why_not() is not None or _compiler() is None or library.cache_info().currsize
        return not there and not _target().exists()
    except (OSError, subprocess.SubprocessError):  # which `library` reports
        return False


@cache
def why_not() -> str | None:
    """Why there are no native kernels here, in a few words; None where there are."""
    if os.environ.get("H2O_FLEXGEN_NATIVE", "1").lower() in ("0", "false", "no", "off"):
        return "H2O_FLEXGEN_NATIVE is 0"
    if platform.system() != "Linux" or best_tier() is None:
        return "needed Linux, and a processor with AVX2 or 64-bit ARM's NEON"
    if _compiler() is None and shipped() is None:
        return "no C compiler was found"
    return None


def has_matrix_unit() -> bool:
    """Whether the processor multiplies tiles of bfloat16 numbers (AMX), and shows it to this system."""
    return "amx_bf16" in cpu_flags()


def _target() -> Path:
    """Where the library is, or has to be, whose name says all that it depends on."""
    compiler = _compiler()
    assert compiler is not None, "`why_not` says so before"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    texts = [path.read_text(encoding="utf-8") for path in (*sources(), *sorted(FOLDER.glob("*.h")))]
    facts = [*texts, version.stdout, *FLAGS, *machine_flags(), *sorted(cpu_flags())]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20]
    return cached("native", f"kernels-{digest}.so")


def _compiled() -> Path | None:
    compiler = _compiler()
    if compiler is None:
        return None
    target = _target()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        build(compiler, (*FLAGS, *machine_flags()), target)
    return target


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return f"{error}: {said.strip()[-500:]}" if said else str(error)
