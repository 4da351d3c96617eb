"""Two of ten ways to get KV eviction wrong without noticing: how many tokens stay, and which are safe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.errors import UsageError
from h2o_flexgen.kernels.types import DecodeAttention
from tests.cache.conftest import by_torch
from tests.cache.harness import CacheRun, OracleRun, Stream, make_stream
from tests.cache.traps import each_evicting, run_of
from tests.oracles.eviction import H2OOracle
from tests.policy_matrix import POLICIES, PolicyRow

pytestmark = pytest.mark.turns

# 5. What a budget means: prompt and new tokens, the newest counted, heavy and recent together.


@each_evicting
@settings(max_examples=30, deadline=None, derandomize=True)
@given(length=st.integers(1, 40), gen=st.integers(1, 8), ratio=st.sampled_from([0.01, 0.3, 0.5, 0.99, 1.0]))
def test_trap_05_tokens_kept_are_the_documented_number(policy: PolicyRow, length: int, gen: int, ratio: float) -> None:
    sinks = 0 if policy.name == "streaming" else None
    config = policy.eviction(ratio=ratio, sinks=sinks)
    total = math.ceil(round(ratio * 100) * (length + gen) / 100)
    stream = make_stream(length, gen)
    run = CacheRun([stream], [config.resolve(length, gen)], make_policy(config))
    for step in range(gen):
        assert [len(head) for head in run.kept()[0]] == [min(length + step, total)] * 2, f"step {step}"
        run.step()


@each_evicting
@pytest.mark.parametrize("full", [{"ratio": 1.0}, {"budget": 70}, {"budget": 1000}], ids=str)
def test_trap_05_budget_of_the_whole_length_is_the_full_cache_bit_for_bit(
    policy: PolicyRow, full: dict[str, Any]
) -> None:
    config = policy.eviction(**{"ratio": 1.0, **full})
    streams = [make_stream(prompt, 30, group=2, seed=prompt) for prompt in (40, 21, 21)]
    run = CacheRun(streams, [config.resolve(s.prompt, 30) for s in streams], make_policy(config))
    assert not run.cache.wants_column_sums
    reference = run_of(POLICIES[0], streams, 30)
    assert torch.equal(run.steps(30), reference.steps(30)), "same code, same bits"
    assert run.kept() == [[list(range(s.prompt + 30))] * 2 for s in streams]


@by_torch
@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan"), float("inf")])
def test_trap_05_shares_without_meaning_are_refused(ratio: float) -> None:
    with pytest.raises(UsageError):
        EvictionConfig("h2o", ratio=ratio)


# 7. The boundary of recent and heavy: nobody goes blind for a step, nobody is demoted unasked.


def test_trap_07_brute_force_agrees_for_500_steps(calls: list[DecodeAttention]) -> None:
    stream = make_stream(30, 500, kv_heads=1, seed=3)
    budget = Budget(14, 7, 7, 0, False)
    run = CacheRun([stream], [budget], H2OPolicy())
    brute = OracleRun(stream, budget, H2OOracle, layer=0, row_id=0, seed=0)
    for step in range(500):
        before = run.kept()[0][0]
        assert before == sorted(brute.oracles[0].kept), f"step {step}"
        run.step()
        brute.step()
        after = run.kept()[0][0]
        gone = ({*before, 30 + step} - {*after}).pop()
        assert {*after} | {gone} == {*before, 30 + step}, "one in, one out"
        assert gone <= 30 + step - 7, "never one of the recent"
        row = calls[-1].row
        assert row is not None
        assert (row > 0).sum() == 15, "every live token is attended at every step"


def test_trap_07_leaving_the_window_is_no_demotion() -> None:
    # Token 5 gets all attention while it is recent; when it leaves the window it must beat the heavy ones at once.
    q, k = torch.zeros(1, 30, 2), torch.zeros(1, 30, 2)
    q[..., 0] = 8.0
    k[0, 5, 0] = 8.0
    run = CacheRun([Stream(q, k, k, 6)], [Budget(6, 3, 3, 0, False)], H2OPolicy())
    for step in range(20):
        run.step()
        kept = run.kept()[0][0]
        assert 5 in kept, f"step {step}"
        assert kept[-3:] == [4 + step, 5 + step, 6 + step]
