"""H2O by the mean: the attention that a token has received per query that could see it."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.cache.eviction.h2o import H2OPolicy


class H2OMeanPolicy(H2OPolicy):
    """H2O's sums divided by age.

    Sums favour early tokens, which H2O's paper (appendix B.2) found to be for the better.
    """

    name = "h2o_mean"
    by = "mean"

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        sums = super().prompt_scores(prompts, rows).rank
        return base.PromptScores(sums / (prompts.length - rows.tokens.positions), sums)

    def ranks(self, step: base.AttendedStep) -> Tensor:
        return step.score / (step.now + 1 - step.pos)
