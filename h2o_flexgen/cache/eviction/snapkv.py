"""The tokens that the end of the prompt attends to (Li et al. 2024, arXiv 2404.14469, "SnapKV")."""

from __future__ import annotations

import torch.nn.functional as F

from h2o_flexgen.cache.eviction import base

POOL = 7


class SnapKVPolicy(base.RankedPolicy):
    """The score is the attention of the last `recent` queries, summed, then the largest among seven neighbours.

    Neighbours are the tokens before these queries alone. The prompt is pruned by it; the answer is added to that.
    """

    name = "snapkv"
    asks = "recent"

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        votes = base.summed_rows(prompts, rows.budget.recent, rows.window)
        end = prompts.length - rows.budget.recent
        if end < 1:
            return base.PromptScores(votes, votes)
        pooled = F.max_pool1d(votes[..., :end], POOL, stride=1, padding=POOL // 2)
        return base.PromptScores(F.pad(pooled, (0, rows.budget.recent)), votes)
