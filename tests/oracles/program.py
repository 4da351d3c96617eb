"""What the placements of a linear program take, without a solver."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_flexgen.cost.lp import Program


def bytes_on(program: Program, shares: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What each tier holds with these shares."""
    total = {tier: program.held.get(tier, 0.0) for tier in program.tiers}
    for (kind, home), grows in program.grows.items():
        for tier, nbytes in grows.items():
            total[tier] += nbytes * shares[kind].get(home, 0.0)
    buffers: dict[tuple[str, str, str], float] = {}
    for charge in program.charges:
        if shares[charge.kind].get(charge.on, 0.0) > 0:
            key = (charge.kind, charge.tier, charge.what)
            buffers[key] = max(buffers.get(key, 0.0), charge.nbytes)
    for (_, tier, _), nbytes in buffers.items():
        total[tier] += nbytes
    return total
