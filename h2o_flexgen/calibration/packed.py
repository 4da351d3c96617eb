"""Products whose weights are packed, beside the same products in the dtype: how many times as long they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.config.hardware.rates import Curve
from h2o_flexgen.config.model.packing import Packing, groupwise
from h2o_flexgen.config.model.spec import ModelSpec, Product
from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.packed import PackedWeight, Weight

ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 1024)
_MOST = 16 << 20  # numbers of the weight: where products of packed weights are slow, they are very slow
_FRACTION, _WHOLE, _EXPONENT = 0.01, 4, 120  # scales and lows as floats, signed and unsigned whole numbers


def usual_packings(spec: ModelSpec) -> dict[str, Packing]:
    """By bits, the packing that most matrices of `spec` with so many have; where none has, as weights are packed while
    they are loaded."""
    counts = Counter(packing for _, packing in spec.packings)
    found = {str(bits): groupwise(bits, 64) for bits in (8, 4)}
    return found | {str(packing.bits): packing for packing, _ in reversed(counts.most_common())}


@torch.inference_mode()
def packed_factors(bench: Bench, packings: Mapping[str, Packing], seconds: float) -> dict[str, Curve]:
    """How many times as long a product takes with a packed weight as with one in the dtype, over its rows, by the keys
    of `packings`; as many rows as there is time for.

    Of the largest product of a layer, or a part of its outputs: such factors hardly depend on the shape. Scales are
    written to the arena, which holds small numbers again afterwards.
    """
    product = _part(bench)
    budget = bench.timer.budget(seconds, {rows: 1.0 + rows / 128 for rows in ROWS})
    factors: dict[str, list[tuple[float, float]]] = {key: [] for key in packings}
    weights = {key: _weights(bench, packing, product) for key, packing in packings.items()}
    plain, once = bench.matrices(product.out_features, product.in_features), 0.0  # seconds of a row, of all products
    for rows in ROWS:
        share = budget.take(rows) / (1 + len(packings))
        if 3 * once * rows > max(share, seconds - budget.elapsed):
            break
        x = bench.noise(rows, product.in_features)
        alone = bench.measure("packed products", partial(_multiply, x, plain), share).seconds
        took = {
            key: bench.measure("packed products", partial(_multiply, x, w), share).seconds for key, w in weights.items()
        }
        for key, lasted in took.items():
            factors[key].append((rows, lasted / alone))
        once = (alone + sum(took.values())) / rows
    bench.refill()
    return {key: Curve(tuple(points)) for key, points in factors.items()}


def _multiply(x: Tensor, weights: Iterator[Weight]) -> object:
    return linear(x, next(weights))


def _part(bench: Bench) -> Product:
    """The largest product of a layer, cut to what the arena and patience allow, with an even number of inputs."""
    largest = max(bench.spec.layer_products, key=lambda each: each.out_features * each.in_features)
    ins = largest.in_features - largest.in_features % 2
    most = min(_MOST, len(bench.arena) // bench.itemsize)
    return Product(max(1, min(largest.out_features, most // ins)), ins)


def _weights(bench: Bench, packing: Packing, product: Product) -> Iterator[PackedWeight]:
    """Packed matrices without end, one place of the arena after the other: any codes, and scales that are numbers."""
    found = []
    for place in bench.places(packing.nbytes(product)):
        weight = PackedWeight.over(packing, product, place, bench.dtype)
        fill_scales(weight)
        found.append(weight)
    return cycle(found)


def fill_scales(weight: PackedWeight) -> None:
    """Writes scales and lows that are numbers, and an order of the inputs, whatever is in their place."""
    for name, part in weight.parts.items():
        if name == "order":
            part.copy_(torch.randperm(part.numel()))
        elif name != "codes":
            whole = _EXPONENT if part.dtype is torch.uint8 else _WHOLE
            part.fill_(_FRACTION if part.is_floating_point() else whole)
