"""The KV cache as its callers see it: buffers that move, refusals, and work per step that does not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.cache import kv_cache
from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.lengths import slots_needed
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.cache.vectors import select
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.kernels.types import DecodeAttention, Logits
from tests.cache.conftest import by_torch
from tests.cache.harness import CacheRun, Turning, held_counts, make_stream, state_bytes
from tests.policy_matrix import POLICIES, PolicyRow
from tests.seeds import torch_generator

pytestmark = pytest.mark.turns

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
TEN = Budget(10, 5, 5, 0, False)


def ragged_run(policy: PolicyRow, **options: Any) -> CacheRun:
    config = policy.eviction()
    streams = [make_stream(prompt, 40, group=2, seed=prompt) for prompt in (4, 30, 30, 17)]
    budgets = [config.resolve(s.prompt, 40).within(options.get("window")) for s in streams]
    return CacheRun(streams, budgets, make_policy(config), **options)


@each_policy
def test_buffers_may_move_between_steps(policy: PolicyRow) -> None:
    """An offloaded cache: home keeps K and V, each step works on a copy and writes back the newest token only."""
    resident, moving = ragged_run(policy), ragged_run(policy)
    cache = moving.cache
    assert cache.k is not None
    assert cache.v is not None
    home = cache.k, cache.v
    size = cache.shape.head_dim
    for _ in range(40):
        occupied = cache.occupied
        cache.detach()
        away = tuple(torch.zeros_like(buffer) for buffer in home)
        for buffer, source in zip(away, home, strict=True):
            buffer[:, :, :occupied] = source[:, :, :occupied]
        cache.attach(*away)
        assert torch.equal(moving.step(), resident.step())
        slots = cache.last_slots.unsqueeze(-1).unsqueeze(-1).expand(-1, -1, 1, size)
        for buffer, target in zip(away, home, strict=True):
            target.scatter_(2, slots, buffer.gather(2, slots))
            changed = (buffer != target).any(-1)
            assert not changed[:, :, :occupied].any(), "nothing else was written"
    assert moving.kept() == resident.kept()


@each_policy
def test_attending_needs_buffers(policy: PolicyRow) -> None:
    run = ragged_run(policy)
    run.cache.detach()
    with pytest.raises(RuntimeError, match="no K and V"):
        run.step()


@each_policy
def test_views_are_as_good_as_contiguous_tensors(policy: PolicyRow) -> None:
    config = policy.eviction()
    stream = make_stream(20, 5)
    views = type(stream)(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in stream[:3]), 20)
    budget = config.resolve(20, 5)
    plain, strided = (CacheRun([s], [budget], make_policy(config)) for s in (stream, views))
    assert torch.equal(plain.steps(5), strided.steps(5))


@each_policy
def test_bfloat16_keys_and_values_are_stored_as_they_come(policy: PolicyRow) -> None:
    run = ragged_run(policy, dtype=torch.bfloat16)
    exact = ragged_run(policy)
    assert run.step().dtype == torch.bfloat16
    torch.testing.assert_close(run.step().float()[3], exact.steps(2)[1, 3], atol=0.1, rtol=0.1)
    assert run.cache._slots.score is None or run.cache._slots.score.dtype == torch.float32


def test_rows_of_one_length_keep_by_their_own_budgets() -> None:
    streams = [make_stream(20, 10, seed=row) for row in range(3)]
    budgets = [TEN, Budget(30, 15, 15, 0, True), Budget(6, 2, 4, 0, False)]
    run = CacheRun(streams, budgets, H2OPolicy())
    assert held_counts(run.cache) == [10, 20, 6]
    run.steps(3)
    assert held_counts(run.cache) == [10, 23, 6]
    assert run.cache.next_pos == [23, 23, 23]
    assert run.cache.kept(1, 0) == list(range(23))
    assert run.cache.occupied == 23


def test_positions_name_tokens_that_came_long_ago() -> None:
    """Sinks after a prompt that had none, and a full row that has ended beside one that goes on."""
    budgets = [Budget(3, 0, 1, 2, False), Budget(9, 0, 9, 0, True)]
    run = CacheRun([make_stream(1, 38)] * 2, budgets, make_policy(EvictionConfig("streaming", budget=3, sinks=2)))
    run.steps(38)
    assert run.cache.kept(0, 0) == [0, 1, 38]
    assert run.cache.kept(1, 0) == [*range(8), 38], "it overwrites its last slot"


@each_policy
@pytest.mark.parametrize("turning", [None, Turning(2)], ids=["absolute", "rolling"])
def test_what_lay_in_free_slots_is_never_seen(
    policy: PolicyRow, turning: Turning | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers come with whatever is finite in them."""
    clean = ragged_run(policy, turning=turning)
    made = CacheShape.buffers
    monkeypatch.setattr(CacheShape, "buffers", lambda *args: tuple(part.fill_(1e30) for part in made(*args)))
    stale = ragged_run(policy, turning=turning)
    assert torch.equal(clean.steps(40), stale.steps(40))
    assert clean.kept() == stale.kept()


@by_torch
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("pitch", [2, 3, 6])
@pytest.mark.parametrize("apart", [0, 4])
def test_chosen_vectors_are_those_of_prompts_in_wider_tensors(rows: int, pitch: int, apart: int) -> None:
    """K and V as one product leaves them: beside queries; `apart`: rows that do not follow each other."""
    generator = torch_generator(pitch)
    packed = torch.randn(rows, 20 + apart, pitch, 8, generator=generator)
    own = packed[:, :20, pitch - 2 :].transpose(1, 2)
    kept = torch.rand(rows, 2, 20, generator=generator).argsort(-1)[..., :7].sort(-1).values
    expected = own.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, 8))
    assert torch.equal(select(own, None, kept), expected)
    alike = torch.tensor([0, 3, 19])
    assert torch.equal(select(own, None, alike), own[:, :, alike])
    shared = torch.randn(2, 5, 8, generator=generator)
    whole = torch.cat([shared.expand(rows, -1, -1, -1), own], dim=2)
    assert torch.equal(select(own, shared, kept), whole.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, 8)))


class CountOps(TorchDispatchMode):
    """Counts what reaches the dispatcher, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@each_policy
@pytest.mark.parametrize("turning", [None, Turning(2)], ids=["absolute", "rolling"])
def test_a_step_takes_the_same_operations_whatever_the_shape(
    policy: PolicyRow, turning: Turning | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_attention(q: Tensor, k: Tensor, v: Tensor, logits: Logits, valid: Any, want_row: bool) -> DecodeAttention:
        return DecodeAttention(q, zeros[:, :, : k.shape[2]] if want_row else None)

    counts = set()
    for rows, kv_heads, prompt in ((1, 1, 30), (7, 3, 30), (2, 2, 300)):
        config = policy.eviction()
        streams = [make_stream(prompt, 20, kv_heads, group=2, seed=row) for row in range(rows)]
        run = CacheRun(streams, [config.resolve(prompt, 20)] * rows, make_policy(config), turning=turning)
        run.steps(15)
        q, k, v = (torch.stack([getattr(s, n)[:, -1] for s in streams]) for n in "qkv")
        zeros = torch.zeros(rows, kv_heads, run.shape.capacity)
        monkeypatch.setattr(kv_cache, "decode_attention", no_attention)
        with CountOps() as ops:
            run.cache.attend(q, k, v, Logits(0.5), run.table)
        monkeypatch.undo()
        counts.add(ops.count)
    assert len(counts) == 1, "no loop over rows, heads or tokens"
    allowed = {"random": 90, "h2o": 45, "heavy": 40}.get(policy.name, 10) + (0 if turning is None else 85)
    assert counts.pop() <= allowed, "views included"


def test_state_is_eight_bytes_per_slot() -> None:
    scored = ragged_run(POLICIES[1]).cache
    assert state_bytes(scored) == 8 * scored.shape.batch * scored.shape.kv_heads * scored.shape.capacity
    arrival = CacheRun([make_stream(20, 5)] * 2, [Budget(10, 0, 10, 0, False)] * 2, make_policy(POLICIES[0].eviction()))
    arrival.step()
    assert state_bytes(arrival.cache) == 0, "equal rows keep one number"


@by_torch
def test_slots_needed_is_one_more_than_the_largest_budget_that_evicts() -> None:
    assert slots_needed([TEN, Budget(6, 3, 3, 0, False)]) == 11
    assert slots_needed([TEN, Budget(11, 0, 11, 0, True)]) == 11
    assert slots_needed([Budget(40, 0, 40, 0, True)]) == 40
    assert CacheShape.of([TEN], 2, 64) == CacheShape(1, 2, 64, 11)


def make_cache(**changes: Any) -> KVCache:
    options: dict[str, Any] = {"layer": 0, "row_ids": [0]}
    shape = changes.pop("shape", CacheShape.of([TEN], 2, 4))
    budgets = changes.pop("budgets", [TEN])
    buffers = changes.pop("buffers", None)
    cache = KVCache(shape, budgets, changes.pop("policy", H2OPolicy()), **{**options, **changes})
    if buffers is not None:
        cache.attach(*buffers)
    return cache


@by_torch
def test_refusals_name_what_was_found() -> None:
    with pytest.raises(ValueError, match="10 slots are too few, these budgets need 11"):
        make_cache(shape=CacheShape(1, 2, 4, 10))
    with pytest.raises(ValueError, match="1 budgets and 2 row ids for 1 rows"):
        make_cache(row_ids=[0, 1])
    with pytest.raises(ValueError, match="heavy tokens"):
        make_cache(policy=make_policy(EvictionConfig("local", budget=3)))
    cache = make_cache()
    with pytest.raises(ValueError, match=r"needed contiguous \(1, 2, 11, 4\)"):
        cache.attach(torch.zeros(1, 2, 12, 4), torch.zeros(1, 2, 11, 4))
    cache.attach(*cache.shape.buffers(torch.float32))
    with pytest.raises(ValueError, match="needs scores"):
        cache.fill([0], torch.zeros(1, 2, 20, 4), torch.zeros(1, 2, 20, 4))
    with pytest.raises(RuntimeError, match="no token has been written"):
        _ = cache.last_slots


def test_prompts_come_once_and_first() -> None:
    shape = CacheShape.of([TEN, TEN], 2, 4)
    cache = make_cache(shape=shape, budgets=[TEN, TEN], row_ids=[0, 1], buffers=shape.buffers(torch.float32))
    prompt, sums, one = torch.zeros(1, 2, 8, 4), torch.ones(1, 2, 8), torch.zeros(2, 2, 4)
    cache.fill([1], prompt, prompt, sums)
    with pytest.raises(RuntimeError, match=r"rows \[0\] have no prompt"):
        cache.attend(one, one, one, Logits(1.0))
    with pytest.raises(RuntimeError, match="row 1 has its prompt already"):
        cache.fill([1], prompt, prompt, sums)
    cache.fill([0], prompt, prompt, sums)
    cache.attend(one, one, one, Logits(1.0))
    with pytest.raises(RuntimeError, match="row 0 has its prompt already"):
        cache.fill([0], prompt, prompt, sums)


def test_full_rows_end_with_their_length() -> None:
    budgets = [Budget(12, 0, 12, 0, True), Budget(14, 0, 14, 0, True)]
    run = CacheRun([make_stream(10, 9), make_stream(10, 9)], budgets, make_policy(EvictionConfig()))
    run.steps(4)
    assert held_counts(run.cache) == [12, 14], "the first row has ended and waits for the second"
    assert run.cache.kept(1, 0) == list(range(14))
    with pytest.raises(RuntimeError, match="reached its full length"):
        run.step()
    with pytest.raises(ValueError, match="a prompt of 10 tokens, needed at most 9"):
        CacheRun([make_stream(10, 1)], [Budget(9, 0, 9, 0, True)], make_policy(EvictionConfig()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_policy
@pytest.mark.parametrize(("window", "turning"), [(None, None), (16, None), (None, Turning(2)), (16, Turning(2))])
def test_gpu_decides_like_the_cpu(policy: PolicyRow, window: int | None, turning: Turning | None) -> None:
    here, there = (ragged_run(policy, device=device, window=window, turning=turning) for device in ("cpu", "cuda"))
    for step in range(40):
        assert here.kept() == there.kept(), f"step {step}"
        torch.testing.assert_close(there.step().cpu(), here.step(), atol=1e-5, rtol=1e-4)
