"""Four of ten ways to get KV eviction wrong without noticing: rows, positions and slots that are mixed up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.kernels.prompt import prefill_attention
from h2o_flexgen.kernels.types import DecodeAttention, Logits
from tests.cache.conftest import by_torch
from tests.cache.harness import CacheRun, held_counts, make_stream
from tests.cache.traps import each_evicting, each_policy, run_of
from tests.policy_matrix import PolicyRow
from tests.seeds import torch_generator

pytestmark = pytest.mark.turns

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
        counts = held_counts(run.cache)
        assert run.step().isfinite().all(), "whatever the buffers held is gone"
        row = calls[-1].row
        assert row is not None
        attended = (row > 0).sum(-1).tolist()
        assert attended == [[count + 1] * 2 for count in counts], "the kept and the new token, no slot else"


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
    expected = prefill_attention(stream.q[None], stream.k[None], stream.v[None], Logits(0.5), False).out[0, :, 12:]
    torch.testing.assert_close(run.steps(20)[:, 0].transpose(0, 1), expected, atol=1e-5, rtol=1e-5)


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
        before = None if run.cache._slots.score is None else run.cache._slots.score.clone()
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
        if before is not None and cache._slots.score is not None and policy.name != "random":
            stayed = (occupied & (old == pos))[..., : row.shape[-1]]
            delta = (cache._slots.score - before)[..., : row.shape[-1]]
            torch.testing.assert_close(delta[stayed], row[stayed], atol=1e-5, rtol=0)
            newest = cache._slots.score.flatten(0, 1).gather(1, cache.last_slots.view(-1, 1)).flatten()
            own = row.flatten(0, 1).gather(1, cache.last_slots.view(-1, 1)).flatten()
            torch.testing.assert_close(newest, own), "a new token starts with its own row"


def test_trap_08_order_of_slots_changes_nothing() -> None:
    stream = make_stream(30, 60, group=2)
    plain, permuted = (CacheRun([stream], [Budget(10, 5, 5, 0, False)], H2OPolicy()) for _ in range(2))
    plain.steps(20)
    permuted.steps(20)
    slots: Any = permuted.cache._slots
    order = torch.randperm(11, generator=torch_generator(1))
    for tensor in (permuted.cache.k, permuted.cache.v, slots._pos, slots.score):
        assert tensor is not None
        tensor.copy_(tensor[:, :, order])
    place = order.argsort()
    slots._free.copy_(place[slots._free % 11] + slots._free // 11 * 11)
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


@by_torch
def test_trap_09_random_choice_knows_layer_sequence_head_and_seed_only() -> None:
    stream = make_stream(40, 0, kv_heads=2)

    def kept(layer: int = 0, row_id: int = 0, seed: int = 0) -> list[list[int]]:
        config = EvictionConfig("random", budget=12, seed=seed)
        run = CacheRun([stream], [config.resolve(40, 1)], make_policy(config), layer=layer, row_ids=[row_id])
        return run.kept()[0]

    assert kept() == kept(), "reproducible"
    choices = [*kept(), *kept(layer=1), *kept(row_id=1), *kept(seed=1), *kept(seed=2**32)]
    assert len({tuple(choice) for choice in choices}) == len(choices), "each (seed, layer, row, head) draws for itself"
