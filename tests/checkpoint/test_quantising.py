"""Packing while loading leaves no holes in the heap, however many matrices there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.checkpoint.quantising import QuantisingSource
from h2o_flexgen.config.model.packing import groupwise
from h2o_flexgen.kernels.packed import PackedWeight
from tests.cache.conftest import needs_native


class MadeByTorch(TorchDispatchMode):
    """The most bytes of a tensor that an operation made on the heap: not a view, nor one of its arguments."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in known:
                self.most = max(self.most, result.nbytes)
        return result


@needs_native
@pytest.mark.parametrize("dummy", [False, True])
def test_matrices_are_packed_in_memory_that_comes_back(dummy: bool) -> None:
    """24 of 48 layers of Qwen3-30B-A3B's shape held up to 7.7 GiB more than their weights, in holes that thousands of
    experts had left."""
    shape, packing = (512, 1024), groupwise(4, 64)
    read = {"packings": {}, "read_into": lambda _name, out: out.fill_(0.5)}
    inner = SimpleNamespace(dtype="bfloat16", dummy=dummy, fingerprint="", **read)
    source = QuantisingSource(cast(Any, inner), cast(Any, SimpleNamespace(packings={"w": packing})))
    out = PackedWeight.empty(packing, shape)
    with MadeByTorch() as made:
        source.read_into("w", out)
    assert made.most < 64 << 10
    torch.testing.assert_close(out.expanded(), torch.full(shape, 0.5), rtol=0, atol=1e-3)
