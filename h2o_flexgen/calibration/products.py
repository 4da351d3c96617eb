"""Matrix products at the shapes of a model, and how fast memory is read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.timing import Sample
from h2o_flexgen.config.hardware.rates import Curve, GemmShape
from h2o_flexgen.config.model.products import Product, all_products, products
from h2o_flexgen.kernels import linear

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows of x, up to the usual chunk of prompts."""
_HEAD_ROWS = 256  # the output head sees one token per sequence
_SURE_ROWS = 16  # measured however long it takes; more rows only while there is time


def product_call(
    bench: Bench, product: Product, rows: int, *, biased: bool, wide: bool = False
) -> Callable[[], object]:
    """One product as the decoder does it, `wide`: as its logits; each call takes the next weight of the arena."""
    weights = bench.matrices(product.out_features, product.in_features)
    x = bench.noise(rows, product.in_features)
    bias = bench.noise(product.out_features) if biased else None
    return lambda: linear(x, next(weights), bias, wide=wide)


@torch.inference_mode()
def product_shapes(bench: Bench, seconds: float) -> tuple[GemmShape, ...]:
    """Every shape of the model over the number of rows.

    A weight larger than the arena is measured as a part of its rows; time goes by these.
    """
    spec = bench.spec
    shapes = all_products(spec)
    budget = bench.timer.budget(seconds, dict.fromkeys(map(str, shapes), 1.0))
    head = products(spec, "head")
    found = []
    for shape in shapes:
        parts = -(-shape.out_features * shape.in_features * bench.itemsize // len(bench.arena))
        part = Product(-(-shape.out_features // parts), shape.in_features)
        most = _HEAD_ROWS if shape in head else bench.chunk
        kind = {"biased": shape not in head, "wide": shape == head[-1]}
        points = _over_rows(bench, part, budget.take(str(shape)), most, **kind)
        scale = shape.out_features / part.out_features
        curve = Curve(tuple((rows, sample.seconds * scale) for rows, sample in points))
        found.append(GemmShape(shape.out_features, shape.in_features, curve))
    return tuple(found)


def _over_rows(
    bench: Bench, product: Product, seconds: float, most: int, *, biased: bool, wide: bool
) -> list[tuple[int, Sample]]:
    """Samples over the number of rows, as many rows as there is time for: from there on the rate stays."""
    biased = biased and bench.spec.arch.mlp_bias  # of most models all projections have a bias, or none
    counts = [rows for rows in ROWS if rows <= most]
    # The time a call takes grows with its rows, but a few repetitions of fast ones are soon done.
    budget = bench.timer.budget(seconds, {str(rows): 1.0 + rows / 128 for rows in counts})
    points: list[tuple[int, Sample]] = []
    for rows in counts:
        share = budget.take(str(rows))
        if points and rows > _SURE_ROWS:
            expected = points[-1][1].seconds * rows / points[-1][0]
            if 2 * expected > max(share, seconds - budget.elapsed):
                break
        sample = bench.timer.measure(product_call(bench, product, rows, biased=biased, wide=wide), share)
        points.append((rows, bench.spreads.note(f"{bench.name} products", sample)))
    return points


def general_rate(shapes: tuple[GemmShape, ...], layers: tuple[Product, ...]) -> Curve:
    """FLOP/s over rows of the products in `layers` together: for shapes that were not measured."""
    wanted = [shape for shape in shapes if (shape.out_features, shape.in_features) in layers]
    flops_per_row = sum(2 * shape.out_features * shape.in_features for shape in wanted)
    rows = sorted({rows for shape in wanted for rows, _ in shape.seconds.points})
    return Curve(tuple((n, n * flops_per_row / sum(shape.seconds.time_at(n) for shape in wanted)) for n in rows))


@torch.inference_mode()
def read_rate(bench: Bench, seconds: float) -> float:
    """Bytes per second of reading the whole arena, by a sum."""
    numbers = bench.arena.view(torch.float32)
    sample = bench.spreads.note(f"{bench.name} memory", bench.timer.measure(numbers.sum, seconds))
    return numbers.nbytes / sample.seconds


@torch.inference_mode()
def fastest_read(bench: Bench, shapes: tuple[GemmShape, ...], seconds: float) -> float:
    """Bytes per second that no product exceeds: of plain reading, or of the fastest product if that is even faster."""
    by_products = [
        shape.out_features * shape.in_features * bench.itemsize / min(seconds for _, seconds in shape.seconds.points)
        for shape in shapes
    ]
    return max(read_rate(bench, seconds), *by_products)
