"""The tokens that the newest query looks at (Oren et al. 2024, arXiv 2401.06104, "TOVA")."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.cache.eviction import base


class TovaPolicy(base.RankedPolicy):
    """The score is the newest query's attention, the mean over all query heads of the layer: one set for all.

    The prompt is pruned at once, by its last query.
    """

    name = "tova"
    needs_rows = True
    asks = 1

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        return base.PromptScores(_over_heads(base.summed_rows(prompts, 1, rows.window)))

    def update(self, step: base.AttendedStep) -> None:
        """No state is kept between steps."""

    def ranks(self, step: base.AttendedStep) -> Tensor:
        return _over_heads(step.received)


def _over_heads(received: Tensor) -> Tensor:
    return received.mean(1, keepdim=True).expand_as(received)
