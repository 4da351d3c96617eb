"""AVX-512 and ARM's NEON by simde (Debian's libsimde-dev), for tests on processors without them.

H2O_TEST_KERNELS=avx512 pytest ..., or avx512vnni, avx512bw (without these), neon, neondot, has all kernels made so;
programs that tests start have their own.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache, partial
from pathlib import Path
from zlib import crc32

import pytest

from h2o_flexgen.kernels import native
from h2o_flexgen.kernels.native import building, tiers

HEADERS = Path(__file__).parent / "by_simde"
FLAGS = (*building.MACHINES["avx2"], f"-I{HEADERS}")
"""In the place of -mavx512f and so on."""
CALLED = "-Dalways_inline=unused"
"""Functions of the kernels are called, where otherwise each call has its own copy: a tenth of the time to compile."""
TIERS: dict[str, tuple[str, ...]] = {
    "avx512": FLAGS,
    "avx512vnni": (*FLAGS, "-DWITHOUT_BF16"),
    "avx512bw": (*FLAGS, "-DWITHOUT_BF16", "-DWITHOUT_VNNI"),
    "neon": (*FLAGS, "-DEMULATED_NEON"),
    "neondot": (*FLAGS, "-DEMULATED_NEON", "-DWITH_DOT_PRODUCTS"),
}
if building.IS_ARM:  # where NEON is what there is, and simde's AVX2 is not what kernels ask for
    TIERS = {}


@cache
def why_not() -> str | None:
    """Why a compiler here cannot compile them; None where it can."""
    compiler = building.find_compiler()
    if compiler is None or not TIERS:
        return "no C compiler was found" if TIERS else "on ARM nothing is emulated"
    command = [compiler, *FLAGS, "-w", "-fsyntax-only", "-x", "c", "-"]
    run = subprocess.run(command, input="#include <immintrin.h>\n", capture_output=True, text=True)
    if run.returncode == 0:
        return None
    found = next((line for line in run.stderr.splitlines() if "error:" in line), run.stderr)
    return f"needed simde 0.7.4 or newer (apt-get install libsimde-dev): {found}"


def take_what_is_asked_for() -> None:
    """The processor of this process has that tier from now on. Its kernels take minutes to compile, once."""
    if (name := os.environ.get("H2O_TEST_KERNELS")) is None:
        return
    if name not in TIERS or why_not():
        raise pytest.UsageError(f"H2O_TEST_KERNELS is {name!r}, needed {', '.join(TIERS)}: {why_not()}")
    needs = next(tier.needs for tier in tiers.TIERS if tier.name == name)
    there, for_good = needs if "neon" in name else tiers.of_the_processor() | needs, pytest.MonkeyPatch()
    texts = b"".join(header.read_bytes() for header in sorted(HEADERS.iterdir()))
    flags = (*TIERS[name], "-O2", f"-DEMULATION={crc32(texts)}")  # which name the library
    for_good.setattr(tiers, "of_the_processor", lambda: there)
    for_good.setattr(native, "machine_flags", lambda: flags)
    for_good.setattr(native, "build", partial(building.build, timeout_s=3600))
    tiers.cpu_flags.cache_clear()
