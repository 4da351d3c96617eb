"""AVX-512 with VNNI and bfloat16 by simde (Debian's libsimde-dev), for tests on processors without it."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from h2o_flexgen.kernels.native import building

HEADER = Path(__file__).parent / "by_simde" / "immintrin.h"
FLAGS = (*building.MACHINES["avx2"], f"-I{HEADER.parent}")
"""In the place of -mavx512f and so on."""


@cache
def why_not() -> str | None:
    """Why a compiler here cannot compile it; None where it can."""
    compiler = building.find_compiler()
    if compiler is None:
        return "no C compiler was found"
    command = [compiler, *FLAGS, "-w", "-fsyntax-only", "-x", "c", "-"]
    run = subprocess.run(command, input="#include <immintrin.h>\n", capture_output=True, text=True)
    if run.returncode == 0:
        return None
    found = next((line for line in run.stderr.splitlines() if "error:" in line), run.stderr)
    return f"needed simde 0.7.4 or newer (apt-get install libsimde-dev): {found}"
