"""The moves of a schedule: the links that a move crosses, and the fewest bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.schedule.request import PlanRequest


def links(tier: str, compute_tier: str, *, inward: bool) -> tuple[str, ...]:
    """The links between `tier` and the compute tier, towards it if `inward`: ("disk->cpu", "cpu->gpu") for disk and
    gpu, none inside one tier."""
    if tier == compute_tier:
        return ()
    stops = [tier, "cpu", compute_tier] if "cpu" not in (tier, compute_tier) else [tier, compute_tier]
    if not inward:
        stops.reverse()
    return tuple(f"{source}->{target}" for source, target in pairwise(stops))


def io_lower_bound(
    request: PlanRequest, sequences: int, *, budgets: Sequence[Budget] | None = None, cpu_cache_compute: bool = False
) -> dict[str, int]:
    """Bytes over each link that any schedule must move for `sequences` that go through their steps together; links of 0
    bytes are left out.

    budgets: of each sequence, layer by layer; None: as the workload's lengths give them. cpu_cache_compute: attention
    may be computed where caches on the cpu live.

    A step needs all weights, W bytes (of an embedding that is not the head next to none), and the caches' contents, K.
    The tiers on the near side of a link hold M of them when it starts, so that W + K - M come in. Outward goes what the
    caches hold before the last step and the near side has no room for. No workspace, buffer or padding is counted.
    """
    # Of tables every pass reads single rows, of experts those of one token.
    spec, dtype = request.spec, request.dtype
    tables = {"embed.positions"} if spec.arch.tied_head else {"embed.positions", "embed.tokens"}
    sizes = (tensor for group in spec.weight_groups for tensor in group.tensors if tensor.name not in tables)
    share = spec.chosen_share(1)
    weights = round(sum(tensor.nbytes(dtype) * (share if ".experts." in tensor.name else 1) for tensor in sizes))
    caches = [sequences * held for held in _held(request, budgets)]
    bound: dict[str, int] = {}
    near = 0
    for upper, lower in pairwise(request.tiers):
        cap = request.caps.of(upper)
        if cap is None:
            return bound
        near += cap
        stay = cpu_cache_compute and upper == "gpu"  # the caches, where attention is computed below
        inward = sum(max(0, weights + (0 if stay else held) - near) for held in caches)
        outward = 0 if stay else max(0, caches[-1] - near)
        for link, nbytes in ((f"{lower}->{upper}", inward), (f"{upper}->{lower}", outward)):
            if nbytes:
                bound[link] = nbytes
    return bound


def _held(request: PlanRequest, budgets: Sequence[Budget] | None) -> list[int]:
    """Bytes in one sequence's caches when each step starts; 0 before the first."""
    prompt, layers = request.workload.prompt_len, Counter[tuple[int, int]]()
    for layer, each in enumerate(budgets or request.budgets):
        if request.spec.attends(layer):
            layers[each.total, each.after_prompt] += request.spec.kv_bytes_per_token_and_layer(request.dtype, layer)

    def before(step: int) -> int:
        return sum(min(min(prompt, kept) + step - 1, total) * token for (total, kept), token in layers.items())

    return [0, *(before(step) for step in range(1, request.workload.gen_len))]
