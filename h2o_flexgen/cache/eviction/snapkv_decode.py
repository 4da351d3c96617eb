"""SnapKV in bursts while decoding: the baseline of arXiv 2512.12008 and of those that are made for long answers."""

from __future__ import annotations

from torch import Tensor

from h2o_flexgen.cache.eviction.looking_back import Look, LookingBack, neighbours

_POOL = 7


class SnapKVDecodePolicy(LookingBack):
    """The score is what the last 32 queries pay a token, the largest among seven neighbours; every 64 tokens."""

    name = "snapkv_decode"
    looks_back = 32

    def score(self, look: Look) -> Tensor:
        return neighbours(look.attention(candidates=False), look.chosen, _POOL, largest=True)
