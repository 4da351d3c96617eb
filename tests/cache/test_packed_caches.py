"""Caches of fewer bits: every policy equals its oracle on numbers that were rounded when they came in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.packing import expand, pack
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.model.packing import EXPANDED, CacheBits, CachePacking, cache_packings
from tests.cache.conftest import by_torch
from tests.cache.harness import CacheRun, Turning, budget_of, compare, make_stream
from tests.pairs import pairs
from tests.policy_matrix import POLICIES, PolicyRow
from tests.seeds import torch_generator

pytestmark = pytest.mark.turns

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
WAYS = {"absolute": (None, None), "windowed": (11, None), "rolling": (None, Turning(2))}
KINDS: tuple[CacheBits, ...] = (4, 8, (8, 4), (4, 8), (4, 3), (8, 3))
CASES = [
    pytest.param(row, bits, *WAYS[way], id=f"{row.name}-{way}-{bits}")
    for i, row in enumerate(POLICIES)
    for j, way in enumerate(WAYS)
    for bits in (KINDS[(i + 5 * j) % 6],)
    if not (row.name == "full" and way == "windowed")
]
"""Every policy in every way; policies and ways with both kinds of bits."""


@pytest.mark.parametrize(("policy", "bits", "window", "turning"), CASES)
def test_every_policy_equals_its_oracle(
    policy: PolicyRow, bits: CacheBits, window: int | None, turning: Turning | None
) -> None:
    steps, config = 26, policy.eviction()
    d = 16 if bits in KINDS[4:] else 8
    streams = [make_stream(prompt, steps, group=2, d=d, seed=prompt) for prompt in (3, 17, 17, 30)]
    totals = (8, 9, 11, 10)
    budgets = [
        budget_of(policy, total, stream.prompt, steps, sinks=1).within(window)
        for stream, total in zip(streams, totals, strict=True)
    ]
    compared = compare(policy, config, streams, budgets, steps, layer=5, window=window, turning=turning, bits=bits)
    assert compared > 0.9 * (steps + 1) * 8


@each_policy
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    d=st.sampled_from([4, 12, 32, 64, 68, 96, 128, 200, 256]),
    bits=st.sampled_from(KINDS),
    seed=st.integers(0, 2**40),
)
def test_heads_of_any_size(
    policy: PolicyRow, prompts: list[int], kv_heads: int, group: int, d: int, bits: CacheBits, seed: int
) -> None:
    """Groups that are short, and last groups that are; the cache beside one that attends to numbers rounded by hand."""
    d = -(-d // 16) * 16 if bits in KINDS[4:] else d
    streams = [make_stream(prompt, 6, kv_heads, group, d, seed + row) for row, prompt in enumerate(prompts)]
    budgets = [budget_of(policy, max(2, prompt // 2), prompt, 6) for prompt in prompts]
    run, packings = CacheRun(streams, budgets, make_policy(policy.eviction()), bits=bits), cache_packings(bits, d)
    assert packings is not None
    keys, values = packings
    plain = CacheRun(streams, budgets, make_policy(policy.eviction()))
    assert run.cache.k is not None
    assert run.cache.v is not None
    assert plain.cache.k is not None
    assert plain.cache.v is not None
    plain.cache.k.copy_(expand(run.cache.k, keys, torch.float32))
    plain.cache.v.copy_(expand(run.cache.v, values, torch.float32))
    plain.streams = [
        s._replace(k=expand(pack(s.k, keys), keys, s.k.dtype), v=expand(pack(s.v, values), values, s.v.dtype))
        for s in streams
    ]
    for _ in range(6):
        torch.testing.assert_close(run.step(), plain.step(), rtol=1e-4, atol=1e-5)
    assert run.kept() == plain.kept()


@pytest.mark.parametrize(
    ("policy", "bits", "dtype"),
    pairs(POLICIES, [4, 8], [torch.bfloat16, torch.float16, torch.float32]),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_any_dtype_attends_to_them(policy: PolicyRow, bits: int, dtype: torch.dtype) -> None:
    """Numbers are expanded to the dtype that is computed in; what is held does not depend on it beyond rounding."""
    streams = [make_stream(prompt, 9, group=2, d=64, seed=prompt) for prompt in (4, 30, 17)]
    budgets = [budget_of(policy, 12, stream.prompt, 9) for stream in streams]
    run = CacheRun(streams, budgets, make_policy(policy.eviction()), dtype=dtype, bits=bits)
    exact = CacheRun(streams, budgets, make_policy(policy.eviction()))
    out, expected = run.step(), exact.step()
    assert out.dtype == dtype
    assert (out.float() - expected).abs().mean() < (0.03 if bits == 8 else 0.3)
    assert run.cache._slots.score is None or run.cache._slots.score.dtype == torch.float32


@by_torch
def test_bytes_of_a_cache() -> None:
    shape = CacheShape(3, 2, 80, 10, bits=4)
    assert set(shape.sizes) == {(3, 2, 10, 40 + 2 * 2 * 2)}, "codes, and a scale and a low for each of two groups"
    assert shape.nbytes(torch.bfloat16) == sum(part.nbytes for part in shape.buffers(torch.bfloat16))
    both = CacheShape(3, 2, 80, 10, bits=(8, 4))
    assert [size[-1] for size in both.sizes] == [88, 48]
    assert both.nbytes(torch.bfloat16) == sum(part.nbytes for part in both.buffers(torch.bfloat16)) == 60 * (88 + 48)
    with pytest.raises(ValueError, match="a multiple of 4"):
        CachePacking(4, 6)
    with pytest.raises(ValueError, match="a multiple of 16"):
        cache_packings((4, 3), 12)


@by_torch
def test_what_is_packed_in_parts_is_what_is_packed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, packing = torch.randn(3, 2, 50, 64, generator=torch_generator(1)), CachePacking(4, 64)
    whole = pack(x, packing)
    monkeypatch.setattr("h2o_flexgen.cache.packing.EXPANDED", 1000)
    assert torch.equal(pack(x, packing), whole)


@each_policy
@pytest.mark.parametrize("turning", [None, Turning(2)], ids=["absolute", "rolling"])
def test_rows_that_are_attended_to_in_parts(
    policy: PolicyRow, turning: Turning | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rows would take too much memory expanded."""
    runs = []
    for limit in (EXPANDED, 3000):
        monkeypatch.setattr("h2o_flexgen.cache.packing.EXPANDED", limit)
        streams = [make_stream(prompt, 20, group=2, d=64, seed=prompt) for prompt in (4, 30, 17, 30, 8)]
        budgets = [budget_of(policy, 12, stream.prompt, 20) for stream in streams]
        runs.append(CacheRun(streams, budgets, make_policy(policy.eviction()), bits=8, turning=turning))
    torch.testing.assert_close(runs[0].steps(20), runs[1].steps(20), rtol=1e-5, atol=1e-6)
    assert runs[0].kept() == runs[1].kept()


@pytest.mark.parametrize("bits", KINDS)
def test_packed_rows_move_down(bits: CacheBits) -> None:
    """Rows that go on in another cache, in the memory of the one before, as they were."""
    config = EvictionConfig("h2o", budget=9)
    streams = [make_stream(prompt, 20, group=2, d=64, seed=prompt) for prompt in (12, 30, 17)]
    budgets = [config.resolve(stream.prompt, 20) for stream in streams]
    whole, some = (CacheRun(streams, budgets, make_policy(config), bits=bits) for _ in range(2))
    assert torch.equal(whole.steps(5), some.steps(5))
    cache = some.cache
    assert cache.k is not None
    assert cache.v is not None
    some.cache = KVCache.joined([(cache, [1, 2])], cache.k[:2], cache.v[:2])
    some.streams = some.streams[1:]
    assert torch.equal(whole.steps(5)[:, 1:], some.steps(5))
    assert whole.kept()[1:] == some.kept()


@by_torch
def test_a_packed_cache_refuses_other_buffers() -> None:
    shape = CacheShape(1, 2, 64, 5, bits=4)
    cache = KVCache(shape, [Budget(5, 0, 5, 0, True)], make_policy(EvictionConfig()), layer=0, row_ids=[0])
    with pytest.raises(ValueError, match="needed contiguous"):
        cache.attach(torch.zeros(1, 2, 5, 64), torch.zeros(1, 2, 5, 64))
