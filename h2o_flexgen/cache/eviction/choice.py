"""The order in which tokens are kept, and the choice of a prompt's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.config.budget import Budget


def rank_keys(score_bits: Tensor, positions: Tensor) -> Tensor:
    """(score, position) as one int64 key: higher is better, equal scores favour the lower position.

    score_bits: float32 scores, never negative, viewed as int32, which order like the scores. All keys of a (row, head)
    differ, so that choices are the same on every device.
    """
    return score_bits.to(torch.int64).bitwise_left_shift_(32).sub_(positions.to(torch.int64))


def choose(score: Tensor, positions: Tensor, budget: Budget, window: int | None) -> Tensor:
    """Ascending positions (n, kv_heads, budget) to keep of prompts with `score` (n, kv_heads, S): sinks, heavy tokens
    that the next query sees, recent ones."""
    length = score.shape[-1]
    first = budget.sinks if window is None else max(budget.sinks, length - window + 1)
    start = length - budget.latest
    heavy = budget.after_prompt - budget.sinks - budget.latest
    keys = rank_keys(score[..., first:start].view(torch.int32), positions[first:start])
    best = keys.topk(heavy, sorted=False).indices + first  # in order of position below
    sinks, recent = (part.expand(*score.shape[:2], -1) for part in (positions[: budget.sinks], positions[start:]))
    return torch.cat([sinks, best.sort(-1).values, recent], dim=-1)
