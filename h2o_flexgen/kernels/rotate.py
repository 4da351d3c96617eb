"""Rotation of queries and keys by their positions (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns dimension i of x (..., head_dim) together with dimension i + m by the angle of pair i, i < m.

    cos, sin (..., m) in the dtype of x, 2 m <= head_dim, broadcast to x; dimensions from 2 m on pass through. The
    result is new and contiguous, whatever the strides of x.
    """
    half = cos.shape[-1]
    dim = 2 * half
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    pairs, turned = (t[..., :dim].unflatten(-1, (2, half)) for t in (x, out))
    # One product of all and two fused multiply-adds: no temporary, and half the time of other orders.
    torch.mul(pairs, cos.unsqueeze(-2), out=turned)
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-1)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sin)
    if dim < x.shape[-1]:
        out[..., dim:] = x[..., dim:]
    return out
