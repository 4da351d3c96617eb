"""Experts of a mixture as the engine computes them: many at a time, each for the few tokens that chose it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.packed import fill_scales
from h2o_flexgen.config.hardware.rates import Curve
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.kernels.experts import Choices
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.memory.handle import packed_layout, views
from h2o_flexgen.models.decoder import Decoder, Routed, bind

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of each expert."""
_SURE_ROWS = 8  # measured however long it takes


@torch.inference_mode()
def expert_curves(bench: Bench, packed: ModelSpec, seconds: float) -> dict[str, Curve]:
    """Seconds of one expert with its tokens gathered and its results added up, over its tokens, as many as there is
    time for, by the bits of its weights (`ModelSpec.expert_bits`): in the dtype, and as `packed` has them. Empty for a
    model without experts.

    Of a layer's experts as many as the arena holds are computed in one call, all for the same number of tokens.
    """
    specs = {spec.expert_bits: spec for spec in (bench.spec, packed) if spec.expert_bits is not None}
    found: dict[str, Curve] = {}
    for index, (bits, spec) in enumerate(specs.items()):
        weights = _weights(bench, next(spec.groups_by_key[unit.experts[0]] for unit in spec.units if unit.experts))
        share = seconds / len(specs)
        budget = bench.timer.budget(share, {str(rows): 1.0 + rows / 64 for rows in ROWS})
        points: list[tuple[float, float]] = []
        for rows in ROWS:
            turn = budget.take(str(rows))
            expected = points[-1][1] * len(weights) * rows / points[-1][0] if points else 0.0
            if rows > _SURE_ROWS and 2 * expected > max(turn, share - budget.elapsed):
                break
            sample = bench.measure("experts", _call(bench, weights, rows), turn)
            points.append((rows, sample.seconds / len(weights)))
        found[bits] = Curve(tuple(points))
        if index:
            bench.refill()
    return found


def _weights(bench: Bench, group: WeightGroup) -> list[Mapping[str, Any]]:
    """The experts of one layer, side by side in the arena as they are in the engine."""
    layout = packed_layout(group, str(bench.dtype).removeprefix("torch."))
    experts = bench.spec.arch.experts
    if experts is None:
        raise ValueError(f"{bench.spec.name} has no experts")
    found: list[Mapping[str, Any]] = []
    for place in bench.places(layout.nbytes, experts.count):
        tensors = views(layout, place)
        for weight in tensors.values():
            if isinstance(weight, PackedWeight):
                fill_scales(weight)
        found.append(bind(tensors))
    return found


def _call(bench: Bench, weights: list[Mapping[str, Any]], rows: int) -> Callable[[], object]:
    """All `weights` for `rows` tokens each, which are not those of the expert before."""
    count, decoder = len(weights), Decoder(bench.spec)
    total = max(count, rows)
    x = bench.noise(total, bench.spec.hidden_size)
    tokens = (torch.arange(rows) * (total // rows) + torch.arange(count).unsqueeze(1)) % total
    tokens = tokens.sort(1).values.flatten().to(bench.device)
    shares = torch.ones(count * rows, device=bench.device)
    choices = Choices(tokens, shares, list(range(count)), [rows * i for i in range(count + 1)])
    routed = Routed(x, tokens, shares, torch.zeros_like(x))
    return lambda: decoder.add_experts(routed, choices, range(count), weights, bench.chunk)
