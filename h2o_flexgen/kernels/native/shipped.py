"""Libraries that a wheel brings along, one for each kind of processors: what is loaded where there is no compiler."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from h2o_flexgen.kernels.native.building import FOLDER
from h2o_flexgen.kernels.native.tiers import best_tier, has_slow_bfloat16, of_the_processor

LIBRARIES = FOLDER / "shipped"
"""Where `setup.py` puts them: kernels-avx2.so and so on."""


@cache
def shipped() -> Path | None:
    """The best one that is there and runs on the processor; None where there is none."""
    best = best_tier()
    if best is None:
        return None
    names = [best.name] if best.name == "avx2" else [best.name, "avx2"]
    if best.name == "avx512" and has_slow_bfloat16():
        names.insert(0, "avx512-slow")
    if "avx_vnni" not in of_the_processor():  # and the tier is asked for: only a compiler emulates it
        names = [name for name in names if name != "avxvnni"]
    return next((path for name in names if (path := LIBRARIES / f"kernels-{name}.so").is_file()), None)
