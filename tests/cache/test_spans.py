"""Spans of prompts in a cache, against the oracles: every policy, windows, few bits, rolling positions, ragged rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.budget import parts_between, shares
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.errors import UsageError
from tests.cache.conftest import by_torch
from tests.cache.harness import Turning, compare, make_stream
from tests.oracles.spans import slow_shares, with_spans
from tests.policy_matrix import EVICTING, LATER, THEN_H2O, PolicyRow

pytestmark = pytest.mark.turns

LENGTHS, STEPS = (37, 21, 40, 37), 17
SPANS = (((3, 6), (20, 23)), ((1, 4),), (), ((0, 3), (3, 6), (36, 37)))
RULES = ("whitelist", "fair")
CASES = [row for row in (*EVICTING, *LATER, *THEN_H2O) if not row.name.startswith("kvzip")]


def named(x: object) -> str:
    return str(getattr(x, "name", x))


def compared(
    policy: PolicyRow, rule: str, window: int | None = None, turning: Turning | None = None, bits: int = 16
) -> int:
    """Of four rows with two KV heads in 18 steps: 144."""
    d = 16 if bits != 16 else 4
    streams = [make_stream(length, STEPS, 2, 2, d, seed=i) for i, length in enumerate(LENGTHS)]
    split = policy.eviction().split
    changes = {"ratio": 0.85, "recent": 3} if split.prompt_only else {"ratio": 0.5}
    if not split.takes_recent:
        changes.pop("recent", None)
    config = policy.eviction(spans=rule, **changes)
    budgets = [config.by_layer([window], length, STEPS, spans)[0] for length, spans in zip(LENGTHS, SPANS, strict=True)]
    assert budgets[0].spans or (window and budgets[0].recent == window - 1), "something is marked"
    policy = replace(policy, oracle=with_spans(policy.oracle, rule))
    return compare(policy, config, streams, budgets, STEPS, layer=3, window=window, turning=turning, bits=bits)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", CASES, ids=lambda row: row.name)
def test_ragged_rows_equal_the_oracle(policy: PolicyRow, rule: str) -> None:
    assert compared(policy, rule) > 90


@pytest.mark.parametrize(("policy", "rule"), [*zip(CASES, RULES * len(CASES), strict=False)], ids=named)
def test_windows(policy: PolicyRow, rule: str) -> None:
    assert compared(policy, rule, window=35) > 90


@pytest.mark.parametrize(("policy", "rule"), [*zip(CASES, RULES[::-1] * len(CASES), strict=False)], ids=named)
def test_few_bits(policy: PolicyRow, rule: str) -> None:
    assert compared(policy, rule, bits=8) > 80


@by_torch
@pytest.mark.parametrize(
    ("policy", "rule"),
    [pair for pair in zip(CASES, RULES[::-1] * len(CASES), strict=False) if not pair[0].eviction().split.looks_back],
    ids=named,
)
def test_rolling_positions(policy: PolicyRow, rule: str) -> None:
    assert compared(policy, rule, turning=Turning(2)) > 90


@by_torch
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 100))
def test_shares(lengths: list[int], total: int) -> None:
    if total < len(lengths):
        with pytest.raises(UsageError, match="is to be shared by"):
            shares(total, lengths)
        return
    found = shares(total, lengths)
    assert sum(found) == total
    assert found == slow_shares(total, lengths)
    assert total > sum(lengths) or all(its <= length for its, length in zip(found, lengths, strict=True))
    for one, its in zip(lengths, found, strict=True):
        assert all(abs(its - other) <= 1 for length, other in zip(lengths, found, strict=True) if length == one)


@by_torch
def test_what_lies_between_spans_is_a_part_too() -> None:
    assert parts_between([(0, 2), (2, 5), (7, 9)], 12) == ((0, 2), (2, 5), (5, 7), (7, 9), (9, 12))
    assert parts_between([], 3) == ((0, 3),)


@by_torch
@pytest.mark.parametrize(
    ("settings", "spans", "found"),
    [
        ({"name": "h2o", "budget": 10}, ((0, 6),), "spans to keep have 6 tokens, and a budget of 10 leaves 5"),
        ({"name": "streaming", "budget": 10}, ((4, 10),), "spans to keep have 6 tokens.* leaves 5 beside 1 and 4 sink"),
        ({"name": "scissorhands", "budget": 10, "recent": 6}, ((2, 4), (6, 9)), "needed at most 4"),
    ],
)
def test_a_whitelist_beyond_the_budget_is_refused(settings: dict, spans: tuple, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        EvictionConfig(**settings, spans="whitelist").resolve(40, 8, spans)


@by_torch
def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(UsageError, match="needed one of whitelist, fair"):
        EvictionConfig("h2o", spans="white")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reads the whole prompt a second time"):
        EvictionConfig("kvzip", ratio=0.5, spans="fair")
    with pytest.raises(UsageError, match="keeps all of the prompt"):
        EvictionConfig("h2o", ratio=0.5, spans="whitelist", keep_prompt=True)


@by_torch
def test_without_spans_nothing_changes() -> None:
    plain = EvictionConfig("h2o", ratio=0.3)
    for rule in RULES:
        assert EvictionConfig("h2o", ratio=0.3, spans=rule).resolve(50, 9) == plain.resolve(50, 9)  # type: ignore[arg-type]
    assert plain.resolve(50, 9, ((1, 3),)) == plain.resolve(50, 9)
    whole = EvictionConfig("h2o", spans="fair")
    assert whole.resolve(50, 9, ((1, 3),)).full
