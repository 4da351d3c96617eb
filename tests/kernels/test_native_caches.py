"""Whole caches with the decode step in C against the same caches without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.eviction.base import AttendedStep
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.model.packing import CacheBits
from tests.cache.conftest import needs_native
from tests.cache.harness import CacheRun, budget_of, make_stream
from tests.pairs import pairs
from tests.policy_matrix import POLICIES, PolicyRow

pytestmark = needs_native


class DecayingPolicy(H2OPolicy):
    """Not a plain sum: the kernel must leave it to the policy."""

    name = "decaying"

    def update(self, step: AttendedStep) -> None:
        step.score.mul_(0.75).add_(step.received)


def pair(
    monkeypatch: pytest.MonkeyPatch, *args: Any, soft_cap: float | None = None, **options: Any
) -> tuple[CacheRun, CacheRun]:
    """The same run with the kernel in C and with torch's; the first step settles which."""
    native, plain = (CacheRun(*args, **options) for _ in range(2))
    native.logits = plain.logits = native.logits._replace(soft_cap=soft_cap)
    torch.testing.assert_close(*with_torch(monkeypatch, native, plain), atol=1e-5, rtol=1e-5)
    assert native.cache._fused is not None
    assert plain.cache._fused is None
    return native, plain


def with_torch(monkeypatch: pytest.MonkeyPatch, native: CacheRun, plain: CacheRun) -> tuple[Tensor, Tensor]:
    out = native.step()
    with monkeypatch.context() as patch:
        patch.setattr(FusedStep, "of", lambda *_: None)
        return out, plain.step()


def alike(native: CacheRun, plain: CacheRun, steps: int) -> None:
    for step in range(steps):
        assert native.kept() == plain.kept(), f"step {step}"
        assert torch.equal(native.cache.last_slots, plain.cache.last_slots), f"step {step}"
        torch.testing.assert_close(native.step(), plain.step(), atol=1e-5, rtol=1e-4)
        for name in ("pos", "k", "v"):
            assert torch.equal(getattr(native.cache, name), getattr(plain.cache, name)), f"{name}, step {step}"
    assert (native.cache._slots.score is None) == (plain.cache._slots.score is None)
    if native.cache._slots.score is not None:
        torch.testing.assert_close(native.cache._slots.score, plain.cache._slots.score, atol=1e-4, rtol=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("policy", "window", "heads"),
    pairs(POLICIES, [None, 13], [(1, 16), (3, 16), (1, 4), (3, 8), (3, (8, 4)), (1, (4, 8))]),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_caches_keep_the_same_with_and_without(
    policy: PolicyRow, window: int | None, heads: tuple[int, CacheBits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that grow, rows that evict from the start, full ones that end, budgets of their own, sinks."""
    group, bits = heads
    streams = [make_stream(prompt, 120, group=group, d=16, seed=prompt) for prompt in (2, 30, 7, 30, 11)]
    totals = (9, 12, 30, 5, 150)
    budgets = [budget_of(policy, n, s.prompt, 120, 2).within(window) for s, n in zip(streams, totals, strict=True)]
    options: dict[str, Any] = {"layer": 3, "window": window, "bits": bits}
    alike(*pair(monkeypatch, streams, budgets, make_policy(policy.eviction()), **options), 118)


@pytest.mark.parametrize("bits", [16, 8, 4, (4, 8)])
def test_soft_caps(bits: CacheBits, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = next(row for row in POLICIES if row.name == "h2o")
    for group, d, window in ((1, 16, None), (3, 64, 13), (2, 128, None)):
        streams = [make_stream(prompt, 40, group=group, d=d, seed=prompt) for prompt in (2, 30, 7)]
        budgets = [
            budget_of(policy, n, s.prompt, 40, 2).within(window) for s, n in zip(streams, (9, 12, 50), strict=True)
        ]
        native, plain = pair(
            monkeypatch, streams, budgets, make_policy(policy.eviction()), window=window, bits=bits, soft_cap=0.7
        )
        alike(native, plain, 38)


@pytest.mark.parametrize("window", [None, 20])
def test_a_full_row_that_has_ended_waits_beside_one_that_evicts(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [make_stream(prompt, 60, group=2, seed=prompt) for prompt in (6, 10, 9)]
    budgets = [Budget(12, 6, 6, 0, False), Budget(14, 0, 14, 0, True), Budget(9, 0, 9, 0, True)]
    alike(*pair(monkeypatch, streams, budgets, H2OPolicy(), window=window), 58)


def test_ties_stay_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = make_stream(8, 60, kv_heads=3, group=2)
    zeros = zeros._replace(q=torch.zeros_like(zeros.q))
    budgets = [Budget(7, 3, 4, 0, False), Budget(20, 10, 9, 1, False), Budget(5, 5, 0, 0, False)]
    alike(*pair(monkeypatch, [zeros] * 3, budgets, H2OPolicy()), 58)


@pytest.mark.parametrize("window", [None, 12])
def test_a_policy_with_another_sum_is_asked(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [make_stream(prompt, 60, group=2, seed=prompt) for prompt in (3, 25)]
    budgets = [Budget(9, 5, 3, 1, False), Budget(6, 3, 3, 0, False)]
    native, plain = pair(monkeypatch, streams, budgets, DecayingPolicy(), window=window)
    alike(native, plain, 58)
    (summed, _), _ = pair(monkeypatch, streams, budgets, H2OPolicy(), window=window), None
    summed.steps(58)
    assert native.kept() != summed.kept(), "else nothing was tested"


def test_half_precision_is_closer_to_the_truth_than_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [make_stream(prompt, 40, group=2, d=64, seed=prompt) for prompt in (30, 100)]
    streams = [s._replace(**{name: getattr(s, name).bfloat16().float() for name in "qkv"}) for s in streams]
    budgets = [Budget(20, 0, 16, 4, False)] * 2
    policy = make_policy(POLICIES[2].eviction())
    native, plain = (CacheRun(streams, budgets, policy, dtype=torch.bfloat16) for _ in range(2))
    exact = CacheRun(streams, budgets, policy)
    errors = []
    for _ in range(40):
        found, expected = with_torch(monkeypatch, native, plain), exact.step()
        errors.append([(x.float() - expected).abs().mean() for x in found])
    ours, theirs = torch.tensor(errors).mean(0)
    assert ours < theirs
