"""Keys of small norm (Devoto et al. 2024, arXiv 2406.11430)."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.errors import required


class KnormPolicy(base.RankedPolicy):
    """The score of a token is one over the norm of its key: queries look most at short keys."""

    name = "knorm"
    scores_keys = compares_keys = True

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        return base.PromptScores(_shortness(prompts.stored_keys))

    def new_scores(self, tokens: base.Tokens, keys: Tensor | None) -> Tensor:
        return _shortness(required(keys, "the new keys are needed")).unsqueeze(-1)


def _shortness(keys: Tensor) -> Tensor:
    """Of keys (..., d); finite, even of a key that is zero."""
    return keys.float().norm(dim=-1).clamp(min=1e-30).reciprocal()
