"""How long torch's OpenMP threads spin at a barrier before they sleep: a short while. No torch.

torch's wheels, for CPUs and for CUDA, bring libgomp, and MKL and oneDNN in them use it too. By default its threads spin
for milliseconds while they wait for each other. Where another program has taken one thread's core, the others then
burn theirs: float32 decode of OPT-125M on two cores fell to 0.30 to 0.37 of its speed beside one busy process, and
keeps about half of it or more where they spin for some 30 us and then sleep. Alone both are as fast.

libgomp reads its settings from the environment when it is loaded, so they have to be there before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SHORT_SPIN = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""Threads that wait sleep, after so many turns of libgomp's loop; LLVM's and Intel's runtimes know the first alone."""
SWITCH = "H2O_FLEXGEN_OPENMP"
"""Set to 0, it leaves OpenMP as it comes: for peers, which import this package for their adapters."""
_torch_first = [False]
_SAY_HOW_TO_WAIT = (*SHORT_SPIN, "KMP_BLOCKTIME")


def spin_briefly() -> None:
    """Puts SHORT_SPIN into the environment, unless the user has said there how threads wait, or torch is loaded."""
    if os.environ.get(SWITCH, "1").lower() in ("0", "false", "no", "off"):
        return
    if any(name in os.environ for name in _SAY_HOW_TO_WAIT):
        return
    if "torch" in sys.modules:
        _torch_first[0] = True
        return
    os.environ.update(SHORT_SPIN)


def spin_warning() -> str | None:
    """The warning for a user whose torch was imported before: LLaMA-1.1B's shape decoded 32 rows on two cores at 103
    tokens/s instead of 151, as torch's threads spun on the cores that the kernels in C wanted. None where all is
    well."""
    if not _torch_first[0]:
        return None
    return (
        "torch was imported before h2o_flexgen, so that its threads spin while others compute: import h2o_flexgen "
        "first, or set OMP_WAIT_POLICY=passive"
    )


def without_short_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` as it was before `spin_briefly`, here or in the process that started this one."""
    ours = SHORT_SPIN.items() <= environment.items()
    return {name: value for name, value in environment.items() if not (ours and name in SHORT_SPIN)}
