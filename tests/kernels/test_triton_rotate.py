"""Queries and keys turned by one kernel, beside the same by torch's operations."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.kernels import triton_rotate
from h2o_flexgen.models.rotary import Angles, rotate

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""A last digit of numbers below 4: the interpreter cuts bfloat16 off. torch rounds after each of three operations."""


def made(tokens: int, heads: int, kv_heads: int, dim: int, turned: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q and k as the decoder's product has them, beside each other and v; cosines and sines beside those of others."""
    joined = torch.randn(tokens, (heads + 2 * kv_heads) * dim).clamp(-2, 2).to(DEVICE, dtype)
    q, k, _ = joined.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    half = torch.rand(tokens + 3, turned // 2) * 6
    angles = torch.cat([half, half], dim=-1)[2 : tokens + 2].to(DEVICE)
    return [q, k, angles.cos().to(dtype), angles.sin().to(dtype)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "turned"),
    [
        (1, 4, 4, 16, 16),
        (7, 6, 2, 32, 32),
        (5, 71, 1, 64, 64),
        (3, 8, 8, 80, 20),
        (2, 3, 1, 96, 96),
        (2, 2, 1, 256, 64),
    ],
)
def test_as_torch_turns_them(tokens: int, heads: int, kv_heads: int, dim: int, turned: int, dtype: torch.dtype) -> None:
    q, k, cos, sin = made(tokens, heads, kv_heads, dim, turned, dtype)
    found = triton_rotate.rotate_both(q, k, cos, sin)
    for ours, x in zip(found, (q, k), strict=True):
        expected = rotate(x.float(), Angles(cos.float(), sin.float()))
        assert ours.dtype == dtype
        assert ours.is_contiguous()
        assert torch.equal(ours[..., turned:], x[..., turned:]), "what does not turn passes through"
        torch.testing.assert_close(ours.float(), expected, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(ours, rotate(x, Angles(cos, sin)), rtol=0, atol=2 * TOLERANCE[dtype])


def test_other_strides_and_nothing() -> None:
    q, k, cos, sin = made(4, 2, 1, 32, 32, torch.float32)
    apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, cos, sin)]
    for ours, theirs in zip(triton_rotate.rotate_both(*apart), triton_rotate.rotate_both(q, k, cos, sin), strict=True):
        assert torch.equal(ours, theirs)
    empty = triton_rotate.rotate_both(*(x[:0] for x in (q, k, cos, sin)))
    assert [x.shape for x in empty] == [(0, 2, 32), (0, 1, 32)]


def test_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    kernel = triton_rotate.rotate_kernel

    class Noted:
        def __getitem__(self, grid: tuple[int, int]):
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_rotate, "rotate_kernel", Noted())
    triton_rotate.rotate_both(*made(3, 40, 8, 128, 128, torch.float32))
    assert launched == [(3, 3 + 1)], "16 heads of 128 in a program, and none of both"
