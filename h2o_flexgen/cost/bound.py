"""The fewest bytes that any schedule must move: what a plan's traffic is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import dtype_bytes
from h2o_flexgen.config.workload import Workload


def io_lower_bound(
    spec: ModelSpec,
    workload: Workload,
    eviction: EvictionConfig,
    dtype: str,
    caps: Mapping[str, int | None],
    compute_tier: str,
    sequences: int,
    *,
    cpu_cache_compute: bool = False,
) -> dict[str, int]:
    """Bytes over each link, for `sequences` of the workload's lengths that go through their steps together.

    caps: bytes per tier; None, or left out, is no limit. cpu_cache_compute: whether attention may be computed where
    caches on the cpu live. Links that nothing has to cross are left out.

    Every step needs all weights (of an embedding that is no head as good as nothing), and a decode step needs what the
    caches hold. Of these W + K bytes, the tiers on the near side of a link hold M when the step starts, so that
    W + K - M must come in. Outward, what the caches hold before the last step has all been on the compute tier, and
    what does not fit there has left it. Nothing else need move: hidden states of one sequence at a time fit anywhere,
    and loading the model is no part of a block. No workspace, buffer or padding is counted, and none of a cap is spent
    on them, so that the bound is below what any real plan moves.
    """
    weights = _needed_weights(spec) * dtype_bytes(dtype)
    caches = [sequences * held for held in _held(spec, workload, eviction, dtype)]
    tiers = ("gpu", "cpu", "disk") if compute_tier == "gpu" else ("cpu", "disk")
    bound: dict[str, int] = {}
    near = 0
    for upper, lower in pairwise(tiers):
        cap = caps.get(upper)
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


def _needed_weights(spec: ModelSpec) -> int:
    """Numbers that every pass over the model reads whole: not those of tables of which it reads single rows."""
    tables = {"embed.positions"} if spec.arch.tied_head else {"embed.positions", "embed.tokens"}
    sizes = (tensor for group in spec.weight_groups for tensor in group.tensors if tensor.name not in tables)
    return sum(tensor.numel for tensor in sizes)


def _held(spec: ModelSpec, workload: Workload, eviction: EvictionConfig, dtype: str) -> list[int]:
    """Bytes that one sequence's caches hold when each step starts; nothing before the first."""
    budget = eviction.resolve(workload.prompt_len, workload.gen_len)
    totals = [budget.within(spec.arch.window_of(layer)).total for layer in range(spec.num_layers)]
    layers = {total: totals.count(total) for total in totals}
    token = spec.kv_bytes_per_token_and_layer(dtype)

    def before(step: int) -> int:
        tokens = ((min(min(workload.prompt_len, total) + step - 1, total), count) for total, count in layers.items())
        return token * sum(held * count for held, count in tokens)

    return [0, *(before(step) for step in range(1, workload.gen_len))]
