"""Decode steps by a kernel on a device: nothing is sent there but launches, and nobody waits for it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import tests.kernels.triton_device  # noqa: F401  (before Triton is imported; skips without it)
from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.eviction.h2o import H2OPolicy
from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.kernels.types import Logits
from tests.kernels.tape import NoHostWork
from tests.policy_matrix import LATER, POLICIES, PolicyRow

pytestmark = pytest.mark.turns

BY_ROWS = ("tova", "keydiff", "h2o_mean", "inertiakv", "roco")
"""What these make of a step's probabilities no kernel knows, so that steps are not recorded."""
DECODING = (*BY_ROWS, "knorm", "snapkv")
ALL = [*POLICIES, *(row for row in LATER if row.name in DECODING)]
"""Bursts apart: what they move is found out row by row, once in many steps."""

WINDOW = 9
PROMPTS, HEADS, D = (12, 3), 1, 16


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the kernels that the other tests here run with: Triton's, in its interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("H2O_FLEXGEN_TRITON", "1")


def budgets_of(policy: PolicyRow) -> list[Budget]:
    """Two rows of their own; in the second sinks are still to come when the prompt is in."""
    if policy.name == "full":
        return [Budget(30, 0, 30, 0, full=True)] * 2
    heavy = 0 if policy.name in ("streaming", "local") else 3
    sinks = 4
    late = Budget(6, min(heavy, 1), 2 - min(heavy, 1), sinks, full=False)
    return [Budget(7, heavy, 7 - heavy - sinks, sinks, full=False), late]


def filled(policy: PolicyRow, window: int | None, bits: int = 16) -> KVCache:
    budgets = [budget.within(window) for budget in budgets_of(policy)]
    shape = CacheShape.of(budgets, HEADS, D, bits)
    cache = KVCache(shape, budgets, make_policy(policy.eviction()), layer=1, row_ids=[0, 1], window=window)
    cache.attach(*shape.buffers(torch.float32))
    for row, length in enumerate(PROMPTS):
        k, v = torch.randn(2, 1, HEADS, length, D)
        cache.fill([row], k, v, torch.rand(1, HEADS, length))
    return cache


def run(cache: KVCache) -> None:
    """The first step, in which everything is made, and some more that are watched."""
    for step in range(5):
        new = torch.randn(2, 4 * HEADS, D).split([2 * HEADS, HEADS, HEADS], dim=1)
        if step == 0:
            cache.attend(*new, Logits(0.3))
            continue
        with NoHostWork():
            cache.attend(*new, Logits(0.3))
    assert isinstance(cache._fused, FusedStep)


CASES = [
    pytest.param(row, window, bits, id=f"{row.name}-{window}-{bits}")
    for i, row in enumerate(ALL)
    for j, (window, bits) in enumerate(((None, 16), (None, 4), (WINDOW, 8), (WINDOW, 16)))
    if (window is None if row.name == "full" else i % 2 == j % 2)
]
"""Every policy with a window and without, every second one with the same bits; within a window nothing is full."""


@pytest.mark.parametrize(("policy", "window", "bits"), CASES)
def test_no_policy_needs_the_host(policy: PolicyRow, window: int | None, bits: int) -> None:
    cache = filled(policy, window, bits)
    run(cache)
    assert cache.repeats == (policy.name not in BY_ROWS)


@pytest.mark.parametrize(
    ("policy", "window"),
    [pytest.param(row, (None, WINDOW)[i % 2], id=row.name) for i, row in enumerate(ALL)],
)
def test_nor_do_rolling_positions(policy: PolicyRow, window: int | None) -> None:
    """Ranks are counted on the device, and keys are turned by a kernel."""
    cache, table = filled(policy, window), (torch.rand(40, D // 2), torch.rand(40, D // 2))
    first = True
    for _ in range(9):
        new = torch.randn(2, 4 * HEADS, D).split([2 * HEADS, HEADS, HEADS], dim=1)
        with nullcontext() if first else NoHostWork():
            cache.attend(*new, Logits(0.3), table)
        # Sinks that leave the window are the first thing that is hidden: what that takes is made then.
        first = cache._lengths.step < 7 and window is not None
    assert cache._fused is None


@pytest.mark.parametrize("window", [None, WINDOW])
def test_nor_does_a_score_rule_of_its_own(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not recorded, as its launches depend on the step, but nobody waits."""
    monkeypatch.setattr(H2OPolicy, "update", lambda policy, step: step.score.mul_(0.9).add_(step.row), raising=False)
    cache = filled(POLICIES[1], window)
    run(cache)
    assert not cache.repeats


def test_the_guard_sees_what_it_is_for() -> None:
    x = torch.rand(4)
    for work in (lambda: torch.tensor([1.0, 2.0]), lambda: float(x[0]), lambda: x[x > 0.5], lambda: bool(x.any())):
        with pytest.raises(RuntimeError, match="waits for it"), NoHostWork():
            work()
    with NoHostWork():
        x.add_(1).masked_fill(x > 0, 2).sum()
