"""Wide values, and a draw by attention (2026, arXiv 2606.03928, "VaSE", its form AttnV)."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.choice import rank_keys
from h2o_flexgen.cache.eviction.looking_back import Look, LookingBack, neighbours
from h2o_flexgen.cache.eviction.random import uniform
from h2o_flexgen.cache.vectors import lowest

_FIRST, _POOL = 4, 5


class VasePolicy(LookingBack):
    """A quarter of what a burst leaves are the tokens whose values range widest, the first four among them; the rest is
    drawn without replacement, each with a probability proportional to what the last 64 queries paid it and its
    neighbours.
    """

    name = "vase"
    looks_back = 64
    reads_values = True

    def score(self, look: Look) -> Tensor:
        kept = look.budget.total + 1 - look.budget.burst
        room = max(0, kept - look.budget.sinks - look.budget.recent)
        spread = (look.v.amax(-1) - look.v.amin(-1)).masked_fill(look.pos < _FIRST, torch.inf)
        widest = min(kept // 4, room, spread.shape[-1])
        spread = spread.masked_fill(~look.chosen, -1.0)
        wide = rank_keys(spread.view(torch.int32), look.pos)
        paid = neighbours(look.attention(candidates=True), look.chosen, _POOL, largest=False)
        noise = uniform(self.seed, look.tokens).clamp(min=2**-25)
        # Exponential clocks at the rates `paid`: the first to ring are drawn.
        drawn = paid.double().clamp(min=1e-30) / -noise.double().log()
        score = torch.where(look.chosen, drawn, 0.0).float()
        if widest:
            score = score.masked_fill(lowest(-wide, widest), torch.finfo(torch.float32).max)
        return score
