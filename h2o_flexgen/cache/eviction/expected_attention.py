"""The tokens that later queries probably attend to (Devoto et al. 2025, arXiv 2510.00636, "Expected Attention")."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.errors import required

FUTURE = 512
"""Positions that queries to come are expected at."""


class ExpectedAttentionPolicy(base.RankedPolicy):
    """The score is exp(the expected logit), normalised, the mean over query heads, times the norm of the value.

    Queries to come are taken for normal, with the mean and the covariance of the prompt's behind the sinks, turned by
    the mean rotation of the next 512 positions. The prompt is pruned by it; the answer is added to that.
    """

    name = "expected_attention"
    raw_queries = True
    asks = "all"

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        length, sinks = prompts.length, rows.budget.sinks
        first = min(length, sinks if rows.window is None else max(sinks, length - rows.window + 1))
        keys, scale = prompts.keys.float(), prompts.logits.scale
        n, kv_heads = keys.shape[:2]
        queries = required(prompts.queries, "the prompt's queries are needed")[:, :, min(sinks, length - 1) :].float()
        mean = queries.mean(2, keepdim=True)
        covariance = (queries - mean).transpose(-1, -2) @ (queries - mean) / queries.shape[2]
        if prompts.turn is not None:
            cos, sin = (
                part.mean(0) for part in prompts.turn(torch.arange(length, length + FUTURE, device=keys.device))
            )
            mean = _turned(mean, cos, sin)
            covariance = _turned(_turned(covariance, cos, sin).transpose(-1, -2), cos, sin)
        mean, covariance = (x.view(n, kv_heads, -1, *x.shape[2:]) for x in (mean, covariance))
        seen = keys[:, :, first:].unsqueeze(2)
        logits = scale * (seen * mean).sum(-1) + scale**2 / 2 * ((seen @ covariance) * seen).sum(-1)
        expected = logits.softmax(-1).mean(2) * prompts.values[:, :, first:].float().norm(dim=-1)
        return base.PromptScores(torch.cat([expected.new_zeros(n, kv_heads, first), expected], dim=-1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., d), its leading dimensions turned by the mean of rotations, cos and sin (dim,)."""
    half = cos.shape[-1] // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:half], sin[:half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
