"""The newer policies against their oracles: ragged rows, windows, few bits, rolling positions."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.eviction.base import AttendedPrompts, PromptRows, RankedPolicy, Tokens
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.errors import UsageError
from h2o_flexgen.kernels.types import Logits
from tests.cache.conftest import by_torch
from tests.cache.harness import Turning, compare, make_stream
from tests.policy_matrix import LATER, THEN_H2O, PolicyRow
from tests.seeds import torch_generator

pytestmark = pytest.mark.turns

LENGTHS, STEPS = (23, 9, 33, 17), 17
CASES = [row for row in (*LATER, *THEN_H2O) if not row.name.startswith("kvzip")]
"""A stream of tokens is not replayed: `kvzip` is compared in whole models."""


def compared(policy: PolicyRow, window: int | None = None, turning: Turning | None = None, bits: int = 16) -> int:
    """Of four rows with two KV heads in 18 steps: 144."""
    d = 16 if bits != 16 else 4
    streams = [make_stream(length, STEPS, 2, 2, d, seed=i) for i, length in enumerate(LENGTHS)]
    config = policy.eviction()
    budgets = [config.resolve(length, STEPS).within(window) for length in LENGTHS]
    return compare(policy, config, streams, budgets, STEPS, layer=3, window=window, turning=turning, bits=bits)


@pytest.mark.parametrize("policy", CASES, ids=lambda row: row.name)
def test_ragged_rows_equal_the_oracle(policy: PolicyRow) -> None:
    assert compared(policy) > 100


@pytest.mark.parametrize("policy", CASES, ids=lambda row: row.name)
def test_windows_of_which_the_budget_leaves_a_choice(policy: PolicyRow) -> None:
    assert compared(policy, window=29) > 100


@by_torch
@pytest.mark.parametrize("policy", CASES, ids=lambda row: row.name)
def test_rolling_positions(policy: PolicyRow) -> None:
    if policy.eviction().split.looks_back:
        with pytest.raises(UsageError, match="which asks again what queries asked before"):
            policy.eviction(rolling_positions=True)
        return
    assert compared(policy, turning=Turning(2)) > 100


@pytest.mark.parametrize("policy", CASES, ids=lambda row: row.name)
def test_few_bits(policy: PolicyRow) -> None:
    assert compared(policy, bits=8) > 60, "rounded numbers tie more often, and what ties is not compared"


def ranks_of(name: str, length: int, count: int, window: int | None = None) -> torch.Tensor:
    """Of a prompt's candidates, of whose `length` tokens `count` are computed: kvzip's twice as many."""
    k = torch.randn(1, 1, count, 16, generator=torch_generator(1))
    prompts = AttendedPrompts(k, k, k, Logits(0.25), queries=k, column_sums=k.norm(dim=-1))
    config, zero = EvictionConfig(name, budget=length // 2), torch.zeros(1, dtype=torch.int64)
    policy, budget = make_policy(config), config.resolve(length, 64)
    assert isinstance(policy, RankedPolicy)
    tokens = Tokens(torch.arange(length), zero, zero, 0)
    rank = policy.prompt_scores(prompts, PromptRows(tokens, budget, window)).rank
    return rank[..., budget.sinks : length - budget.recent]


@pytest.mark.parametrize("name", ["rkv", "nacl", "expected_attention", "h2o_mean"])
def test_among_thousands_of_tokens_few_tie(name: str) -> None:
    chosen = ranks_of(name, 4000, 4000)
    assert chosen.unique().numel() > 0.9 * chosen.numel()


def test_the_end_of_a_long_prompt_has_scores_in_layers_with_windows() -> None:
    """Queries that repeat its last chunk have left it; earlier ones see it."""
    rank = ranks_of("kvzip", 2100, 4200, window=100)
    assert bool((rank[..., -99:] > 0).all())
