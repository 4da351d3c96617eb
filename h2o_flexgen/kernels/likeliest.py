"""The likeliest token among those that a grammar allows, in C: what takes torch three passes and two copies."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import function, library


def serves(scores: Tensor) -> bool:
    """Whether the kernel takes the rows of `scores` (n, vocab)."""
    host = scores.device.type == "cpu" and scores.dtype is torch.float32
    return host and scores.stride(-1) == 1 and library() is not None


def likeliest(scores: Tensor, allowed: Tensor) -> int:
    """The first of the largest `scores` (vocab,) of tokens that are allowed; -1 where there is none above -inf.

    allowed: int32, contiguous; bit i % 32 of number i // 32 is of token i. No score is NaN.
    """
    return int(function("likeliest", "PPq", "q")(scores.data_ptr(), allowed.data_ptr(), scores.shape[0]))
