"""Important and not redundant (Cai et al. 2025, arXiv 2505.24133, "R-KV")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.cache.eviction.looking_back import Look, LookingBack, neighbours

IMPORTANCE = 0.1
_ALIKE, _POOL = 0.5, 7


class RKVPolicy(LookingBack):
    """The score is 0.1 of what the last eight queries look at, minus 0.9 of how like the other keys a token's is.

    Likeness is the mean cosine, in which of those that are alike the latest does not count; then a softmax.
    """

    name = "rkv"
    looks_back = 8

    def score(self, look: Look) -> Tensor:
        important = neighbours(look.attention(candidates=True, group="before"), look.chosen, _POOL, largest=True)
        alike = torch.stack([_likeness(*each) for each in zip(look.k, look.chosen, strict=True)])
        return 1 + IMPORTANCE * important - (1 - IMPORTANCE) * alike


def _likeness(keys: Tensor, chosen: Tensor) -> Tensor:
    """Of one head's keys (N, d), of which those `chosen` are compared with each other: (N,), summing to 1."""
    directions = F.normalize(keys, dim=-1)
    cosines = (directions @ directions.T).fill_diagonal_(0.0)
    count = len(keys)
    first = int(chosen.to(torch.uint8).argmax()) if bool(chosen.any()) else 0
    places = torch.arange(count, device=keys.device)
    latest = torch.where((cosines > _ALIKE) & chosen, places, first).amax(-1, keepdim=True)
    cosines.scatter_(-1, latest, 0.0)
    mean = (cosines * chosen.unsqueeze(-1)).sum(0) / chosen.sum().clamp(min=1)
    return mean.masked_fill(~chosen, -torch.inf).softmax(-1).nan_to_num_(0.0)
