"""Four of ten ways to get KV eviction wrong without noticing: what scores are sums and means of."""

from __future__ import annotations

import math

import pytest
import torch

from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.kernels.prompt import prefill_attention
from h2o_flexgen.kernels.types import KeysValues, Logits
from tests.cache.conftest import by_torch
from tests.cache.harness import CacheRun, Stream, make_stream
from tests.cache.traps import each_evicting, run_of
from tests.policy_matrix import PolicyRow
from tests.seeds import torch_generator

pytestmark = pytest.mark.turns

# 2. Half-precision accumulation loses every probability below an ulp of the sum.


@by_torch
def test_trap_02_ten_thousand_small_probabilities_add_up() -> None:
    stream = make_stream(8, 1)
    cache = CacheRun([stream], [Budget(6, 3, 3, 0, False)], H2OPolicy(), dtype=torch.bfloat16).cache
    assert cache._slots.score is not None
    score = cache._slots.score[..., :6]
    score.fill_(1.0)
    small = torch.full((1, 2, 6), 1e-4)
    step = cache._slots._attended(small, 6, lambda: KeysValues(small, small), None)
    for _ in range(10_000):
        H2OPolicy().update(step)
    torch.testing.assert_close(score, torch.full_like(score, 2.0), atol=1e-3, rtol=0)


@by_torch
def test_trap_02_long_bfloat16_prompt_is_ranked_in_float32() -> None:
    length = 8192
    order = torch.randperm(length - 10, generator=torch_generator(0))
    sums = torch.cat([1 + order * 1e-5, torch.zeros(10)]).view(1, 1, -1)
    assert sums.bfloat16().unique().numel() < 100, "in half precision most of these scores are equal"
    shape = CacheShape(1, 1, 4, 111)
    cache = KVCache(shape, [Budget(110, 100, 10, 0, False)], H2OPolicy(), layer=0, row_ids=[0])
    cache.attach(*shape.buffers(torch.bfloat16))
    prompt = torch.zeros(1, 1, length, 4, dtype=torch.bfloat16)
    cache.fill([0], prompt, prompt, sums)
    best = (order >= length - 110).nonzero().flatten().tolist()
    assert cache.kept(0, 0) == best + list(range(length - 10, length))


# 3. Sums favour early tokens. That is the paper's choice: no division by age.


def test_trap_03_uniform_attention_ranks_by_harmonic_tails() -> None:
    length = 40
    zeros = torch.zeros(1, length + 20, 4)
    run = CacheRun([Stream(zeros, zeros, zeros, length)], [Budget(10, 6, 4, 0, False)], H2OPolicy())
    sums = prefill_attention(*[zeros[None, :, :length]] * 3, Logits(0.5), True).column_sums
    assert sums is not None
    tails = torch.tensor([sum(1 / (i + 1) for i in range(j, length)) for j in range(length)])
    torch.testing.assert_close(sums[0, 0], tails, atol=1e-5, rtol=1e-5)
    assert run.kept()[0][0] == [*range(6), *range(36, 40)], "the early ones win"
    assert run.cache._slots.score is not None
    torch.testing.assert_close(run.cache._slots.score[0, 0, :6], tails[:6], atol=1e-5, rtol=1e-5)
    run.steps(20)
    assert run.kept()[0][0] == [*range(6), *range(56, 60)], "and go on winning"
    torch.testing.assert_close(run.cache._slots.score[0, 0, :6], tails[:6] + 20 / 11, atol=1e-5, rtol=1e-5)


# 4. One decision per KV head: the mean over the query heads that share it.


@each_evicting
def test_trap_04_identical_query_heads_decide_like_one(policy: PolicyRow) -> None:
    one = make_stream(20, 40)
    group = one._replace(q=one.q.repeat_interleave(3, dim=0))
    single, grouped = run_of(policy, [one], 40), run_of(policy, [group], 40)
    assert grouped.cache.k is not None
    assert grouped.cache.k.shape[1] == 2, "K keeps its own number of heads"
    for _ in range(40):
        assert single.kept() == grouped.kept()
        torch.testing.assert_close(single.step().repeat_interleave(3, dim=1), grouped.step(), atol=1e-5, rtol=1e-5)


@each_evicting
def test_trap_04_order_of_query_heads_in_a_group_changes_nothing(policy: PolicyRow) -> None:
    stream = make_stream(20, 40, group=4)
    order = torch.tensor([2, 0, 3, 1, 6, 7, 5, 4])
    plain, permuted = run_of(policy, [stream], 40), run_of(policy, [stream._replace(q=stream.q[order])], 40)
    for _ in range(40):
        assert plain.kept() == permuted.kept()
        torch.testing.assert_close(plain.step()[:, order], permuted.step(), atol=1e-5, rtol=1e-5)


# 10. The statistics are those of the attention that was computed, and causal.


@by_torch
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
def test_trap_10_column_sums_equal_dense_softmax(length: int) -> None:
    stream = make_stream(length, 0, kv_heads=2, group=2, d=8)
    sums = prefill_attention(stream.q[None], stream.k[None], stream.v[None], Logits(8**-0.5), True).column_sums
    assert sums is not None
    logits = stream.q.double() @ stream.k.double().repeat_interleave(2, 0).transpose(-1, -2) * 8**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    dense = logits.masked_fill(future, -math.inf).softmax(-1).sum(1).view(2, 2, length).mean(1)
    torch.testing.assert_close(sums[0].double(), dense, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums.sum(-1), torch.full((1, 2), float(length)), rtol=1e-5, atol=0)


@by_torch
def test_trap_10_prompt_statistics_are_what_the_cache_holds() -> None:
    stream = make_stream(50, 0)
    sums = prefill_attention(stream.q[None], stream.k[None], stream.v[None], Logits(0.5), True).column_sums
    cache = CacheRun([stream], [Budget(20, 10, 10, 0, False)], H2OPolicy()).cache
    assert cache._slots.score is not None
    assert sums is not None
    expected = sums.gather(-1, cache.pos[..., :20].long())
    assert torch.equal(cache._slots.score[..., :20], expected), "carried over, not recomputed"


@each_evicting
@pytest.mark.parametrize("when", [1, 2, 7, 19])
def test_trap_10_later_tokens_change_no_earlier_decision(policy: PolicyRow, when: int) -> None:
    stream = make_stream(20, 40)
    other = Stream(*(x.clone() for x in stream[:3]), 20)
    for x in other[:3]:
        x[:, 20 + when :] = x[:, 20 + when :].flip(1) * 3 + 1
    runs = [run_of(policy, [s], 40) for s in (stream, other)]
    for step in range(when):
        assert runs[0].kept() == runs[1].kept(), f"step {step}"
        assert torch.equal(runs[0].step(), runs[1].step()), f"step {step}"
    assert runs[0].kept() == runs[1].kept(), "the last decision before the change"
    assert not torch.equal(runs[0].step(), runs[1].step()), "the change was seen"
