"""Prompts of unequal lengths in one call, against one prompt at a time: to the bit, as ties must fall alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.eviction.base import AttendedPrompts, PromptRows, PromptScores
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.heads_apart import HeadsApart
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.lengths import slots_needed
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.model.packing import CacheBits, CacheRotation
from h2o_flexgen.engine.batching.prefix_tree import PromptChunk, PromptSegment, chunks_of, segments_of
from h2o_flexgen.engine.execution.attention import PrefixPath, PromptAttention
from h2o_flexgen.errors import required
from h2o_flexgen.kernels import native, prompt
from h2o_flexgen.kernels.prompt import keep_prompts
from h2o_flexgen.kernels.types import KeysValues, Logits, PackedPrompts, PackedRow
from tests.policy_matrix import POLICIES, PolicyRow
from tests.seeds import moved, torch_generator

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f"no native kernels: {native.why_not()}")
D = 16


def rows_of(lengths: list[int]) -> list[PackedRow]:
    """Prompts one after the other, with a gap before each."""
    rows, first = [], 0
    for place, length in enumerate(lengths):
        rows.append(PackedRow(first + 2, length, place, length, 0, length, 0))
        first += 2 + length
    return rows


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (12, 2), (3, 1)])
def test_attention_is_that_of_each_prompt_alone(heads: int, kv_heads: int, window: int | None) -> None:
    lengths = [1, 40, 300 if heads == kv_heads else 60, 17, 2, 16, 33]  # none that is divided when it is alone
    rows = rows_of(lengths)
    prompts = PackedPrompts.of(rows)
    fused = torch.randn(prompts.tokens + 3, heads + 2 * kv_heads, D).bfloat16()
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    assert prompt.takes_packed(q, k, v, 0.3, prompts)
    out = torch.full(q.shape, 7.0, dtype=torch.bfloat16)
    sums = prompt.packed_attention((q, k, v), prompts, Logits(0.3), True, out, window=window)
    assert sums is not None
    others = torch.ones(len(out), dtype=torch.bool)
    for row in rows:
        span = slice(row.first, row.first + row.length)
        alone = [x[span].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        expected = prompt.prefill_attention(*alone, Logits(0.3), True, window=window)
        assert torch.equal(out[span], expected.out[0].transpose(0, 1))
        found = sums[row.first * kv_heads : (row.first + row.length) * kv_heads]
        assert torch.equal(found.view(kv_heads, -1), expected.column_sums[0])
        others[span] = False
    assert (out[others] == 7).all(), "tokens of no prompt"
    silent = torch.full_like(out, 7.0)
    assert prompt.packed_attention((q, k, v), prompts, Logits(0.3), False, silent, window=window) is None
    assert torch.equal(silent, out)


def test_what_is_better_divided_or_for_torch_is_not_taken() -> None:
    q = torch.randn(2000, 2, D).bfloat16()
    few, many = (PackedPrompts.of(rows_of(lengths)) for lengths in ([900, 900], [90] * 20))
    assert not prompt.takes_packed(q, q, q, 0.3, few)
    assert prompt.takes_packed(q, q, q, 0.3, many)
    assert not prompt.takes_packed(q.float(), q.float(), q.float(), 0.3, many)


def test_refusals() -> None:
    q, prompts = torch.randn(30, 2, D).bfloat16(), PackedPrompts.of(rows_of([5, 30]))
    with pytest.raises(ValueError, match=r"30, 30, 30. tokens, and prompts up to the 39th"):
        prompt.packed_attention((q, q, q), prompts, Logits(0.3), False, torch.empty_like(q))
    with pytest.raises(ValueError, match="no kernel for prompts packed"):
        prompt.packed_attention((q, q, q), prompts, Logits(0.3), False, torch.empty(30, 2, D))
    cache = KeysValues(*torch.zeros(2, 2, 2, 30, D).bfloat16())
    for packed, places in ((q, cache), (q.float(), cache), (torch.cat([q, q]), KeysValues(cache.k[:1], cache.v[:1]))):
        with pytest.raises(ValueError, match="for a cache of"):
            keep_prompts(prompts, KeysValues(packed, packed), places, None)
    whole = torch.cat([q, q])
    with pytest.raises(ValueError, match="for a cache of"):
        keep_prompts(prompts, KeysValues(whole, q), cache, None)
    with pytest.raises(ValueError, match="for a cache of"):
        keep_prompts(prompts, KeysValues(whole, whole), KeysValues(cache.k, cache.v[:, :, :9]), None)
    ranks = torch.zeros(2, 2, 30), torch.zeros(2, 2, 30, dtype=torch.int32)
    with pytest.raises(ValueError, match="sums of"):
        keep_prompts(prompts, KeysValues(whole, whole), cache, None, torch.zeros(9), ranks)
    with pytest.raises(ValueError, match="ranks"):
        keep_prompts(prompts, KeysValues(whole, whole), cache, None, torch.zeros(120), (ranks[0][:1], ranks[1]))


SCORES = st.sampled_from([0.0, 1e-30, 0.25, 0.5, 0.5000001, 3.0, 700.0, float("inf"), float("nan")])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    data=st.data(),
    policy=st.sampled_from([row for row in POLICIES if row.name != "random"]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    window=st.none() | st.integers(2, 40),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bits=st.sampled_from([16, 8, 4, (8, 4), (4, 3)]),
    rotation=st.sampled_from(["none", "rotate", "scale", "centre"]),
    mended=st.tuples(st.integers(0, 5), st.integers(0, 1)),
    seed=st.integers(0, 2**20),
)
def test_what_is_kept_is_what_torch_keeps(
    data: st.DataObject,
    policy: PolicyRow,
    lengths: list[int],
    window: int | None,
    kv_heads: int,
    dtype: torch.dtype,
    bits: CacheBits,
    rotation: CacheRotation,
    mended: tuple[int, int],
    seed: int,
) -> None:
    """Scores of few values, so that there are many ties; budgets of every kind, and places out of order."""
    budgets = []
    for length in lengths:
        split = {} if policy.name == "full" else {"budget": data.draw(st.integers(3, 70))}
        sinks = {"sinks": data.draw(st.integers(0, 2))} if policy.name in ("h2o", "streaming") else {}
        config = EvictionConfig(policy.name, **split, **sinks)
        budgets.append(config.resolve(length, 3).within(window))
    torch.manual_seed(moved(seed))
    rows = data.draw(st.permutations(range(len(lengths))))
    firsts = [sum(lengths[other] for other in rows[: rows.index(row)]) for row in range(len(lengths))]
    k, v = torch.randn(2, sum(lengths), kv_heads, D).to(dtype)
    k, q = k * torch.tensor([0.1, 1.0, 9.0, 30.0]).repeat(D // 4).to(dtype), torch.randn(2, *k.shape).to(dtype)
    q = q.permute(1, 0, 2, 3).flatten(1, 2)  # two of each KV head
    pool = torch.tensor(data.draw(st.lists(SCORES, min_size=3, max_size=9)))
    sums = pool[torch.randint(len(pool), (sum(lengths) * kv_heads,))]
    shape = CacheShape.of(budgets, kv_heads, D, bits, rotation=rotation)
    if bits != 16:
        shape = replace(shape, newest=mended[0], first=mended[1])
    found, expected = (
        KVCache(shape, budgets, make_policy(config), layer=1, row_ids=range(len(rows)), window=window) for _ in "ab"
    )
    for cache in (found, expected):
        cache.attach(*shape.buffers(dtype))
    prompts = found.packing([(row, firsts[row], lengths[row]) for row in rows])
    assert prompts is not None
    found.settle_packed(prompts, q, k)
    found.fill_packed(prompts, k, v, sums if found.wants_column_sums else None)
    for row in rows:
        span = slice(firsts[row], firsts[row] + lengths[row])
        own = sums[kv_heads * span.start : kv_heads * span.stop].view(1, kv_heads, -1)
        asked, *parts = (x[span].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if shape.scaled:
            required(expected._kept.scales, "").settle([row], asked, parts[0], k.device)
        expected.fill([row], *parts, own if found.wants_column_sums else None)
    pairs = [(found.k, expected.k), (found.v, expected.v), (found.pos, expected.pos)]
    if found._slots.score is not None:
        pairs.append((found._slots.score.view(torch.int32), expected._slots.score.view(torch.int32)))
    if shape.mended:
        one, other = (required(cache._kept.errors, "") for cache in (found, expected))
        there = one.slots >= 0
        pairs += [(one.slots, other.slots), *((x[there], y[there]) for x, y in zip(one.lost, other.lost, strict=True))]
    if shape.scaled:
        one, other = (required(cache._kept.scales, "") for cache in (found, expected))
        pairs += [(one.of, other.of)] if one.means is None else [(one.of, other.of), (one.means, other.means)]
    assert all(torch.equal(one, other) for one, other in pairs)
    assert found.next_pos == expected.next_pos
    with pytest.raises(RuntimeError, match="has its prompt already"):
        found.fill_packed(prompts, k, v, sums)


def test_a_policy_with_prompt_scores_of_its_own_is_left_to_torch() -> None:
    class Half(H2OPolicy):
        def prompt_scores(self, prompts: AttendedPrompts, rows: PromptRows) -> PromptScores:
            return PromptScores(prompts.column_sums / 2)

    budget = Budget(6, 3, 3, 0, False)
    shape = CacheShape.of([budget], 2, D)
    for policy, packs in ((H2OPolicy(), True), (Half(), False), (make_policy(EvictionConfig("random")), False)):
        cache = KVCache(shape, [budget], policy, layer=0, row_ids=[0])
        cache.attach(*shape.buffers(torch.bfloat16))
        assert (cache.packing([(0, 0, 9)]) is not None) == packs


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_chunks_of_prompts_are_those_of_segments(
    policy: PolicyRow, rolling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts beside long ones in parts and beside a prefix that two share."""
    generator = torch_generator(1)
    lengths = [5, 5, 70, 3, 41, 9, 30, 30, 1]
    prompts = [torch.randint(5, 90, (length,), generator=generator).tolist() for length in lengths]
    prompts[7][:20] = prompts[6][:20]
    segments = segments_of([prompts], 48)[0]
    tokens = segments[-1].stop
    qkv = [torch.randn(tokens, heads, D, generator=generator).bfloat16() for heads in (4, 2, 2)]
    budgets = [policy.eviction().resolve(length + 10, 5) for length in lengths]
    shape = CacheShape.of(budgets, 2, D)
    calls, results = 0, []
    whole = KVCache.fill_packed

    def counted(self: KVCache, *args: object) -> None:
        nonlocal calls
        calls += 1
        whole(self, *args)

    monkeypatch.setattr(KVCache, "fill_packed", counted)
    for together in (True, False):
        if not together:
            monkeypatch.setattr(KVCache, "packing", lambda *_: None)
        cache = KVCache(shape, budgets, make_policy(policy.eviction()), layer=2, row_ids=range(len(lengths)))
        cache.attach(*shape.buffers(torch.bfloat16))
        attention = PromptAttention(cache, PrefixPath(), Logits(0.3), lengths, cache.wants_column_sums, rolling=rolling)
        out = torch.empty(tokens, 4, D, dtype=torch.bfloat16)
        for chunk in chunks_of(segments, 48):
            span = slice(chunk.start, chunk.stop)
            attention.chunk(chunk, None, (qkv[0][span], qkv[1][span], qkv[2][span]), out[span])
        results.append(
            [out, cache.k, cache.v, cache.pos, *([] if cache._slots.score is None else [cache._slots.score])]
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert bool(calls) == (policy.name != "random")


@pytest.mark.parametrize("ratio", [0.7, 0.3])  # with the first all heads that look far are whole
def test_heads_apart_are_filled_as_prompt_by_prompt(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, lengths = torch_generator(3), [5, 17, 30, 9]
    config = EvictionConfig("h2o", ratio=ratio, far_layers=((0, 1), (1, 0)), kv_heads=2)
    budgets = [config.by_layer([None] * 2, length, 6)[0] for length in lengths]
    by_part = [[budget.part(i) for budget in budgets] for i in range(2)]
    shape = replace(CacheShape.of(budgets, 2, D), far=config.far_heads(0)).with_slots([*map(slots_needed, by_part)])
    segments = segments_of([[torch.randint(5, 90, (n,), generator=generator).tolist() for n in lengths]], 99)[0]
    qkv = [torch.randn(sum(lengths), heads, D, generator=generator).bfloat16() for heads in (4, 2, 2)]
    results = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(HeadsApart, "packing", lambda *_: None)
        made = {"layer": 0, "row_ids": range(len(lengths))}
        parts = [KVCache(*each, make_policy(config), **made) for each in zip(shape.parts, by_part, strict=True)]
        for part in parts:
            part.attach(*part.shape.buffers(torch.bfloat16))
        cache, out = HeadsApart(shape, parts), torch.empty(sum(lengths), 4, D, dtype=torch.bfloat16)
        attention = PromptAttention(cache, PrefixPath(), Logits(0.3), lengths, cache.wants_column_sums)
        for chunk in chunks_of(segments, 99):
            span = slice(chunk.start, chunk.stop)
            attention.chunk(chunk, None, (qkv[0][span], qkv[1][span], qkv[2][span]), out[span])
        results.append([out, cache.pos, *(x for part in parts for x in part.buffers)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_segments_are_left_where_they_follow_others() -> None:
    whole, shared = PromptSegment(0, 4, 0, 0, range(0, 2), 0), PromptSegment(8, 3, 0, 0, range(0, 0), 2)
    later = PromptSegment(11, 2, 3, 1, range(2, 4), 2)
    budgets = [Budget(9, 0, 9, 0, True)] * 4
    shape = CacheShape.of(budgets, 1, D)
    cache = KVCache(shape, budgets, make_policy(EvictionConfig()), layer=0, row_ids=range(4))
    cache.attach(*shape.buffers(torch.bfloat16))
    x = torch.randn(15, 1, D).bfloat16()
    attention = PromptAttention(cache, PrefixPath(), Logits(0.3), [4, 4, 5, 5], False)
    left = attention._packed(PromptChunk(0, 15, (whole, shared, later)), (x, x, x), x, torch.empty_like(x))
    assert left == [shared, later]
