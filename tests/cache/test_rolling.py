"""Rolling positions: keys are kept unrotated and turn by their place among what is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.kernels.types import Logits
from tests.cache.harness import CacheRun, Stream, Turning, budget_of, compare, make_stream, state_bytes
from tests.oracles.eviction import LocalOracle
from tests.policy_matrix import EVICTING, POLICIES, SCORED, PolicyRow
from tests.seeds import torch_generator

pytestmark = pytest.mark.turns

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
each_evicting = pytest.mark.parametrize("policy", EVICTING, ids=lambda row: row.name)
TURNING = Turning(2)


@pytest.fixture(autouse=True)
def kernel() -> None:
    """Rolling positions take no kernel of their own: one way, `test_positions_are_places_in_the_cache` says so."""


def rolling_run(policy: PolicyRow, streams: list[Stream], totals: list[int], steps: int, **options: Any) -> CacheRun:
    budgets = [budget_of(policy, total, s.prompt, steps, sinks=2) for s, total in zip(streams, totals, strict=True)]
    return CacheRun(streams, budgets, make_policy(policy.eviction()), **{"turning": TURNING, **options})


@each_policy
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 24)), min_size=1, max_size=4),
    alike=st.booleans(),
    window=st.none() | st.integers(1, 20),
    turning=st.sampled_from([Turning(1), Turning(2)]),
    group=st.integers(1, 3),
    steps=st.integers(1, 30),
    sinks=st.integers(0, 3),
    seed=st.integers(0, 2**40),
)
def test_random_shapes_equal_oracle(
    policy: PolicyRow,
    shape: list[tuple[int, int]],
    alike: bool,
    window: int | None,
    turning: Turning,
    group: int,
    steps: int,
    sinks: int,
    seed: int,
) -> None:
    if alike:
        shape = shape[:1] * len(shape)
    budgets = [budget_of(policy, total, length, steps, sinks).within(window) for length, total in shape]
    streams = [make_stream(length, steps, 2, group, seed=seed + row) for row, (length, _) in enumerate(shape)]
    if policy.name == "full":  # in a window it is the tokens that the next query sees
        policy = PolicyRow("full", LocalOracle, {})
    config = EvictionConfig(policy.name, seed=seed)
    compare(policy, config, streams, budgets, steps, layer=seed % 7, window=window, turning=turning)


@each_evicting
def test_long_streams_equal_oracle(policy: PolicyRow) -> None:
    """Far beyond the positions that there are: the table ends with the cache."""
    streams = [make_stream(prompt, 150, seed=prompt) for prompt in (2, 11, 30)]
    budgets = [budget_of(policy, total, s.prompt, 150, sinks=2) for s, total in zip(streams, (7, 12, 16), strict=True)]
    compared = compare(policy, policy.eviction(), streams, budgets, 150, turning=TURNING)
    assert compared > 0.9 * 151 * 6, "nearly every step can be decided"


@each_policy
def test_nothing_evicted_equals_absolute_positions(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 20, group=2, seed=prompt) for prompt in (12, 5, 12)]
    rotated = [
        s._replace(**{name: TURNING.tensor(getattr(s, name), torch.arange(s.q.shape[1])) for name in "qk"})
        for s in streams
    ]
    budgets = [Budget(s.prompt + 20, 0, s.prompt + 20, 0, True) for s in streams]
    if policy.name != "full":  # ranked and in rings, with all the room there is
        budgets = [budget_of(policy, s.prompt + 20, s.prompt, 21, sinks=2) for s in streams]
    policy_ = make_policy(policy.eviction())
    rolling, absolute = (CacheRun(s, budgets, policy_, turning=t) for s, t in ((streams, TURNING), (rotated, None)))
    for _ in range(20):
        torch.testing.assert_close(rolling.step(), absolute.step(), atol=1e-5, rtol=1e-5)
    assert rolling.kept() == absolute.kept()


@each_policy
def test_positions_are_places_in_the_cache(policy: PolicyRow) -> None:
    """What is held, in order of time, rotated afresh by 0, 1, 2, ...: no state of earlier steps is in it."""
    streams = [make_stream(prompt, 40, group=2, seed=prompt) for prompt in (25, 6)]
    run = rolling_run(policy, streams, [12, 9], 40)
    for step in range(40):
        kept, output = run.kept(), run.step()
        for row, stream in enumerate(streams):
            now = stream.prompt + step
            for head in range(2):
                order = [*kept[row][head], now]
                keys = TURNING.tensor(stream.k[head, order], torch.arange(len(order)))
                query = TURNING.tensor(stream.q[2 * head : 2 * head + 2, now], torch.tensor([len(order) - 1] * 2))
                expected = (query @ keys.T / 2).softmax(-1) @ stream.v[head, order]
                torch.testing.assert_close(output[row, 2 * head : 2 * head + 2], expected, atol=1e-5, rtol=1e-5)
    assert run.cache._fused is None


@each_policy
def test_keys_are_never_changed(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 60, seed=prompt) for prompt in (5, 30, 30)]
    run = rolling_run(policy, streams, [12, 9, 9], 60)
    for _ in range(60):
        run.step()
        pos, k = run.cache.pos, run.cache.k
        assert k is not None
        for row, stream in enumerate(streams):
            for head in range(2):
                slots = pos[row, head] >= 0
                assert torch.equal(k[row, head, slots], stream.k[head, pos[row, head, slots].long()])


@each_policy
def test_rows_of_different_counts_are_as_if_alone(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 40, group=2, seed=prompt) for prompt in (7, 50, 2)]
    totals = [30, 9, 12]
    together = rolling_run(policy, streams, totals, 40)
    alone = [
        rolling_run(policy, [s], [n], 40, row_ids=[i]) for i, (s, n) in enumerate(zip(streams, totals, strict=True))
    ]
    for step in range(40):
        kept, output = together.kept(), together.step()
        for row, run in enumerate(alone):
            assert kept[row] == run.kept()[0], f"row {row} step {step}"
            torch.testing.assert_close(output[row], run.step()[0], atol=1e-5, rtol=1e-5)


def test_a_row_past_its_end_disturbs_no_other() -> None:
    policy = SCORED[0]
    short, long = make_stream(3, 40, seed=1), make_stream(12, 40, seed=2)
    budgets = [Budget(5, 0, 5, 0, True), budget_of(policy, 10, 12, 40)]
    batch = CacheRun([short, long], budgets, make_policy(policy.eviction()), turning=TURNING)
    alone = CacheRun([long], budgets[1:], make_policy(policy.eviction()), turning=TURNING, row_ids=[1])
    for _ in range(40):
        torch.testing.assert_close(batch.step()[1], alone.step()[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", SCORED, ids=lambda row: row.name)
def test_order_of_slots_changes_nothing(policy: PolicyRow) -> None:
    stream = make_stream(30, 60, group=2)
    plain, permuted = (rolling_run(policy, [stream], [10], 60) for _ in range(2))
    plain.steps(20)
    permuted.steps(20)
    slots: Any = permuted.cache._slots
    order = torch.randperm(11, generator=torch_generator(1))
    for tensor in (permuted.cache.k, permuted.cache.v, slots._pos, slots.score, slots._rank):
        assert isinstance(tensor, Tensor)
        tensor.copy_(tensor[:, :, order])
    slots._free.copy_(order.argsort()[slots._free % 11] + slots._free // 11 * 11)
    for _ in range(40):
        assert plain.kept() == permuted.kept()
        torch.testing.assert_close(plain.step(), permuted.step(), atol=1e-6, rtol=1e-5)


@each_policy
def test_buffers_may_move_between_steps(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 30, seed=prompt) for prompt in (4, 25)]
    resident, moving = (rolling_run(policy, streams, [7, 10], 30) for _ in range(2))
    for _ in range(30):
        k, v = moving.cache.k, moving.cache.v
        assert k is not None
        assert v is not None
        moving.cache.detach()
        moving.cache.attach(k.clone(), v.clone())
        assert torch.equal(moving.step(), resident.step())


def test_half_precision_stays_close() -> None:
    stream = make_stream(20, 30, group=2, d=8)
    for policy in (row for row in POLICIES if row.name not in ("h2o", "heavy")):  # those choose by what they see
        exact, half = (rolling_run(policy, [stream], [12], 30, dtype=d) for d in (torch.float32, torch.bfloat16))
        expected, found = exact.steps(30), half.steps(30)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, atol=0.1, rtol=0.1)


def test_ranks_cost_four_bytes_per_slot() -> None:
    run = rolling_run(SCORED[0], [make_stream(20, 5)], [10], 5)
    run.step()
    assert state_bytes(run.cache) == 12 * 2 * 11
    ring = rolling_run(EVICTING[2], [make_stream(20, 5)], [10], 5)
    ring.step()
    assert state_bytes(ring.cache) == 0


def test_rolling_is_for_all_steps_or_none() -> None:
    budget = Budget(6, 3, 3, 0, False)
    shape = CacheShape.of([budget], 1, 4)
    cache = KVCache(shape, [budget], make_policy(EvictionConfig("h2o")), layer=0, row_ids=[0])
    cache.attach(*shape.buffers(torch.float32))
    one = torch.ones(1, 1, 4)
    cache.fill([0], one[None], one[None], torch.ones(1, 1, 1))
    cache.attend(one, one, one, Logits(0.5))
    with pytest.raises(RuntimeError, match="started without rolling positions"):
        cache.attend(one, one, one, Logits(0.5), TURNING.table(7))
