"""H2O with a fading memory (InertiaKV, arXiv 2609.03515)."""

from __future__ import annotations

from functools import reduce

import torch

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.cache.eviction.h2o import H2OPolicy

INERTIA = 0.8  # the kernel in C has it, too
_QUERIES = 64  # the weight of any query before them is below an ulp


class InertiaPolicy(H2OPolicy):
    """The score is a running mean of the attention received: score = 0.8 score + 0.2 row in every step.

    The prompt is pruned by H2O's sums; the mean runs from its beginning.
    """

    name = "inertiakv"
    by = "fading"
    asks = _QUERIES

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        last, rank = prompts.length - 1, super().prompt_scores(prompts, rows).rank
        parts = (
            torch.einsum("c,nkcs->nks", (1 - INERTIA) * INERTIA ** (last - at).float(), received.mean(2))
            for at, received in base.attention_rows(prompts, _QUERIES, rows.window)
        )
        return base.PromptScores(rank, reduce(torch.add, parts))

    def update(self, step: base.AttendedStep) -> None:
        step.score.mul_(INERTIA).add_(step.received, alpha=1 - INERTIA)
