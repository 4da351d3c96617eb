"""The order in which tokens stay, and those of a prompt that do."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.config.budget import Budget


def rank_keys(score_bits: Tensor, positions: Tensor) -> Tensor:
    """(score, position) as one int64 that orders like them: higher is better, equal scores favour the lower position.

    `score_bits` are float32 scores viewed as int32; no score is negative, so they order like the scores. All keys of a
    (row, head) differ: what is chosen by key is exact, and the same on every device.
    """
    return score_bits.to(torch.int64).bitwise_left_shift_(32).sub_(positions.to(torch.int64))


def choose(score: Tensor, positions: Tensor, budget: Budget, window: int | None) -> Tensor:
    """Ascending positions (n, kv_heads, budget) kept of prompts with `score` (n, kv_heads, S): sinks, heavy, recent.

    Heavy tokens are those that the next query sees: a budget within the window always finds enough of them.
    """
    length = score.shape[-1]
    first = budget.sinks if window is None else max(budget.sinks, length - window + 1)
    start = length - budget.latest
    heavy = budget.after_prompt - budget.sinks - budget.latest
    keys = rank_keys(score[..., first:start].view(torch.int32), positions[first:start])
    best = keys.topk(heavy, sorted=False).indices + first  # in order of position below
    sinks, recent = (part.expand(*score.shape[:2], -1) for part in (positions[: budget.sinks], positions[start:]))
    return torch.cat([sinks, best.sort(-1).values, recent], dim=-1)
