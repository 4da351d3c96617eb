"""Keys turned in one launch against torch's rotation, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.kernels.layers import rotate_halves
from h2o_flexgen.kernels.triton_rotate import BLOCK, rotate_cached


@pytest.mark.turns
@pytest.mark.parametrize(
    ("dim", "half", "dtype"),
    [
        (8, 4, torch.float32),
        (8, 4, torch.bfloat16),
        (20, 5, torch.float16),
        (20, 5, torch.float32),
        (6, 3, torch.bfloat16),
        (64, 32, torch.float16),
    ],
)
def test_as_torch_turns_them(dim: int, half: int, dtype: torch.dtype) -> None:
    """Of a whole cache its first slots, by ranks of rows and heads, or of all alike; what is beyond the pairs stays."""
    torch.manual_seed(dim)
    cache = torch.randn(3, 2, BLOCK + 9, dim, dtype=dtype, device=DEVICE)
    angles = torch.randn(50, half, device=DEVICE).mul(3)
    # As the engine has them: both halves of a wider table.
    cos, sin = (torch.cat([x, x], dim=1).to(dtype)[:, :half] for x in (angles.cos(), angles.sin()))
    for width in (BLOCK + 3, 5):
        keys = cache[:, :, :width]
        for shape, kind in (((3, 2, width), torch.int32), ((3, 1, width), torch.int64), ((1, 1, width), torch.int64)):
            ranks = torch.randint(0, 50, shape, dtype=kind, device=DEVICE)
            expected = rotate_halves(keys.float(), cos[ranks.long()].float(), sin[ranks.long()].float()).to(dtype)
            found = rotate_cached(keys, ranks, cos, sin)
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected)


def test_what_it_does_not_take_is_refused() -> None:
    keys, ranks = torch.zeros(1, 1, 4, 8, device=DEVICE), torch.zeros(1, 1, 4, dtype=torch.int64, device=DEVICE)
    wide = torch.zeros(9, 5, device=DEVICE)
    with pytest.raises(ValueError, match="keys of 8 numbers"):
        rotate_cached(keys, ranks, wide, wide)
