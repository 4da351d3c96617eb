"""What to say when nothing fits: which cap is too small, and the smallest that works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from h2o_flexgen.cost.fit import fit
from h2o_flexgen.cost.linear import Programs
from h2o_flexgen.cost.request import SearchRequest
from h2o_flexgen.cost.shapes import Shape
from h2o_flexgen.errors import PlanError
from h2o_flexgen.units import GIB, MIB, format_bytes

_HALVINGS = 24


def refuse(request: SearchRequest, shapes: Sequence[Shape], solver: str) -> PlanError:
    """The error for a request of which not even `shapes`, its smallest blocks, fit.

    One cap is raised, if that is enough; else the fewest tiers, slowest first, until it is.
    """
    capped = [tier for tier in reversed(request.tiers) if tier in request.caps]
    ways = [way for tier in capped if (way := _raised(request, shapes, (tier,), solver))]
    if not ways:
        ways = [way for count in range(2, len(capped) + 1) if (way := _raised(request, shapes, capped[:count], solver))]
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
    request: SearchRequest, shapes: Sequence[Shape], tiers: Sequence[str], solver: str
) -> dict[str, int] | None:
    """The smallest caps of `tiers`, found one after the other, under which something fits; None where nothing does."""
    ample = {tier: 1 << 60 for tier in tiers}
    if not fits(request.with_caps(**ample), shapes, solver):
        return None
    found: dict[str, int] = {}
    for tier in tiers:
        low, high = request.caps[tier] // MIB, 1 << 40
        # Doubling first keeps the numbers small that the solver sees.
        step = max(low, 64)
        while step < high and not fits(
            request.with_caps(**{**ample, **found, tier: (low + step) * MIB}), shapes, solver
        ):
            low, step = low + step, 2 * step
        high = low + step
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            if middle in (low, high):
                break
            enough = fits(request.with_caps(**{**ample, **found, tier: middle * MIB}), shapes, solver)
            low, high = (low, middle) if enough else (middle, high)
        found[tier] = high * MIB
    return found


def fits(request: SearchRequest, shapes: Sequence[Shape], solver: str) -> bool:
    """Whether any of `shapes` has a placement within the caps."""
    programs = Programs(request)
    return any(
        fit(request, policy, programs.of(policy), solver) for shape in shapes for policy in (shape.policy(request),)
    )


def size_at_least(nbytes: int) -> str:
    """A size to type that is no smaller than `nbytes`."""
    if nbytes < 10 * GIB:
        return f"{-(-nbytes // MIB)}MiB"
    return f"{-(-10 * nbytes // GIB) / 10:.1f}GiB"
