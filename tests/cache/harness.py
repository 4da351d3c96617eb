"""Streams of q, k, v through a KVCache, and the same streams through the oracles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import EvictionPolicy, make_policy
from h2o_flexgen.cache.eviction.base import AttendedPrompts, RankedPolicy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.recall import Recall
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.model.packing import CacheBits
from h2o_flexgen.config.splits import SPLITS
from h2o_flexgen.kernels.prompt import prefill_attention
from h2o_flexgen.kernels.types import Logits, PrefillAttention
from tests.oracles.eviction import EvictionOracle
from tests.oracles.packed import rounding
from tests.policy_matrix import PolicyRow
from tests.seeds import torch_generator

CLOSE = 1e-5  # scores closer than this are a matter of rounding


class Turning(NamedTuple):
    """Rotary positions by complex numbers: dimensions i and i + m of a head, i < m, turn by position * 3 ** -i."""

    m: int

    def vector(self, vector: Sequence[float], position: int) -> list[float]:
        turned = list(vector)
        for i in range(self.m):
            angle = position * 3.0**-i
            pair = complex(vector[i], vector[i + self.m]) * complex(math.cos(angle), math.sin(angle))
            turned[i], turned[i + self.m] = pair.real, pair.imag
        return turned

    def angles(self, positions: Tensor) -> Tensor:
        return positions.unsqueeze(-1) * 3.0 ** -torch.arange(self.m)

    def tensor(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (..., T, d) at `positions` (T,)."""
        angles = self.angles(positions).to(x.device)
        first, second, rest = x.float().tensor_split((self.m, 2 * self.m), dim=-1)
        pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag, rest], dim=-1).to(x.dtype)

    def table(self, size: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (size, 2 m), as the cache is given them."""
        angles = self.angles(torch.arange(size)).repeat(1, 2)
        return angles.cos(), angles.sin()


class Stream(NamedTuple):
    """One sequence: q (heads, T, d), k and v (kv_heads, T, d); the first `prompt` tokens are its prompt."""

    q: Tensor
    k: Tensor
    v: Tensor
    prompt: int


def make_stream(prompt: int, steps: int, kv_heads: int = 2, group: int = 1, d: int = 4, seed: int = 0) -> Stream:
    """A random stream; queries are long enough for peaked attention, so that scores differ clearly."""
    generator = torch_generator(seed)
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
        window: int | None = None,
        turning: Turning | None = None,
        bits: CacheBits = 16,
        recall: Recall | None = None,
    ) -> None:
        self.streams, self.dtype, self.device = list(streams), dtype, device
        self.window, self.turning = window, turning
        kv_heads, _, d = self.streams[0].k.shape
        self.logits = Logits(d**-0.5)
        self.shape = CacheShape.of(budgets, kv_heads, d, bits)
        k, v = buffers or self.shape.buffers(dtype, device)
        ids = range(len(self.streams)) if row_ids is None else row_ids
        self.cache = KVCache(self.shape, budgets, policy, layer=layer, row_ids=ids, device=k.device, window=window)
        self.cache.attach(k, v)
        self.cache.recall = recall
        self.table: tuple[Tensor, Tensor] | None = None
        if turning is not None:
            cos, sin = turning.table(self.shape.capacity)
            self.table = cos.to(k.device, dtype), sin.to(k.device, dtype)
        self.time = 0
        self.prompt_outputs: list[Tensor] = []
        for length, members in groupby(range(len(self.streams)), key=lambda row: self.streams[row].prompt):
            self._fill(list(members), length)

    def _fill(self, rows: list[int], length: int) -> None:
        q, k, v = self._stack(rows, slice(length))
        seen_q, seen_k = q, k
        if self.turning is not None:
            seen_q, seen_k = (self.turning.tensor(x, torch.arange(length)) for x in (q, k))
        wants = self.cache.wants_column_sums
        attention = prefill_attention(seen_q, seen_k, v, self.logits, wants, window=self.window)
        self.prompt_outputs += list(attention.out)
        self.cache.fill(rows, k, v, self.cache.scores_of(rows, self._attended(seen_q, q, seen_k, k, v, attention)))

    def _attended(
        self, seen_q: Tensor, q: Tensor, seen_k: Tensor, k: Tensor, v: Tensor, attention: PrefillAttention
    ) -> AttendedPrompts:
        """What policies may look at: every query of the prompts."""
        policy = self.cache._policy
        asked = q if isinstance(policy, RankedPolicy) and policy.raw_queries else seen_q
        sums = attention.column_sums
        turn = None
        if self.turning is not None:
            turning = self.turning

            def turn(positions: Tensor) -> tuple[Tensor, Tensor]:
                angles = turning.angles(positions.cpu()).repeat(1, 2).to(k.device)
                return angles.cos(), angles.sin()

        return AttendedPrompts(seen_k, v, k, self.logits, None, asked, sums, turn)

    def step(self) -> Tensor:
        q, k, v = self._stack(range(len(self.streams)), None)
        self.time += 1
        return self.cache.attend(q, k, v, self.logits, self.table)

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
        self,
        stream: Stream,
        budget: Budget,
        oracle: type[EvictionOracle],
        *,
        layer: int,
        row_id: int,
        seed: int,
        **mode: Any,
    ) -> None:
        """`mode`: keywords of the oracle."""
        self.stream = stream
        self.kv_heads, _, d = stream.k.shape
        self.group = stream.q.shape[0] // self.kv_heads
        self.time = stream.prompt
        self.oracles = [
            oracle(budget, scale=d**-0.5, seed=seed, layer=layer, row_id=row_id, head=head, **mode)
            for head in range(self.kv_heads)
        ]
        for each in self.oracles:
            each.siblings = self.oracles
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


class Traced(NamedTuple):
    """What oracles of one stream say after a step, or the prompt: their output (heads, d), empty for the prompt, and of
    each KV head `closest` and what is kept."""

    outputs: Tensor
    heads: list[tuple[float, list[int]]]


_TRACES: dict[Any, list[Traced]] = {}


def _trace(
    stream: Stream,
    budget: Budget,
    oracle: type[EvictionOracle],
    bits: CacheBits,
    steps: int,
    turning: Turning | None,
    **mode: Any,
) -> list[Traced]:
    """Of the prompt and `steps` steps. Kept: the caches run each stream on several kernels, and the oracle is slow."""
    numbers = [(x.shape, x.numpy().tobytes()) for x in stream[:3]]
    key = (*numbers, stream.prompt, budget, oracle, bits, steps, turning, *mode.items())
    if key not in _TRACES:
        turned = {} if turning is None else {"rotate": turning.vector}
        run, found = OracleRun(stream, budget, rounding(oracle, bits), **mode, **turned), list[Traced]()
        for step in range(steps + 1):
            outputs = run.step() if step else torch.empty(0)
            found.append(Traced(outputs, [(each.closest, sorted(each.kept)) for each in run.oracles]))
        _TRACES[key] = found
    return _TRACES[key]


def held_counts(cache: KVCache) -> list[int]:
    """Tokens held by each row between steps, the same for all its heads."""
    rows = zip(cache._lengths.held, cache._lengths.budgets, strict=True)
    return [min(held + cache._lengths.step, budget.total) for held, budget in rows]


def state_bytes(cache: KVCache) -> int:
    """Bytes of what a cache keeps of its slots, beside K and V."""
    parts = (getattr(cache._slots, name, None) for name in ("score", "_pos", "_rank", "_flat", "_extra"))
    return sum(part.nbytes for part in parts if part is not None)


def compare(
    policy: PolicyRow,
    config: EvictionConfig,
    streams: list[Stream],
    budgets: list[Budget],
    steps: int,
    layer: int = 0,
    window: int | None = None,
    turning: Turning | None = None,
    bits: CacheBits = 16,
) -> int:
    """Run cache and oracles; returns how many (row, head, step) were compared, the rest being too close to call."""
    ids = [3 * row + 1 for row in range(len(streams))]
    how: dict[str, Any] = {"window": window, "turning": turning, "bits": bits}
    run = CacheRun(streams, budgets, make_policy(config), layer=layer, row_ids=ids, **how)
    mode = {"layer": layer, "seed": config.seed, "window": window}
    traces = [
        _trace(stream, budget, policy.oracle, bits, steps, turning, row_id=row_id, **mode)
        for stream, budget, row_id in zip(streams, budgets, ids, strict=True)
    ]
    group = streams[0].q.shape[0] // streams[0].k.shape[0]
    compared = 0
    for step in range(steps + 1):
        if step:
            error = (run.step() - torch.stack([trace[step].outputs for trace in traces])).abs().amax(-1)
            errors = error.unflatten(1, (-1, group)).amax(-1).tolist()
        kept = run.kept()
        for row, trace in enumerate(traces):
            for head, (closest, expected) in enumerate(trace[step].heads):
                if closest > CLOSE:
                    assert not step or errors[row][head] < 1e-5, f"output of row {row} head {head} step {step}"
                    assert kept[row][head] == expected, f"row {row} head {head} step {step}"
                    assert len(expected) == held_counts(run.cache)[row], "count"
                    compared += 1
    return compared


def budget_of(policy: PolicyRow, total: int, length: int, steps: int, sinks: int = 0) -> Budget:
    """Of a row that may hold `total` tokens, `sinks` of them the first where the policy takes sinks."""
    if policy.name == "full":
        return policy.eviction().resolve(length, steps)
    sinks_here = min(sinks, total - 1) if SPLITS.get(policy.name).takes_sinks else None
    return EvictionConfig(policy.name, budget=total, sinks=sinks_here).resolve(length, steps)
