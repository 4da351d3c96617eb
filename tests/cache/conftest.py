"""Every test of the cache runs with torch's kernels, and again with those in C where they can be had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.kernels.native.attend import available

needs_native = pytest.mark.skipif(
    not available(torch.float32, 4, torch.device("cpu")), reason="no compiler, or a processor without AVX-512 bfloat16"
)


@pytest.fixture(autouse=True, params=["torch", pytest.param("native", marks=needs_native)])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of what decode steps run on. Its patch is its own: tests may undo theirs."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(FusedStep, "of", lambda *_: None)
        yield request.param
