"""Tokens that keep being looked at (Liu et al. 2023, arXiv 2305.17118, "Scissorhands")."""

from __future__ import annotations

from functools import reduce

import torch

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.config.eviction import LAST_QUERIES

_MANY = float(1 << 22)


class ScissorhandsPolicy(base.RankedPolicy):
    """Evicts half of the budget at once: the tokens that the most queries paid less than an even share of attention.

    A query counts against a token that it pays less than 1/t, where t tokens came up to the query. The last 400 queries
    of the prompt are counted, and all later ones.
    """

    name = "scissorhands"
    by = "rare"
    needs_rows = True
    asks = LAST_QUERIES

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        positions = rows.tokens.positions
        parts = (
            ((part.mean(2) < (1 / (at + 1)).unsqueeze(1)) & (positions <= at.unsqueeze(1))).float().sum(2)
            for at, part in base.attention_rows(prompts, LAST_QUERIES, rows.window)
        )
        counts = reduce(torch.add, parts)
        return base.PromptScores(_MANY - counts, counts)

    def update(self, step: base.AttendedStep) -> None:
        step.score.add_((step.received < 1 / (step.now + 1)).to(torch.float32))

    def ranks(self, step: base.AttendedStep) -> torch.Tensor:
        return (_MANY - step.score).clamp_(min=0)
