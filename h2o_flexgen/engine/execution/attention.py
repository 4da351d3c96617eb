"""The attention of one tick: decode rows over their cache, prompts over themselves, side by side in one product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.engine.batching.gpu_batch import AttentionPart
from h2o_flexgen.engine.batching.prompt_attention import PromptAttention
from h2o_flexgen.huge import LARGE
from h2o_flexgen.models.rotary import Angles, rotate_both


@dataclass(frozen=True)
class TickAttention:
    """Attention of one layer for one GPU batch; called by the decoder, part by part.

    `cache` holds the decode rows, `prompts` fills that of the fresh ones; either is None where there are no such rows.
    Angles are those of the packed decode rows and of the packed prompts. `table`, where positions roll: what the cache
    turns its keys by, and then `row_angles` is None.
    """

    scale: float
    cache: KVCache | None
    prompts: PromptAttention | None
    row_angles: Angles | None
    prompt_angles: Angles | None
    table: Angles | None

    def part(self, part: AttentionPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (t, heads, d), k and v (t, kv_heads, d) of the part's tokens to the mixed values (t, heads, d)."""
        rows = part.rows
        if part.chunk is None:
            return self._decode(q, k, v)
        if q.is_cuda:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = LARGE.empty(*q.shape, dtype=q.dtype)
        if rows:
            out[:rows] = self._decode(q[:rows], k[:rows], v[:rows])
        if self.prompts is None:
            raise RuntimeError("prompts are in hand, and no cache to fill from them")
        self.prompts.chunk(part.chunk, self.prompt_angles, (q[rows:], k[rows:], v[rows:]), out[rows:])
        return out

    def _decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One decode step where the cache lives; the new tokens' q, k, v go there and the answer comes back."""
        q, k, v = self.turned(q, k, v)
        if self.cache is None or self.cache.device == q.device:
            return self.attend(q, k, v)
        place = self.cache.device
        return self.attend(q.to(place), k.to(place), v.to(place)).to(q.device)

    def turned(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the decode rows, rotated where that is done before they reach the cache."""
        if self.row_angles is None:
            return q, k, v
        return (*rotate_both(q, k, self.row_angles), v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One decode step over the cache, all of it where the cache is."""
        if self.cache is None:
            raise RuntimeError("decode rows are in hand, and no cache of theirs")
        return self.cache.attend(q, k, v, self.scale, table=self.table)
