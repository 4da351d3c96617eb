"""The Triton kernels on the GPU itself: the same cases against the same references as in Triton's interpreter.

Kernels run in their default configuration, so that a case compiles one and not five; the last test tries them all.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from h2o_flexgen.kernels import triton_decode, triton_tune
from tests.kernels.test_triton_decode import *  # noqa: F403
from tests.kernels.test_triton_prompt import *  # noqa: F403
from tests.kernels.test_triton_quant import test_a_view_and_nothing, test_both_ways  # noqa: F401
from tests.kernels.test_triton_rotate import *  # noqa: F403
from tests.kernels.triton_pair import Pair, keeps

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _default_configuration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.name != test_a_tuned_kernel.__name__:
        monkeypatch.setattr(triton_decode, "fastest", lambda kind, candidates, *_: candidates[0])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_every_configuration(dim: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of those that tuning chooses from gives the reference's answer."""
    configs = triton_decode.candidates(dim, torch.bfloat16)
    for config in configs:
        monkeypatch.setattr(triton_decode, "fastest", lambda *_, config=config: config)
        pair = Pair([(600, keeps(513, 200)), (9, keeps(513, 200))], group=group, dim=dim, dtype=torch.bfloat16)
        for _ in range(3):
            pair.step()
        pair.check_contents()


def test_a_tuned_kernel() -> None:
    """Tuning leaves the state as it was: the steps after it are right."""
    triton_tune.forget()
    pair = Pair([(300, keeps(257, 100))] * 2, group=1, dim=64, dtype=torch.bfloat16)
    for _ in range(4):
        pair.step()
    pair.check_contents()
