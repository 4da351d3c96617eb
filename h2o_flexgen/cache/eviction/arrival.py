"""The order of arrival as a score, for caches in which it is not alone: spans of the prompt stay, too."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.base import AttendedPrompts, PromptRows, PromptScores, RankedPolicy, Tokens


class ArrivalPolicy(RankedPolicy):
    """The newest tokens stay, beside sinks and spans: what the order of arrival decides, where it is not alone."""

    name = "arrival"

    def prompt_scores(self, prompts: AttendedPrompts, rows: PromptRows) -> PromptScores:
        positions = rows.tokens.positions.float() + 1
        return PromptScores(positions.expand(len(prompts.k), prompts.k.shape[1], -1))

    def new_scores(self, tokens: Tokens, keys: Tensor | None) -> Tensor:
        positions, _ = torch.broadcast_tensors(tokens.positions, tokens.heads)
        return positions.float().add(1)
