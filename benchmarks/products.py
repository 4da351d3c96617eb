"""How fast is one matrix product, at every number of rows? The engine's products beside torch's.

    python -m benchmarks.products                          every model's shapes, three turns of each cell
    python -m benchmarks.products --models opt-125m,llama-3.2-1b --rows 1,64,128
    python -m benchmarks.products --weight-bits 4          ours with weights of 4 bits, beside torch's of bfloat16

A process per model. A cell is a shape (outputs x inputs) and a number of rows; in a turn torch's linear and ours run
one after the other, each for some milliseconds, on copies of the weight that no cache holds together, as layers follow
one another in a model. Rates are 2 x rows x outputs x inputs over the seconds, bfloat16, no bias. The tables have our
rate over torch's, the median over all turns of all runs; and the share of the shape's fastest rate that we reach.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.records import arguments, in_process, provenance, run_all
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.models.families import spec_from_config

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_flexgen.kernels.packed import PackedWeight

MODELS = ("opt-125m", "opt-1.3b", "opt-6.7b", "llama-3.2-1b", "llama-7b", "llama-3.1-8b", "qwen2.5-7b")
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_COLD = 128 << 20  # bytes of a weight's copies, which take turns
_SECONDS = 0.02  # of each side in a turn, at least


def shapes(model: str) -> list[tuple[int, int]]:
    """Outputs and inputs of the products of one layer."""
    spec = spec_from_config(known_config(model) or {}, model)
    return [(p.out_features, p.in_features) for p in spec.layer_products]


def run(point: Record) -> Record:
    import torch

    from h2o_flexgen.kernels import linear

    cells = []
    with torch.inference_mode():
        for outs, ins in shapes(point["model"]):
            weights = [torch.randn(outs, ins).bfloat16() for _ in range(max(2, _COLD // (2 * outs * ins)))]
            own = [_packed(weight, point["weight_bits"]) for weight in weights] if point["weight_bits"] else weights
            for rows in point["rows"]:
                x = torch.randn(rows, ins).bfloat16()
                sides = [(partial(torch.nn.functional.linear, x), weights), (partial(linear, x), own)]
                flops = 2 * rows * outs * ins
                turns = [[rate(*side, flops) for side in sides] for _ in range(point["turns"])]
                torchs, ours = zip(*turns, strict=True)
                cells.append({"outs": outs, "ins": ins, "rows": rows, "torch": torchs, "ours": ours})
    return {"cells": cells}


def _packed(weight: Tensor, bits: int) -> PackedWeight:
    """As `--weight-bits` of the engine has it, in groups of 64."""
    from h2o_flexgen.config.model.packing import groupwise
    from h2o_flexgen.kernels.packed import PackedWeight
    from h2o_flexgen.quant.weights import pack

    out = PackedWeight.empty(groupwise(bits, 64), tuple(weight.shape), weight.dtype)
    pack(weight, out, search=False)
    return out


def rate(product: Callable[..., object], weights: Sequence[object], flops: int) -> float:
    """FLOP/s of a product with one weight after the other."""
    product(weights[0])
    begun, done = time.perf_counter(), 0
    while not done or time.perf_counter() - begun < _SECONDS:
        product(weights[done % len(weights)])
        done += 1
    return done * flops / (time.perf_counter() - begun)


def table(records: list[Record]) -> Iterator[str]:
    """Two tables: beside torch, and beside the fastest rate of each shape."""
    cells: dict[tuple[str, int, int], dict[int, list[Record]]] = {}
    for record in records:
        bits = record.get("weight_bits")
        for cell in record["cells"]:
            shape = record["model"] + (f", {bits} bits" if bits else ""), cell["outs"], cell["ins"]
            cells.setdefault(shape, {}).setdefault(cell["rows"], []).append(cell)
    rows = sorted({count for each in cells.values() for count in each})
    head = f"| model, outputs x inputs | {' | '.join(map(str, rows))} |", "|---|" + "---:|" * len(rows)
    yield "Our rate over torch's, by rows:"
    yield from ("", *head)
    for (model, outs, ins), found in cells.items():
        ratios = [median(o / t for c in found[r] for t, o in zip(c["torch"], c["ours"], strict=True)) for r in rows]
        yield f"| {model}, {outs:,} x {ins:,} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |"
    yield from ("", "Our GFLOP/s, by rows:", "", *head)
    for (model, outs, ins), found in cells.items():
        rates = [median(rate for cell in found[r] for rate in cell["ours"]) / 1e9 for r in rows]
        yield f"| {model}, {outs:,} x {ins:,} | {' | '.join(f'{rate:.0f}' for rate in rates)} |"
    yield from ("", provenance(records))


def main() -> int:
    parser = arguments(__doc__, "products", 1, "processes per model")
    parser.add_argument("--models", default=",".join(MODELS), help="of configs/models, with commas between")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows, with commas between")
    parser.add_argument("--turns", type=int, default=3, help="of each cell in each process")
    parser.add_argument("--weight-bits", type=int, choices=(4, 8), help="of our weights, in groups of 64")
    args = parser.parse_args()
    rows = [int(number) for number in args.rows.split(",")]
    point = {"rows": rows, "turns": args.turns, "weight_bits": args.weight_bits}
    points = [{"model": model, **point} for model in args.models.split(",")]
    return run_all(args, points, partial(in_process, "products"), "model", table, run)


if __name__ == "__main__":
    sys.exit(main())
