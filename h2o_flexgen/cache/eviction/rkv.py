"""Important and not redundant (Cai et al. 2025, arXiv 2505.24133, "R-KV")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.cache.eviction.looking_back import Look, LookingBack, neighbours
from h2o_flexgen.config.eviction import ROW_LOGITS
from h2o_flexgen.kernels import ranks
from h2o_flexgen.kernels.states import serves

IMPORTANCE = 0.1
_ALIKE, _POOL = 0.5, 7


class RKVPolicy(LookingBack):
    """The score is 0.1 of what the last eight queries look at, minus 0.9 of how like the other keys a token's is.

    Likeness is the mean cosine, in which of those that are alike the latest does not count; then a softmax.
    """

    name = "rkv"
    looks_back = 8
    compares_keys = True

    def score(self, look: Look) -> Tensor:
        important = neighbours(look.attention(candidates=True, group="before"), look.chosen, _POOL, largest=True)
        if serves(look.k):
            mean = ranks.likeness(look.k, look.chosen)
        else:
            keys, chosen = look.k.flatten(0, 1), look.chosen.flatten(0, 1)
            some = max(1, ROW_LOGITS // keys.shape[1] ** 2)
            parts = zip(keys.split(some), chosen.split(some), strict=True)
            mean = torch.cat([_likeness(*part) for part in parts]).view_as(important)
        alike = mean.masked_fill(~look.chosen, -torch.inf).softmax(-1).nan_to_num_(0.0)
        # Beside the largest, not from 1: shares among thousands of tokens differ by less than what a 1 leaves of them.
        return IMPORTANCE * important + (1 - IMPORTANCE) * (alike.amax(-1, keepdim=True) - alike)


def _likeness(keys: Tensor, chosen: Tensor) -> Tensor:
    """Of keys (heads, N, d), of which those `chosen` are compared with each other: their mean cosines, (heads, N)."""
    directions = F.normalize(keys, dim=-1)
    cosines = directions @ directions.transpose(-1, -2)
    cosines.diagonal(dim1=-2, dim2=-1).fill_(0.0)
    places = torch.arange(keys.shape[1], device=keys.device, dtype=torch.float32)  # exact up to 2^24
    counted = chosen.float().unsqueeze(1)
    latest = torch.where(cosines > _ALIKE, places.where(chosen, -1.0).unsqueeze(1), -1.0).amax(-1, keepdim=True).long()
    first = counted.argmax(-1, keepdim=True)  # 0 where none is chosen
    cosines.scatter_(-1, latest.where(latest >= 0, first), 0.0)
    return (counted @ cosines).squeeze(1) / counted.sum(-1).clamp(min=1)
