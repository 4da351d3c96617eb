"""Queries of other layers over a cache: they see what the step's own queries saw, and change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.budget import Budget
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.kernels.types import Logits

pytestmark = pytest.mark.turns

ROWS, KV_HEADS, GROUP, DIM, STEPS = 3, 2, 2, 16, 14
LENGTHS = (9, 5, 12)
TOTAL = max(LENGTHS) + STEPS


def filled(name: str, window: int | None, k: Tensor, v: Tensor) -> KVCache:
    """`k`, `v` (rows, kv_heads, TOTAL, DIM), of which the prompts are in the cache."""
    budgets = [Budget(6, 3, 3, 0, False), Budget(TOTAL, 0, TOTAL, 0, True), Budget(8, 4, 4, 0, False)]
    if name in ("full", "streaming"):
        budgets = [Budget(TOTAL, 0, TOTAL, 0, True) if name == "full" else Budget(6, 0, 4, 2, False)] * ROWS
    budgets = [budget.within(window) for budget in budgets]
    shape = CacheShape.of(budgets, KV_HEADS, DIM)
    policy = make_policy(EvictionConfig(name, **({} if name == "full" else {"budget": 6})))
    cache = KVCache(shape, budgets, policy, layer=0, row_ids=range(ROWS), window=window)
    cache.attach(*(buffer.fill_(torch.nan) for buffer in shape.buffers(k.dtype)))
    generator = torch.Generator().manual_seed(5)
    for row, length in enumerate(LENGTHS):
        sums = torch.rand(1, KV_HEADS, length, generator=generator)
        cache.fill([row], k[row : row + 1, :, :length], v[row : row + 1, :, :length], sums)
    return cache


def expected(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q (heads, d) over the positions `seen` (kv_heads, n), -1 for none, of k and v (kv_heads, TOTAL, d)."""
    out = []
    for head in range(KV_HEADS * GROUP):
        places = seen[head // GROUP]
        places = places[places >= 0].long()
        logits = k[head // GROUP, places] @ q[head] * 0.25
        out.append(logits.softmax(0) @ v[head // GROUP, places])
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", ["full", "h2o", "streaming", "tova", "roco", "keydiff"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_queries_see_the_same_and_change_nothing(name: str, window: int | None, dtype: torch.dtype) -> None:
    """float64 goes through torch, float32 through C where there is a compiler."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(ROWS, KV_HEADS, TOTAL, DIM, generator=generator).to(dtype) for _ in "kv")
    asked, again = (torch.randn(STEPS, ROWS, KV_HEADS * GROUP, DIM, generator=generator).to(dtype) for _ in "12")
    alone, shared = (filled(name, window, k, v) for _ in "12")
    for step in range(STEPS):
        places = [length + step for length in LENGTHS]
        new = [torch.stack([x[row, :, place] for row, place in enumerate(places)]) for x in (k, v)]
        before = shared.pos
        out = shared.attend(asked[step], *new, Logits(0.25))
        assert torch.equal(out, alone.attend(asked[step], *new, Logits(0.25)))
        other = shared.again((again[step], *new), Logits(0.25))
        for row, place in enumerate(places):
            held = before[row]
            if window is not None:
                held = torch.where(held > place - window, held, -1)
            seen = torch.cat([held, torch.full((KV_HEADS, 1), place, dtype=held.dtype)], dim=1)
            assert torch.allclose(other[row], expected(again[step][row], k[row], v[row], seen), atol=1e-5)
        assert torch.equal(shared.pos, alone.pos)
