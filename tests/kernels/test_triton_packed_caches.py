"""Whole caches of fewer bits by Triton's kernels, in its interpreter, against the same caches in torch."""

from __future__ import annotations

import pytest
import torch

import tests.kernels.triton_device  # noqa: F401  (before Triton is imported; skips without it)
from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.fused import FusedStep
from h2o_flexgen.kernels.triton_decode import TritonAttend
from tests.cache.harness import CacheRun, budget_of, held_counts, make_stream
from tests.policy_matrix import POLICIES, PolicyRow

pytestmark = pytest.mark.turns

STEPS = 5
KINDS = [(4, 16, 3), (8, 80, 1), (4, 80, 1)]


@pytest.mark.parametrize(
    ("policy", "bits", "d", "group"),
    [
        pytest.param(row, *kind, id="-".join((row.name, *map(str, kind))))
        for i, row in enumerate(POLICIES)
        for j, kind in enumerate(KINDS)
        if row.name == "h2o" or i % len(KINDS) == j
    ],
)
def test_they_hold_and_see_the_same(
    policy: PolicyRow, bits: int, d: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [make_stream(prompt, STEPS, kv_heads=2, group=group, d=d, seed=prompt) for prompt in (3, 20)]
    budgets = [budget_of(policy, total, s.prompt, STEPS, 2) for s, total in zip(streams, (6, 8), strict=True)]
    plain = CacheRun(streams, budgets, make_policy(policy.eviction()), bits=bits)
    with monkeypatch.context() as patch:
        patch.setattr(FusedStep, "of", lambda *_: None)
        expected = [plain.step()]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("H2O_FLEXGEN_TRITON", "1")
    run = CacheRun(streams, budgets, make_policy(policy.eviction()), bits=bits)
    found = [run.step()]
    assert run.cache._fused is not None
    assert isinstance(run.cache._fused._kernel, TritonAttend)
    monkeypatch.delenv("H2O_FLEXGEN_TRITON")
    for _ in range(STEPS - 1):
        expected.append(plain.step())
        found.append(run.step())
        assert run.kept() == plain.kept()
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)
    for one, other in ((run.cache.k, plain.cache.k), (run.cache.v, plain.cache.v)):
        assert one is not None
        assert other is not None
        for row, held in enumerate(held_counts(run.cache)):
            assert torch.equal(one[row, :, :held], other[row, :, :held])
