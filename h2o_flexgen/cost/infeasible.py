"""What to say when nothing fits: which cap is too small, and the smallest that works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from h2o_flexgen.cost.fit import fit
from h2o_flexgen.cost.linear import Programs
from h2o_flexgen.cost.lp import Program
from h2o_flexgen.cost.request import SearchRequest
from h2o_flexgen.cost.shapes import Shape
from h2o_flexgen.errors import PlanError
from h2o_flexgen.units import GIB, MIB, format_bytes

_AMPLE = 1 << 50


def refuse(request: SearchRequest, shapes: Sequence[Shape], solver: str) -> PlanError:
    """The error for a request of which not even `shapes`, its smallest blocks, fit.

    One cap is raised, wherever that is enough; else as few as will do.
    """
    programs = {shape: Programs(request).of(shape.policy(request)) for shape in shapes}
    capped, ways = [tier for tier in request.tiers if tier in request.caps], list[dict[str, int]]()
    for count in range(1, len(capped) + 1):
        ways = ways or [
            way for tiers in combinations(capped, count) if (way := _raised(request, programs, tiers, solver))
        ]
    if not ways:
        return PlanError("no block shape fits, whatever the caps are", change="leave placement flags out")
    tiers = " or the ".join(dict.fromkeys(tier for way in ways for tier in way))
    shape, work = min(shapes), request.workload
    have = ", ".join(f"{tier} {format_bytes(request.caps[tier])}" for tier in request.tiers if tier in request.caps)
    return PlanError(
        f"{request.spec.name}, {work.prompt_len} + {work.gen_len} tokens: even a block of {shape.gpu_batch_size} x "
        f"{shape.num_gpu_batches} sequences does not fit into {have}",
        f"the {tiers} cap is too small; the smallest that works: " + ", or ".join(_way(request, way) for way in ways),
        "or a smaller --hh-ratio, --prompt-len or --prefill-chunk, or fewer fixed placement flags",
    )


def _way(request: SearchRequest, caps: Mapping[str, int]) -> str:
    return " and ".join(f"{request.flag(tier)} {size_at_least(nbytes)}" for tier, nbytes in caps.items())


def _raised(
    request: SearchRequest, programs: Mapping[Shape, Program], tiers: Sequence[str], solver: str
) -> dict[str, int] | None:
    """The smallest caps of `tiers`, of the fastest first, under which something fits; None where nothing does."""
    found = {tier: _AMPLE for tier in tiers}

    def enough(tier: str, mebibytes: int) -> bool:
        return _fits(request.with_caps(**{**found, tier: mebibytes * MIB}), programs, solver)

    if not _fits(request.with_caps(**found), programs, solver):
        return None
    for tier in tiers:
        low, step = request.caps[tier] // MIB, 64
        while not enough(tier, low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > max(1, high >> 10):
            middle = (low + high) // 2
            low, high = (low, middle) if enough(tier, middle) else (middle, high)
        found[tier] = high * MIB
    return found


def _fits(request: SearchRequest, programs: Mapping[Shape, Program], solver: str) -> bool:
    """Whether any shape has a placement within the caps."""
    return any(
        fit(request, shape.policy(request), replace(program, caps=dict(request.caps)), solver)
        for shape, program in programs.items()
    )


def size_at_least(nbytes: int) -> str:
    """A size to type that is no smaller than `nbytes`."""
    if nbytes < 10 * GIB:
        return f"{-(-nbytes // MIB)}MiB"
    return f"{-(-10 * nbytes // GIB) / 10:.1f}GiB"
