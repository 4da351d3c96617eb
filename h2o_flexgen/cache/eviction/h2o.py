"""Heavy hitters and recent tokens (Zhang et al. 2023, "H2O", section 4)."""

from __future__ import annotations

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.errors import required


class H2OPolicy(base.RankedPolicy):
    """The score is the sum of the attention that a token has received from all queries, float32, never divided by its
    age (appendix B.2 of the paper)."""

    name = "h2o"
    column_sums = needs_rows = True

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        return base.PromptScores(required(prompts.column_sums, "column sums of the prompt's attention are needed"))
