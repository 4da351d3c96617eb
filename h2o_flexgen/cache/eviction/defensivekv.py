"""The worst case among the last queries (Feng et al. 2025, arXiv 2510.13334, "DefensiveKV")."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from h2o_flexgen.cache.eviction import base

POOL = 5


class DefensivePolicy(base.RankedPolicy):
    """The score is the most that any of the last `recent` queries, of any head, pays a token; no less than the mean of
    that over tokens; times the L1 norm of its value.

    Each query's attention to the tokens before these is the mean of five neighbours, with the sum that it had. The
    paper takes the value's norm behind the output projection, and divides the budget among heads and layers.
    """

    name = "defensivekv"
    asks = "recent"

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        recent, length = rows.budget.recent, prompts.length
        end = max(1, length - recent)
        n, kv_heads = prompts.k.shape[:2]
        worst, sums = (torch.zeros(n, kv_heads, size, device=prompts.k.device) for size in (end, length))
        for _, part in base.attention_rows(prompts, recent, rows.window):
            sums += part.mean(2).sum(2)
            own = part[..., :end]
            smooth = F.avg_pool1d(own.flatten(0, 3), POOL, 1, POOL // 2, count_include_pad=False).view_as(own)
            smooth = smooth * (own.sum(-1, keepdim=True) / smooth.sum(-1, keepdim=True).clamp(min=1e-30))
            worst = torch.maximum(worst, smooth.amax((2, 3)))
        worst = torch.maximum(worst, worst.mean(-1, keepdim=True))
        ranks = worst * prompts.values[:, :, :end].float().abs().sum(-1)
        return base.PromptScores(F.pad(ranks, (0, length - end)), sums)
