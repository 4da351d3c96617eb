"""The tokens that the model attends to when it repeats its prompt (Kim et al. 2025, arXiv 2505.23416, "KVzip")."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import base

CHUNK = 2048
_FIRST = 4


class KVzipPolicy(base.RankedPolicy):
    """The score is the most attention that a token receives when the prompt is read a second time, from any query.

    Each prompt is computed twice, one after the other, and the second is forgotten. A query of it is asked about the
    chunk of 2,048 tokens that it repeats, the first four tokens, and what has been repeated of the chunk; in layers
    with a window about all that it sees: queries that repeat a later chunk no longer see the prompt.
    """

    name = "kvzip"
    asks = "all"

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        length = prompts.length // 2
        n, kv_heads = prompts.k.shape[:2]
        most, sums = (torch.zeros(n, kv_heads, length, device=prompts.k.device) for _ in range(2))

        def beside(at: Tensor, places: Tensor) -> Tensor:
            return (places >= _FIRST) & (places % length // CHUNK != (at - length).unsqueeze(1) // CHUNK)

        for _, part in base.attention_rows(prompts, length, rows.window, None if rows.window else beside):
            own = part[..., :length]
            most = torch.maximum(most, own.amax((2, 3)))
            sums += own.mean(2).sum(2)
        return base.PromptScores(most, sums)
