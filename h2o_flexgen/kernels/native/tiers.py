"""Which instructions the kernels in C are made of: the processor's best, or fewer where H2O_FLEXGEN_KERNELS says so.

A tier is what a kind of processors has in common. H2O_FLEXGEN_KERNELS=avx2 computes and decides as a processor with
AVX2 alone does (most of those that people own), on any that has more; avxvnni, which adds products of 8 bits, is
emulated where the processor lacks it. Without it, or as "native", the processor has all that it has.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from h2o_flexgen.errors import UsageError
from h2o_flexgen.kernels.native.building import FOLDER, IS_ARM, MACHINES, SHIPPED, file_of

SWITCH = "H2O_FLEXGEN_KERNELS"
_EMULATED = "-DEMULATED_VNNI"
_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_V4 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})


class InstructionSets(NamedTuple):
    """Instruction sets: a name, what people call them, what Linux must say that the processor has, and how the names
    of those begin that the tier does without."""

    name: str
    title: str
    needs: frozenset[str]
    beyond: tuple[str, ...]


_ARM_BEYOND = ("bf16", "i8mm", "sve")
TIERS = (
    InstructionSets("neondot", "NEON with dot products", frozenset({"asimd", "asimddp"}), beyond=_ARM_BEYOND),
    InstructionSets("neon", "NEON", frozenset({"asimd"}), beyond=(*_ARM_BEYOND, "asimddp")),
    InstructionSets(
        "avx512", "AVX-512 with VNNI and bfloat16", _V3 | _V4 | {"avx512_vnni", "avx512_bf16"}, beyond=("amx",)
    ),
    InstructionSets("avx512vnni", "AVX-512 with VNNI", _V3 | _V4 | {"avx512_vnni"}, beyond=("amx", "avx512_bf16")),
    InstructionSets("avx512bw", "AVX-512", _V3 | _V4, beyond=("amx", "avx512_", "avx_vnni")),
    InstructionSets("avxvnni", "AVX2 with VNNI", _V3 | {"avx_vnni"}, beyond=("amx", "avx512")),
    InstructionSets("avx2", "AVX2", _V3, beyond=("amx", "avx512", "avx_vnni")),
)
"""From the best on, ARM's first."""
LIBRARIES = FOLDER / SHIPPED
"""Where `setup.py` puts them: kernels-avx2.so and so on."""


@cache
def wanted() -> InstructionSets | None:
    """The tier that H2O_FLEXGEN_KERNELS asks for, None for the processor's own. UsageError for what is not there."""
    word = os.environ.get(SWITCH, "native").lower()
    if word in ("", "native"):
        return None
    tier = next((tier for tier in TIERS if tier.name == word), None)
    if tier is None:
        names = ", ".join(each.name for each in reversed(TIERS))
        raise UsageError(f"{SWITCH} is {word!r}", f"needed native, {names}")
    if missing := sorted(tier.needs - of_the_processor() - {"avx_vnni"}):
        lacks = f"the processor lacks {', '.join(missing)}"
        raise UsageError(f"{SWITCH} is {word!r}, and {lacks}", change=f"unset {SWITCH}")
    return tier


@cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets that Linux lists for the processor; of a tier asked for, all it needs, none beyond."""
    there, tier = of_the_processor(), wanted()
    if tier is None:
        return there
    return frozenset(flag for flag in there if not flag.startswith(tier.beyond)) | tier.needs


def torch_widens() -> bool:
    """Whether torch's products of bfloat16 numbers are done number by number here, so that those of float32 ones, with
    the widening, take a fourth of the time: oneDNN's need AVX-512."""
    return not cpu_flags() >= _V4


def has_only_avx2() -> bool:
    """Whether the kernels are those of AVX2, with or without its VNNI."""
    return not IS_ARM and torch_widens()


def best_tier() -> InstructionSets | None:
    """The best tier of what `cpu_flags` says; None where the kernels do not run at all. Of Intel's, instructions for
    pairs of bfloat16 numbers only if they are asked for: 85 GFLOP/s on a Xeon of 2023, where float32's made 175."""
    slow = {"avx512"} if wanted() is None and has_slow_bfloat16() else set()
    return next((tier for tier in TIERS if tier.needs <= cpu_flags() and tier.name not in slow), None)


def machine_flags() -> tuple[str, ...]:
    """A compiler's flags for this machine, or for the tier that is asked for."""
    tier = wanted()
    if tier is None:
        own = "-mcpu=native" if IS_ARM else "-march=native"
        return (own, "-mno-avx512bf16") if has_slow_bfloat16() else (own,)
    if tier.name == "avxvnni" and "avx_vnni" not in of_the_processor():
        return ("-march=x86-64-v3", _EMULATED)
    return MACHINES[tier.name]


def of_the_processor() -> frozenset[str]:
    """All instruction sets that Linux says the processor has."""
    return frozenset(_of_the_cpu("Features" if IS_ARM else "flags"))


def has_slow_bfloat16() -> bool:
    """Whether its instruction for pairs of bfloat16 numbers, if there is one, is slower than that for float32."""
    return "GenuineIntel" in _of_the_cpu("vendor_id")


@cache
def _of_the_cpu(field: str) -> tuple[str, ...]:
    """The words that Linux has under `field` for the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(next((line.split(":", 1)[1].split() for line in lines if line.startswith(field)), []))


@cache
def shipped() -> Path | None:
    """The best one that is there and runs on the processor; None where there is none."""
    best = best_tier()
    if best is None:
        return None
    # AVX-VNNI may be asked for where it lacks: only a compiler emulates it.
    able = [tier.name for tier in TIERS[TIERS.index(best) :] if tier.needs <= of_the_processor()]
    return next((path for name in able if (path := LIBRARIES / file_of(name)).is_file()), None)
