"""Prompts whose first part is shared: the cache must be as if each row had brought its own copy."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.kernels.types import KeysValues, Logits
from tests.policy_matrix import POLICIES, PolicyRow
from tests.seeds import torch_generator

HEADS, SIZE = 2, 4


def prompts(n: int, length: int, seed: int) -> Tensor:
    """(n, kv_heads, length, d), in memory as the engine's are."""
    generator = torch_generator(seed)
    return torch.randn(n, length, HEADS, SIZE, generator=generator).transpose(1, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    totals=st.lists(st.integers(3, 30), min_size=1, max_size=4),
    past=st.integers(1, 12),
    own=st.integers(1, 12),
    window=st.none() | st.integers(1, 26),
    gap=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_shared_equals_concatenated(
    policy: PolicyRow, totals: list[int], past: int, own: int, window: int | None, gap: bool, seed: int
) -> None:
    sinks = 2 if policy.name == "streaming" else None
    budgets = []
    for total in totals:
        config = EvictionConfig(policy.name, budget=None if policy.name == "full" else total, sinks=sinks, seed=5)
        budgets.append(config.resolve(past + own, 3).within(window))
    rows = list(range(len(totals)))
    if gap:  # rows that are no neighbours
        rows = [2 * row for row in rows]
        budgets = [budgets[row // 2] for row in range(2 * len(totals) - 1)]
    shape = CacheShape.of(budgets, HEADS, SIZE)
    before_k, before_v = (prompts(1, past, seed + i)[0] for i in range(2))
    k, v = (prompts(len(rows), own, seed + 2 + i) for i in range(2))
    sums = torch.rand(len(rows), HEADS, past + own, generator=torch_generator(seed))
    caches = []
    for shared in (True, False):
        cache = KVCache(shape, budgets, make_policy(config), layer=1, row_ids=range(len(budgets)), window=window)
        buffers = shape.buffers(torch.float32)
        cache.attach(*(buffer.fill_(7.0) for buffer in buffers))
        others = [row for row in range(len(budgets)) if row not in rows]
        for row in others:
            cache.fill([row], k[:1], v[:1], sums[:1, :, :own])
        if shared:
            cache.fill(rows, k, v, sums, past=KeysValues(before_k, before_v))
        else:
            whole = (torch.cat([x.expand(len(rows), -1, -1, -1), y], 2) for x, y in ((before_k, k), (before_v, v)))
            cache.fill(rows, *whole, sums)
        step = torch.ones(len(budgets), HEADS, SIZE)
        caches.append((cache, *buffers, cache.attend(step, step, step, Logits(0.5))))
    (one, *found), (other, *expected) = caches
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), "K, V and what a step sees"
    assert torch.equal(one.pos, other.pos)
    assert (one._slots.score is None) == (other._slots.score is None)
    assert one._slots.score is None or other._slots.score is None or torch.equal(one._slots.score, other._slots.score)
    assert one.next_pos == other.next_pos


class Largest(TorchDispatchMode):
    """The most elements that any operation gave new memory to."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view():
            known = [x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)]
            if result.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, result.untyped_storage().nbytes() // result.itemsize)
        return result


def test_what_rows_share_is_never_copied_for_each_of_them() -> None:
    rows, past, own = 16, 200, 3
    config = EvictionConfig("h2o", budget=20)
    budgets = [config.resolve(past + own, 1)] * rows
    shape = CacheShape.of(budgets, HEADS, SIZE)
    cache = KVCache(shape, budgets, make_policy(config), layer=0, row_ids=range(rows))
    cache.attach(*shape.buffers(torch.float32))
    before, k = prompts(1, past, 1)[0], prompts(rows, own, 2)
    sums = torch.rand(rows, HEADS, past + own)
    with Largest() as largest:
        cache.fill(range(rows), k, k, sums, past=KeysValues(before, before))
    allowed = max((past + rows * own) * HEADS * SIZE, rows * HEADS * (past + own))  # the table, and the ranks
    assert largest.numel <= allowed < rows * past * HEADS * SIZE / 2
