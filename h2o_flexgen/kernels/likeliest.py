"""The likeliest tokens, of all or among those that a grammar allows, in C on a CPU: what takes torch several passes."""

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


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.max(logits, -1)` of logits (n, vocab): the largest of each row and where it is first, (n,) each."""
    if not serves(logits) or not logits.numel():
        best, tokens = torch.max(logits, dim=-1)
        return best, tokens
    rows, vocab = logits.shape
    best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    places = best.data_ptr(), tokens.data_ptr(), torch.get_num_threads()
    function("largest", "PqqqPPi")(logits.data_ptr(), rows, vocab, logits.stride(0), *places)
    return best, tokens
