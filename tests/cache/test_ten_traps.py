"""Ten ways to get KV eviction wrong without noticing, each with a test that would notice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from h2o_flexgen.cache import CacheShape, KVCache, kv_cache, make_policy
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.errors import UsageError
from h2o_flexgen.kernels import DecodeAttention, decode_attention, prefill_attention
from h2o_flexgen.kernels.native.attend import NativeAttend
from tests.cache.harness import CacheRun, OracleRun, Stream, make_stream
from tests.oracles.eviction import H2OOracle
from tests.policy_matrix import EVICTING, POLICIES, PolicyRow

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
each_evicting = pytest.mark.parametrize("policy", EVICTING, ids=lambda row: row.name)


def run_of(policy: PolicyRow, streams: list[Stream], gen: int, **options: Any) -> CacheRun:
    config = policy.eviction()
    return CacheRun(streams, [config.resolve(s.prompt, gen) for s in streams], make_policy(config), **options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[DecodeAttention]:
    """What every decode attention returned, the row included even where the policy asked for none."""
    seen: list[DecodeAttention] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None, want_row: bool) -> DecodeAttention:
        result = decode_attention(q, k, v, scale, valid, True)
        seen.append(result)
        return result if want_row else DecodeAttention(result.out, None)

    def native_spy(kernel: NativeAttend, number: int, qkv: Any, scale: float, **options: Any) -> Tensor:
        rows, kv_heads, _ = qkv[1].shape
        row = options.setdefault("probs", torch.empty(rows, kv_heads, kernel.capacity))
        out = native_step(kernel, number, qkv, scale, **options)
        seen.append(DecodeAttention(out, row))
        return out

    native_step = NativeAttend.step
    monkeypatch.setattr(NativeAttend, "step", native_spy)
    monkeypatch.setattr(kv_cache, "decode_attention", spy)
    return seen


# 1. Left padding: pads must never score, be kept or be attended.


@each_policy
def test_trap_01_rows_of_different_lengths_are_as_if_alone(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 64, group=2, seed=prompt) for prompt in (7, 50, 23)]
    together = run_of(policy, streams, 64)
    alone = [run_of(policy, [stream], 64, row_ids=[row]) for row, stream in enumerate(streams)]
    for step in range(64):
        kept, output = together.kept(), together.step()
        for row, run in enumerate(alone):
            assert kept[row] == run.kept()[0], f"row {row} step {step}"
            torch.testing.assert_close(output[row], run.step()[0], atol=1e-6, rtol=1e-5)


@each_policy
def test_trap_01_slots_without_a_token_are_never_attended(policy: PolicyRow, calls: list[DecodeAttention]) -> None:
    streams = [make_stream(prompt, 30, seed=prompt) for prompt in (3, 40)]
    config = policy.eviction()
    budgets = [config.resolve(s.prompt, 30) for s in streams]
    stale = torch.full((2, *CacheShape.of(budgets, 2, 4).buffers(torch.float32)[0].shape), math.nan)
    run = CacheRun(streams, budgets, make_policy(config), buffers=(stale[0], stale[1]))
    for _ in range(30):
        counts = run.cache.counts
        assert run.step().isfinite().all(), "whatever the buffers held is gone"
        row = calls[-1].row
        assert row is not None
        attended = (row > 0).sum(-1).tolist()
        assert attended == [[count + 1] * 2 for count in counts], "the kept and the new token, no slot else"


# 2. Half-precision accumulation loses every probability below an ulp of the sum.


def test_trap_02_ten_thousand_small_probabilities_add_up() -> None:
    stream = make_stream(8, 1)
    cache = CacheRun([stream], [Budget(6, 3, 3, 0, False)], H2OPolicy(), dtype=torch.bfloat16).cache
    assert cache.score is not None
    score = cache.score[..., :6]
    score.fill_(1.0)
    small = torch.full((1, 2, 6), 1e-4)
    for _ in range(10_000):
        H2OPolicy().accumulate(score, small)
    torch.testing.assert_close(score, torch.full_like(score, 2.0), atol=1e-3, rtol=0)


def test_trap_02_long_bfloat16_prompt_is_ranked_in_float32() -> None:
    length = 8192
    order = torch.randperm(length - 10, generator=torch.Generator().manual_seed(0))
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
    sums = prefill_attention(*[zeros[None, :, :length]] * 3, 0.5, True).column_sums
    assert sums is not None
    tails = torch.tensor([sum(1 / (i + 1) for i in range(j, length)) for j in range(length)])
    torch.testing.assert_close(sums[0, 0], tails, atol=1e-5, rtol=1e-5)
    assert run.kept()[0][0] == [*range(6), *range(36, 40)], "the early ones win"
    assert run.cache.score is not None
    torch.testing.assert_close(run.cache.score[0, 0, :6], tails[:6], atol=1e-5, rtol=1e-5)
    run.steps(20)
    assert run.kept()[0][0] == [*range(6), *range(56, 60)], "and go on winning"
    torch.testing.assert_close(run.cache.score[0, 0, :6], tails[:6] + 20 / 11, atol=1e-5, rtol=1e-5)


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


@each_policy
@pytest.mark.parametrize("full", [{"ratio": 1.0}, {"budget": 70}, {"budget": 1000}], ids=str)
def test_trap_05_budget_of_the_whole_length_is_the_full_cache_bit_for_bit(
    policy: PolicyRow, full: dict[str, Any]
) -> None:
    if policy.name == "full":
        full = {}
    config = policy.eviction(**{"ratio": 1.0, **full})
    streams = [make_stream(prompt, 30, group=2, seed=prompt) for prompt in (40, 21, 21)]
    run = CacheRun(streams, [config.resolve(s.prompt, 30) for s in streams], make_policy(config))
    assert not run.cache.wants_column_sums
    reference = run_of(POLICIES[0], streams, 30)
    assert torch.equal(run.steps(30), reference.steps(30)), "same code, same bits"
    assert run.kept() == [[list(range(s.prompt + 30))] * 2 for s in streams]


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan"), float("inf")])
def test_trap_05_shares_without_meaning_are_refused(ratio: float) -> None:
    with pytest.raises(UsageError):
        EvictionConfig("h2o", ratio=ratio)


# 6. Positions are absolute: they are not the length of the cache.


@each_evicting
def test_trap_06_evicted_equals_masked(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 40, group=2, seed=prompt) for prompt in (25, 25)]
    run = run_of(policy, streams, 40)
    for step in range(40):
        kept, output = run.kept(), run.step()
        assert run.cache.next_pos == [25 + step + 1] * 2, "true number of tokens"
        for row, stream in enumerate(streams):
            now = 25 + step
            visible = torch.zeros(2, now + 1, dtype=torch.bool)
            for head in range(2):
                visible[head, [*kept[row][head], now]] = True
            logits = stream.q[:, now].view(2, 2, 1, 4) @ stream.k[:, None, : now + 1].transpose(-1, -2) / 2
            probs = logits.masked_fill(~visible[:, None, None], -math.inf).softmax(-1)
            expected = (probs @ stream.v[:, None, : now + 1]).view(4, 4)
            torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)


def test_trap_06_nothing_evicted_equals_full_attention() -> None:
    stream = make_stream(12, 20, group=2)
    run = CacheRun([stream], [Budget(1000, 500, 500, 0, False)], H2OPolicy())
    expected = prefill_attention(stream.q[None], stream.k[None], stream.v[None], 0.5, False).out[0, :, 12:]
    torch.testing.assert_close(run.steps(20)[:, 0].transpose(0, 1), expected, atol=1e-5, rtol=1e-5)


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


# 8. Scores, positions, K and V of a token move together.


@each_policy
def test_trap_08_slots_hold_the_token_they_claim(policy: PolicyRow, calls: list[DecodeAttention]) -> None:
    streams = [make_stream(prompt, 60, seed=prompt) for prompt in (5, 30, 30)]
    streams = [s._replace(k=s.k / 8, v=s.v.clone()) for s in streams]
    for stream in streams:
        stream.k[..., 0] = torch.arange(stream.k.shape[1])
        stream.q[..., 0] = 0  # the checksum must not disturb attention
        stream.v[..., 1] = -torch.arange(stream.k.shape[1])
    run = run_of(policy, streams, 60)
    for _ in range(60):
        before = None if run.cache.score is None else run.cache.score.clone()
        old = run.cache.pos
        run.step()
        pos, cache, row = run.cache.pos, run.cache, calls[-1].row
        assert cache.k is not None
        assert cache.v is not None
        assert row is not None
        occupied = pos >= 0
        assert torch.equal(cache.k[..., 0][occupied], pos[occupied].float()), "K"
        assert torch.equal(cache.v[..., 1][occupied], -pos[occupied].float()), "V"
        torch.testing.assert_close(row.sum(-1), torch.ones(3, 2))  # renormalised over what is left
        if before is not None and cache.score is not None and policy.name != "random":
            stayed = (occupied & (old == pos))[..., : row.shape[-1]]
            delta = (cache.score - before)[..., : row.shape[-1]]
            torch.testing.assert_close(delta[stayed], row[stayed], atol=1e-5, rtol=0)
            newest = cache.score.flatten(0, 1).gather(1, cache.last_slots.view(-1, 1)).flatten()
            own = row.flatten(0, 1).gather(1, cache.last_slots.view(-1, 1)).flatten()
            torch.testing.assert_close(newest, own), "a new token starts with its own row"


def test_trap_08_order_of_slots_changes_nothing() -> None:
    stream = make_stream(30, 60, group=2)
    plain, permuted = (CacheRun([stream], [Budget(10, 5, 5, 0, False)], H2OPolicy()) for _ in range(2))
    plain.steps(20)
    permuted.steps(20)
    book: Any = permuted.cache._book
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    for tensor in (permuted.cache.k, permuted.cache.v, book._pos, book.score):
        assert tensor is not None
        tensor.copy_(tensor[:, :, order])
    place = order.argsort()
    book._free.copy_(place[book._free % 11] + book._free // 11 * 11)
    for _ in range(40):
        assert plain.kept() == permuted.kept()
        torch.testing.assert_close(plain.step(), permuted.step(), atol=1e-6, rtol=1e-5)


# 9. State belongs to one sequence, layer and call.


@each_policy
def test_trap_09_the_same_sequence_again_gives_the_same_bits(policy: PolicyRow) -> None:
    a, b = [make_stream(20, 30, seed=1)], [make_stream(20, 30, seed=2)]
    config = policy.eviction()
    eviction, budget = make_policy(config), config.resolve(20, 30)
    buffers = CacheShape.of([budget], 2, 4).buffers(torch.float32)
    outputs = [CacheRun(s, [budget], eviction, buffers=buffers).steps(30) for s in (a, b, a)]
    assert torch.equal(outputs[0], outputs[2]), "buffers and policy are reused, nothing else is"


@each_policy
def test_trap_09_order_of_rows_changes_nothing(policy: PolicyRow) -> None:
    streams = [make_stream(prompt, 40, seed=prompt) for prompt in (9, 31, 17, 31)]
    order = [2, 0, 3, 1]
    plain = run_of(policy, streams, 40)
    shuffled = run_of(policy, [streams[row] for row in order], 40, row_ids=order)
    for _ in range(40):
        kept = plain.kept()
        assert [kept[row] for row in order] == shuffled.kept()
        torch.testing.assert_close(plain.step()[order], shuffled.step(), atol=1e-6, rtol=1e-5)


@each_policy
@pytest.mark.parametrize("full", [False, True])
def test_trap_09_a_row_that_ends_early_leaves_the_others_unchanged(policy: PolicyRow, full: bool) -> None:
    config = policy.eviction()
    short, long = make_stream(10, 60, seed=1), make_stream(12, 60, seed=2)
    ended, going = Budget(15, 0, 15, 0, True) if full else config.resolve(10, 5), config.resolve(12, 60)
    batch = CacheRun([short, long, short], [ended, going, ended], make_policy(config))
    alone = CacheRun([long], [going], make_policy(config), row_ids=[1])
    for _ in range(60):
        assert batch.kept()[1] == alone.kept()[0]
        torch.testing.assert_close(batch.step()[1], alone.step()[0], atol=1e-6, rtol=1e-5)


def test_trap_09_random_choice_knows_layer_sequence_head_and_seed_only() -> None:
    stream = make_stream(40, 0, kv_heads=2)

    def kept(layer: int = 0, row_id: int = 0, seed: int = 0) -> list[list[int]]:
        config = EvictionConfig("random", budget=12, seed=seed)
        run = CacheRun([stream], [config.resolve(40, 1)], make_policy(config), layer=layer, row_ids=[row_id])
        return run.kept()[0]

    assert kept() == kept(), "reproducible"
    choices = [*kept(), *kept(layer=1), *kept(row_id=1), *kept(seed=1), *kept(seed=2**32)]
    assert len({tuple(choice) for choice in choices}) == len(choices), "each (seed, layer, row, head) draws for itself"


# 10. The statistics are those of the attention that was computed, and causal.


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
def test_trap_10_column_sums_equal_dense_softmax(length: int) -> None:
    stream = make_stream(length, 0, kv_heads=2, group=2, d=8)
    sums = prefill_attention(stream.q[None], stream.k[None], stream.v[None], 8**-0.5, True).column_sums
    assert sums is not None
    logits = stream.q.double() @ stream.k.double().repeat_interleave(2, 0).transpose(-1, -2) * 8**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    dense = logits.masked_fill(future, -math.inf).softmax(-1).sum(1).view(2, 2, length).mean(1)
    torch.testing.assert_close(sums[0].double(), dense, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sums.sum(-1), torch.full((1, 2), float(length)), rtol=1e-5, atol=0)


def test_trap_10_prompt_statistics_are_what_the_cache_holds() -> None:
    stream = make_stream(50, 0)
    sums = prefill_attention(stream.q[None], stream.k[None], stream.v[None], 0.5, True).column_sums
    cache = CacheRun([stream], [Budget(20, 10, 10, 0, False)], H2OPolicy()).cache
    assert cache.score is not None
    assert sums is not None
    expected = sums.gather(-1, cache.pos[..., :20].long())
    assert torch.equal(cache.score[..., :20], expected), "carried over, not recomputed"


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
