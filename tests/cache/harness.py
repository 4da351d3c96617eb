"""Streams of q, k, v through a KVCache, and the same streams through the oracles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache import CacheShape, EvictionPolicy, KVCache
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.kernels import prefill_attention
from tests.oracles.eviction import EvictionOracle


class Stream(NamedTuple):
    """One sequence: q (heads, T, d), k and v (kv_heads, T, d); the first `prompt` tokens are its prompt."""

    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int


def make_stream(prompt: int, steps: int, kv_heads: int = 2, group: int = 1, d: int = 4, seed: int = 0) -> Stream:
    """A random stream; queries are long enough for peaked attention, so that scores differ clearly."""
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(kv_heads * group, prompt + steps, d, generator=generator)
    k, v = torch.randn(2, kv_heads, prompt + steps, d, generator=generator)
    return Stream(q, k, v, prompt)


class CacheRun:
    """A KVCache fed with streams, one row each. `step` gives (b, heads, d)."""

    def __init__(
        self,
        streams: Sequence[Stream],
        budgets: Sequence[Budget],
        policy: EvictionPolicy,
        *,
        layer: int = 0,
        row_ids: Sequence[int] | None = None,
        buffers: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.streams, self.dtype, self.device = list(streams), dtype, device
        kv_heads, _, d = self.streams[0].k.shape
        self.scale = d**-0.5
        self.shape = CacheShape.of(budgets, kv_heads, d)
        k, v = buffers or self.shape.buffers(dtype, device)
        ids = range(len(self.streams)) if row_ids is None else row_ids
        self.cache = KVCache(self.shape, budgets, policy, layer=layer, row_ids=ids, device=k.device, k=k, v=v)
        self.time = 0
        self.prompt_outputs: list[Tensor] = []
        for length, members in groupby(range(len(self.streams)), key=lambda row: self.streams[row].prompt):
            self._fill(list(members), length)

    def _fill(self, rows: list[int], length: int) -> None:
        q, k, v = self._stack(rows, slice(length))
        attention = prefill_attention(q, k, v, self.scale, self.cache.wants_column_sums)
        self.prompt_outputs += list(attention.out)
        self.cache.fill(rows, k, v, attention.column_sums)

    def step(self) -> Tensor:
        q, k, v = self._stack(range(len(self.streams)), None)
        self.time += 1
        return self.cache.attend(q, k, v, self.scale)

    def _stack(self, rows: Sequence[int], tokens: slice | None) -> list[Tensor]:
        """q, k, v of `tokens`, or of the token whose turn it is."""
        streams = [self.streams[row] for row in rows]
        stacked = (
            torch.stack([getattr(s, name)[:, tokens or s.prompt + self.time] for s in streams]) for name in "qkv"
        )
        return [x.to(self.dtype).to(self.device) for x in stacked]

    def steps(self, count: int) -> Tensor:
        """(count, b, heads, d)."""
        return torch.stack([self.step() for _ in range(count)])

    def kept(self) -> list[list[list[int]]]:
        """Positions by row and KV head."""
        pos = self.cache.pos
        return [[sorted(p for p in head if p >= 0) for head in row] for row in pos.tolist()]


class OracleRun:
    """The oracles of one stream, one per KV head; `step` gives (heads, d)."""

    def __init__(
        self, stream: Stream, budget: Budget, oracle: type[EvictionOracle], *, layer: int, row_id: int, seed: int
    ) -> None:
        self.stream = stream
        self.kv_heads, _, d = stream.k.shape
        self.group = stream.q.shape[0] // self.kv_heads
        self.time = stream.prompt
        self.oracles = [
            oracle(budget, scale=d**-0.5, seed=seed, layer=layer, row_id=row_id, head=head)
            for head in range(self.kv_heads)
        ]
        self._q = [
            stream.q[head * self.group : (head + 1) * self.group].transpose(0, 1).tolist()
            for head in range(self.kv_heads)
        ]
        self._k, self._v = stream.k.tolist(), stream.v.tolist()
        self.prompt_outputs = [
            oracle.prompt(q[: self.time], k[: self.time], v[: self.time])
            for oracle, q, k, v in zip(self.oracles, self._q, self._k, self._v, strict=True)
        ]

    def step(self) -> Tensor:
        now, self.time = self.time, self.time + 1
        outputs = [
            oracle.step(q[now], k[now], v[now])
            for oracle, q, k, v in zip(self.oracles, self._q, self._k, self._v, strict=True)
        ]
        return torch.tensor([head for group in outputs for head in group])
