"""Heavy hitters and recent tokens (Zhang et al. 2023, "H2O", section 4)."""

from __future__ import annotations

from h2o_flexgen.cache.eviction.base import AttendedPrompts, PromptRows, PromptScores, RankedPolicy


class H2OPolicy(RankedPolicy):
    """The score is the attention a token has received so far: the sum over all queries, never divided by its age.

    Dividing by age made the paper's results worse (appendix B.2). Sums are float32: half precision would lose every
    probability below an ulp of a grown sum.
    """

    name = "h2o"
    statistic = "column_sums"
    needs_rows = True

    def prompt_scores(self, prompts: AttendedPrompts, rows: PromptRows) -> PromptScores:
        if prompts.column_sums is None:
            raise ValueError(f"{self.name} needs the column sums of the prompt's attention")
        return PromptScores(prompts.column_sums)
