"""Keys that differ from the others (Park et al. 2025, arXiv 2504.15364, "KeyDiff")."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.cache.eviction import base
from h2o_flexgen.kernels import ranks
from h2o_flexgen.kernels.states import serves


class KeyDiffPolicy(base.RankedPolicy):
    """The score of a token is 1 - cos(key, anchor), the anchor being the mean direction of all keys that are cached.

    The anchor is taken anew at each eviction, the newest key included.
    """

    name = "keydiff"
    by = "difference"
    compares_keys = True

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        return base.PromptScores(_difference(prompts.stored_keys, None))

    def ranks(self, step: base.AttendedStep) -> Tensor:
        keys = step.held().k
        return ranks.differences(keys, step.pos) if serves(keys) else _difference(keys, step.pos >= 0)


def _difference(keys: Tensor, held: Tensor | None) -> Tensor:
    """Of keys (b, kv_heads, N, d), of which those `held` (b, kv_heads, N) count: (b, kv_heads, N) float32."""
    # Directions are never written down: two products with the keys as they are, and their norms, cost less.
    keys = keys.float()
    shortness = keys.norm(dim=-1).clamp(min=1e-12).reciprocal()
    counted = shortness if held is None else shortness * held
    anchor = F.normalize(counted.unsqueeze(2) @ keys, dim=-1)
    return (1 - (keys @ anchor.transpose(-1, -2)).squeeze(-1).mul_(shortness)).clamp_(min=0)
