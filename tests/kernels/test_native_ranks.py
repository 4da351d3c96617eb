"""Ranks in C equal those that torch makes of the same keys and sums."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.cache.eviction import keydiff, rkv
from h2o_flexgen.kernels import native, ranks

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels")


@pytest.mark.parametrize(("dtype", "d"), [(torch.bfloat16, 64), (torch.bfloat16, 80), (torch.float32, 5)])
def test_differences_of_keys_of_which_some_slots_are_empty(dtype: torch.dtype, d: int) -> None:
    generator = torch.Generator().manual_seed(1)
    buffer = torch.randn(3, 2, 40, d, generator=generator).to(dtype)
    buffer[0, 0, 3] = 0
    buffer[1, 1, 5] = buffer[1, 1, 9]
    pos = torch.arange(40, dtype=torch.int32).repeat(3, 2, 1)
    pos[2, :, 30:] = -1
    keys, held = buffer[:, :, :37], pos[..., :37]
    found = ranks.differences(keys, held)
    torch.testing.assert_close(found, keydiff._difference(keys, held >= 0), rtol=0, atol=2e-6)
    assert found[1, 1, 5] == found[1, 1, 9], "what is equal ties"


def test_likeness_of_keys_of_which_some_are_chosen() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 3, 70, 20, generator=generator) + 0.5
    chosen = torch.rand(2, 3, 70, generator=generator) > 0.3
    chosen[0, 1], chosen[1, 2, :69] = False, False
    found = ranks.likeness(keys, chosen)
    expected = rkv._likeness(keys.flatten(0, 1), chosen.flatten(0, 1)).view_as(found)
    torch.testing.assert_close(found[chosen], expected[chosen], rtol=0, atol=2e-6)
    assert not found[~chosen].any()
