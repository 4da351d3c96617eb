"""Proxy tokens' choice, and chance (Chen et al. 2024, arXiv 2408.03675, "NACL")."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.cache.eviction.random import uniform
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.splits import SPLITS, Share

CHANCE = 0.35
"""The part of what is chosen that is drawn."""


class NaclPolicy(base.RankedPolicy):
    """The score is the attention of the last tenth of the prompt; 35 % of what is chosen is drawn by it instead.

    Drawn without replacement, each with a probability proportional to exp(score), from the seed, the sequence, the
    layer and the KV head. The prompt is pruned by it; the answer is added to that.
    """

    name = "nacl"

    def queries(self, length: int, budget: Budget) -> int:
        if budget.prompt is not None:
            return budget.recent
        return min(length, SPLITS.get(self.name).recent(Share(budget.total, budget.total, budget.after_prompt, length)))

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        length = prompts.length
        votes = base.summed_rows(prompts, self.queries(length, rows.budget), rows.window)
        first = rows.budget.sinks if rows.window is None else max(rows.budget.sinks, length - rows.window + 1)
        last = length - rows.budget.recent
        chosen = rows.budget.heavy - int(CHANCE * rows.budget.heavy)
        if last - first <= rows.budget.heavy:
            return base.PromptScores(votes, votes)
        candidates = votes[..., first:last]
        best = _order(candidates).argsort(-1) < chosen
        # The largest of scores with Gumbel noise are such a draw.
        noise = uniform(self.seed, rows.tokens)[..., first:last].clamp(min=2**-25)
        drawn = _order((candidates.double() - noise.double().log().neg().log()).masked_fill(best, torch.inf)).argsort(
            -1
        )
        ranks = torch.zeros_like(votes)
        ranks[..., first:last] = (last - first - drawn).float()
        return base.PromptScores(ranks, votes)


def _order(values: Tensor) -> Tensor:
    """Indices from the largest value to the smallest; of equal ones the lower index first."""
    return values.argsort(dim=-1, descending=True, stable=True)
