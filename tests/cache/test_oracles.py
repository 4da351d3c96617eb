"""Every policy against its oracle: the same kept sets and the same attention, step by step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.cache.eviction import EVICTION_POLICIES, make_policy
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.splits import SPLITS
from h2o_flexgen.errors import UsageError
from tests.cache.conftest import by_torch
from tests.cache.harness import CacheRun, OracleRun, Stream, compare, make_stream
from tests.policy_matrix import EVICTING, LATER, POLICIES, PolicyRow

pytestmark = pytest.mark.turns


@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_long_stream_equals_oracle(policy: PolicyRow) -> None:
    config, steps = policy.eviction(), 130
    streams = [make_stream(prompt, steps, group=2, seed=prompt) for prompt in (3, 17, 17, 30)]
    if config.name == "full":
        steps = 40  # the others must go round their rings
    budgets = [
        EvictionConfig(**{**config.to_json(), "ratio": 1.0, "budget": budget}).resolve(stream.prompt, steps)
        if config.name != "full"
        else config.resolve(stream.prompt, steps)
        for stream, budget in zip(streams, (9, 12, 13, 1000), strict=True)
    ]
    compared = compare(policy, config, streams, budgets, steps, layer=5)
    assert compared > 0.9 * (steps + 1) * 8, "nearly every step can be decided"


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Prompt lengths, with repeats, and a budget for each."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    if draw(st.booleans()):
        lengths = [lengths[0]] * len(lengths)
    return lengths, [draw(st.integers(1, length + 5)) for length in lengths]


@pytest.mark.parametrize("policy", EVICTING, ids=lambda row: row.name)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    shape=rows(),
    same_budget=st.booleans(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    steps=st.integers(1, 30),
    sinks=st.integers(0, 3),
    seed=st.integers(0, 2**40),
)
def test_random_shapes_equal_oracle(
    policy: PolicyRow,
    shape: tuple[list[int], list[int]],
    same_budget: bool,
    kv_heads: int,
    group: int,
    steps: int,
    sinks: int,
    seed: int,
) -> None:
    lengths, totals = shape
    if same_budget:
        totals = [totals[0]] * len(totals)
    budgets = []
    for length, total in zip(lengths, totals, strict=True):
        sinks_here = min(sinks, total - 1) if SPLITS.get(policy.name).takes_sinks else None
        config = EvictionConfig(policy.name, budget=total, sinks=sinks_here, seed=seed)
        budgets.append(config.resolve(length, steps))
    streams = [make_stream(length, steps, kv_heads, group, seed=seed + row) for row, length in enumerate(lengths)]
    compare(policy, config, streams, budgets, steps, layer=seed % 7)


@pytest.mark.parametrize("policy", [row for row in EVICTING if row.name in ("h2o", "random")], ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("heavy", "recent", "sinks"), [(0, 1, 0), (0, 6, 0), (6, 0, 0), (1, 1, 0), (3, 2, 3), (2, 0, 6)]
)
def test_any_split_equals_oracle(policy: PolicyRow, heavy: int, recent: int, sinks: int) -> None:
    budget = Budget(heavy + recent + sinks, heavy, recent, sinks, full=False)
    streams = [make_stream(prompt, 50, seed=prompt) for prompt in (2, 20)]
    assert compare(policy, policy.eviction(), streams, [budget] * 2, 50) > 0, "something was compared"


@by_torch
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_prompt_attention_equals_oracle(policy: PolicyRow) -> None:
    stream = make_stream(20, 0, group=3)
    budget = policy.eviction().resolve(20, 1)
    run = CacheRun([stream], [budget], make_policy(policy.eviction()))
    expected = OracleRun(stream, budget, policy.oracle, layer=0, row_id=0, seed=0).prompt_outputs
    ours = run.prompt_outputs[0].view(2, 3, 20, 4).transpose(1, 2)
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_equal_scores_keep_the_lower_positions() -> None:
    # Equal keys give every token the same share: after a prompt of 8 and at steps the attention is 1/n, exact in binary
    # only for some n, but equal for all tokens of one age. Values are irrelevant.
    stream = Stream(torch.zeros(1, 40, 4), torch.zeros(1, 40, 4), torch.zeros(1, 40, 4), 8)
    for budget in (Budget(4, 2, 2, 0, False), Budget(4, 4, 0, 0, False), Budget(3, 3, 0, 0, False)):
        run = CacheRun([stream], [budget], make_policy(EvictionConfig("h2o", budget=4)))
        oldest = list(range(budget.heavy))
        for step in range(30):
            newest = list(range(8 + step - budget.recent, 8 + step))
            assert run.kept()[0][0] == oldest + newest, f"step {step}"
            run.step()


def test_exact_ties_at_a_step_let_the_highest_position_go() -> None:
    # Two KV entries of identical keys arrive after a long silence: all scores are exactly zero but the first one's.
    q, k = torch.full((1, 30, 1), 200.0), torch.full((1, 30, 1), -200.0)
    k[:, 0] = 200.0
    stream = Stream(q, k, k, 1)
    run = CacheRun([stream], [Budget(5, 3, 2, 0, False)], make_policy(EvictionConfig("h2o", budget=5)))
    for step in range(20):
        run.step()
        now = step + 1
        assert run.kept()[0][0] == (list(range(now + 1)) if now < 5 else [0, 1, 2, now - 1, now]), f"step {step}"


@by_torch
def test_matrix_registry_and_splits_name_the_same_policies() -> None:
    names = [row.name for row in (*POLICIES, *LATER)]
    assert sorted(names) == sorted(EVICTION_POLICIES.names()) == sorted(SPLITS.names()), "one row per policy"


@by_torch
def test_unknown_policy_is_suggested() -> None:
    with pytest.raises(UsageError, match="did you mean 'streaming'"):
        EVICTION_POLICIES.get("steaming")


@by_torch
def test_oracle_scores_add_up() -> None:
    """The oracle itself: every query hands out a total of one."""
    from tests.oracles.eviction import H2OOracle

    oracle = H2OOracle(Budget(9, 5, 4, 0, True), scale=1.0)
    oracle.prompt([[[1.0, 2.0]], [[0.5, -1.0]]], [[1.0, 0.0], [0.0, 1.0]], [[1.0], [2.0]])
    assert math.isclose(sum(oracle.scores.values()), 2.0), "two queries"
    assert math.isclose(oracle.scores[1], 1 / (1 + math.exp(1.5))), "by hand"
