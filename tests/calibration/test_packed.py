"""Products of packed weights are measured beside those of the dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from h2o_flexgen.calibration import compute
from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.compute import packed_factors, usual_packings
from h2o_flexgen.calibration.timing import Sample
from h2o_flexgen.config.model.packing import Packing, groupwise
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.units import MIB
from tests.cost.machines import TINY

CPU = torch.device("cpu")
KINDS = [
    groupwise(4, 64),
    groupwise(8, 64),
    Packing("uint4", 32, "super", "super"),
    Packing("int8", 16, "super", "none"),
    Packing("uint4", 64, "float16", "zero", ordered=True),
    Packing("e4m3", 0, "float32", "none"),
    Packing("e2m1", 32, "e8m0", "none"),
]


def test_a_models_own_packings_are_measured() -> None:
    """Those that most of its matrices have, and the usual ones of bits that it has not."""
    assert usual_packings(TINY) == {"8": groupwise(8, 64), "4": groupwise(4, 64)}
    odd, even = Packing("uint4", 32, "super", "super"), groupwise(4, 128)
    names = [tensor.name for group in TINY.weight_groups for tensor in group.tensors if len(tensor.shape) == 2]
    mixed = replace(TINY, packings=tuple((name, odd if i % 3 else even) for i, name in enumerate(names)))
    assert usual_packings(mixed) == {"8": groupwise(8, 64), "4": odd}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packing", KINDS, ids=str)
def test_factors_are_over_the_plain_product(packing: Packing, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights whose numbers are finite; the arena is as it was afterwards."""
    seen: list[Any] = []

    def product(x: torch.Tensor, weight: Any) -> torch.Tensor:
        seen.append(weight)
        if isinstance(weight, PackedWeight) and packing.levels != "e4m3":  # two of whose codes are no numbers
            assert bool(weight.expanded().isfinite().all())
        return x

    def measure(bench: Bench, figure: str, call: Callable[[], object], seconds: float) -> Sample:
        call()
        return Sample(3.0 if isinstance(seen[-1], PackedWeight) else 2.0, 0.0, 3)

    monkeypatch.setattr(compute, "linear", product)
    monkeypatch.setattr(Bench, "measure", measure)
    with Bench(TINY, dtype, CPU, 2 * MIB) as bench:
        before = bench.arena.clone()
        found = packed_factors(bench, {"4": packing}, 1e9)
        assert torch.equal(bench.arena, before)
    assert found["4"].points == tuple((rows, 1.5) for rows in compute.PACKED_ROWS)
    weights = [each for each in seen if isinstance(each, PackedWeight)]
    assert {each.packing for each in weights} == {packing}
    assert len({each.parts["codes"].data_ptr() for each in weights}) == len(compute.PACKED_ROWS)
