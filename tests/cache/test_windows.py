"""Layers whose queries see the last tokens only: what is kept there, and what of it is seen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from tests.cache.conftest import by_torch
from tests.cache.harness import CacheRun, OracleRun, Stream, budget_of, compare, make_stream
from tests.oracles.eviction import FullOracle, LocalOracle
from tests.policy_matrix import EVICTING, POLICIES, SCORED, PolicyRow

pytestmark = pytest.mark.turns

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)


@each_policy
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 24)), min_size=1, max_size=4),
    window=st.integers(1, 20),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    steps=st.integers(1, 30),
    sinks=st.integers(0, 3),
    seed=st.integers(0, 2**40),
)
def test_random_shapes_equal_oracle(
    policy: PolicyRow,
    shape: list[tuple[int, int]],
    window: int,
    kv_heads: int,
    group: int,
    steps: int,
    sinks: int,
    seed: int,
) -> None:
    budgets = [budget_of(policy, total, length, steps, sinks).within(window) for length, total in shape]
    streams = [make_stream(length, steps, kv_heads, group, seed=seed + row) for row, (length, _) in enumerate(shape)]
    if policy.name == "full":  # in a window it is the tokens that the next query sees
        policy = PolicyRow("full", LocalOracle, {})
    compare(policy, EvictionConfig(policy.name, seed=seed), streams, budgets, steps, layer=seed % 7, window=window)


@pytest.mark.parametrize("policy", SCORED, ids=lambda row: row.name)
def test_long_streams_of_little_room_equal_oracle(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 120, group=2, seed=prompt) for prompt in (2, 11, 40)]
    budgets = [Budget(9, 5, 4, 0, False), Budget(9, 6, 1, 2, False), Budget(11, 8, 0, 3, False)]
    compared = compare(policy, policy.eviction(), streams, budgets, 120, window=13)
    assert compared > 0.9 * 121 * 6, "nearly every step can be decided"


@each_policy
@pytest.mark.parametrize("window", [1, 9, 33, 34])
def test_a_budget_that_reaches_the_window_gives_what_a_full_cache_gives(policy: PolicyRow, window: int) -> None:
    """The oracle keeps everything, and hides what has left the window."""
    streams = [make_stream(prompt, 25, group=2, seed=prompt) for prompt in (3, 20, 8)]
    budgets = [budget_of(policy, max(window - 1, 1), s.prompt, 25).within(window) for s in streams]
    assert all(budget.full or budget.total == window - 1 for budget in budgets)
    run = CacheRun(streams, budgets, make_policy(policy.eviction()), window=window)
    full = Budget(50, 0, 50, 0, True)
    oracles = [OracleRun(s, full, FullOracle, layer=0, row_id=0, seed=0, window=window) for s in streams]
    for _ in range(25):
        expected = torch.stack([oracle.step() for oracle in oracles])
        torch.testing.assert_close(run.step(), expected, atol=1e-5, rtol=1e-5)


@each_policy
def test_evicted_and_out_of_the_window_equals_masked(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 40, group=2, seed=prompt) for prompt in (25, 6)]
    budgets = [budget_of(policy, 12, s.prompt, 40, sinks=3).within(16) for s in streams]
    run = CacheRun(streams, budgets, make_policy(policy.eviction()), window=16)
    for step in range(40):
        kept, output = run.kept(), run.step()
        for row, stream in enumerate(streams):
            now = stream.prompt + step
            visible = torch.zeros(2, now + 1, dtype=torch.bool)
            for head in range(2):
                visible[head, [*(p for p in kept[row][head] if p > now - 16), now]] = True
            logits = stream.q[:, now].view(2, 2, 1, 4) @ stream.k[:, None, : now + 1].transpose(-1, -2) / 2
            probs = logits.masked_fill(~visible[:, None, None], -math.inf).softmax(-1)
            expected = (probs @ stream.v[:, None, : now + 1]).view(4, 4)
            torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)


@each_policy
def test_slots_hold_the_token_they_claim(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 60, seed=prompt) for prompt in (5, 30, 30)]
    for stream in streams:
        stream.k[..., 0] = torch.arange(stream.k.shape[1])
        stream.v[..., 1] = -torch.arange(stream.k.shape[1])
    budgets = [budget_of(policy, 12, s.prompt, 60, sinks=2).within(16) for s in streams]
    run = CacheRun(streams, budgets, make_policy(policy.eviction()), window=16)
    for _ in range(60):
        run.step()
        pos = run.cache.pos
        assert run.cache.k is not None
        assert run.cache.v is not None
        assert torch.equal(run.cache.k[..., 0][pos >= 0], pos[pos >= 0].float()), "K"
        assert torch.equal(run.cache.v[..., 1][pos >= 0], -pos[pos >= 0].float()), "V"


@each_policy
def test_rows_of_different_lengths_are_as_if_alone(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 40, group=2, seed=prompt) for prompt in (7, 50, 2)]
    totals = (6, 9, 30)
    budgets = [budget_of(policy, n, s.prompt, 40, 2).within(12) for s, n in zip(streams, totals, strict=True)]
    config = policy.eviction()
    together = CacheRun(streams, budgets, make_policy(config), window=12)
    alone = [
        CacheRun([stream], [budget], make_policy(config), row_ids=[row], window=12)
        for row, (stream, budget) in enumerate(zip(streams, budgets, strict=True))
    ]
    for step in range(40):
        kept, output = together.kept(), together.step()
        for row, run in enumerate(alone):
            assert kept[row] == run.kept()[0], f"row {row} step {step}"
            torch.testing.assert_close(output[row], run.step()[0], atol=1e-6, rtol=1e-5)


def test_what_the_window_hides_goes_before_what_has_the_lowest_score() -> None:
    # Token 0 gets all the attention. It stays while it can be seen, and goes at once when it cannot.
    q, k = torch.zeros(1, 30, 2), torch.zeros(1, 30, 2)
    q[..., 0], k[0, 0, 0] = 8.0, 8.0
    run = CacheRun([Stream(q, k, k, 4)], [Budget(4, 2, 2, 0, False)], make_policy(EvictionConfig("h2o", 0.5)), window=9)
    for step in range(20):
        run.step()
        now = 4 + step
        assert (0 in run.kept()[0][0]) == (now + 1 < 9), f"step {step}"


@pytest.mark.parametrize("name", ["h2o", "random", "local", "streaming"])
def test_without_heavy_tokens_nothing_is_ranked(name: str) -> None:
    """Rows that reach the window beside rows that never do: no scores, no statistic, and what `local` gives."""
    streams = [make_stream(prompt, 40, group=2, seed=prompt) for prompt in (30, 2, 30)]
    budgets = [Budget(40, 20, 20, 0, False), Budget(8, 4, 4, 0, True), Budget(9, 0, 7, 2, False)]
    budgets = [budget.within(11) for budget in budgets]
    assert budgets[0] == Budget(10, 0, 10, 0, False)
    runs = [CacheRun(streams, budgets, make_policy(EvictionConfig(x)), window=11) for x in (name, "local")]
    assert not runs[0].cache.wants_column_sums
    assert runs[0].cache._slots.score is None
    for _ in range(40):
        assert torch.equal(runs[0].step(), runs[1].step())
        assert runs[0].kept() == runs[1].kept()


@by_torch
def test_budgets_within_a_window() -> None:
    ten, full = Budget(10, 5, 5, 0, False), Budget(10, 0, 10, 0, True)
    assert ten.within(None) == ten.within(12) == ten
    assert ten.within(11) == ten.within(11).within(11) == Budget(10, 0, 10, 0, False)
    assert full.within(11) == full.within(100) == full
    assert full.within(10) == Budget(9, 0, 9, 0, False)
    assert full.within(1) == Budget(0, 0, 0, 0, False)


@by_torch
def test_a_budget_above_the_window_is_refused() -> None:
    budget = Budget(20, 10, 10, 0, False)
    shape, policy = CacheShape.of([budget], 1, 4), make_policy(EvictionConfig("h2o"))
    with pytest.raises(ValueError, match=r"Budget\(.*\) is not within the window of 8 tokens"):
        KVCache(shape, [budget], policy, layer=0, row_ids=[0], window=8)


@pytest.mark.parametrize("policy", EVICTING, ids=lambda row: row.name)
def test_a_window_that_nothing_leaves_changes_no_bit(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 20, group=2, seed=prompt) for prompt in (12, 25)]
    budgets = [budget_of(policy, 9, s.prompt, 20, 2) for s in streams]
    plain, windowed = (CacheRun(streams, budgets, make_policy(policy.eviction()), window=w) for w in (None, 45))
    assert torch.equal(plain.steps(20), windowed.steps(20))


@each_policy
def test_a_window_beyond_what_32_bits_count_is_none(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 25, group=2, seed=prompt) for prompt in (3, 20)]
    budgets = [budget_of(policy, 9, s.prompt, 25) for s in streams]
    runs = [CacheRun(streams, budgets, make_policy(policy.eviction()), window=window) for window in (None, 1 << 40)]
    for _ in range(25):
        open_, wide = (run.step() for run in runs)
        assert torch.equal(open_, wide)
    assert runs[0].kept() == runs[1].kept()
