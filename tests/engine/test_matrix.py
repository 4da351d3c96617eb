"""Families x eviction policies x tiers: the same tokens wherever things live, for every family and every policy.

The full product would take minutes and say little more than some of its pairs: what a tier does wrong, it does with a
unit's tensors (the family) or with a cache's slots (the policy). So every pair of a family and a tier and of a policy
and a tier occurs; policies take turns over the families, and test_eviction.py has each with each kind of attention. The
shape of the block and the parts that prompts are cut into go along with the tier. Positions roll with every policy in
every second turn, where a family has rotary ones; test_rolling.py has every family with rolling positions.
What is compared with, everything resident in one batch, is itself held against transformers and against the oracle in
test_against_transformers.py, test_eviction.py and test_rolling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.sequence import RequestOutput
from tests.policy_matrix import POLICIES, PolicyRow
from tests.tiny import FAMILIES, OPT_VARIANTS, prompts_of

NEW = 5
HEADER = prompts_of([20], seed=4)[0]
PROMPTS = [*([*HEADER, *prompt] for prompt in prompts_of([5, 13], seed=5)), *prompts_of([23, 3, 9])]
"""Two with a common prefix among others."""


class Tier(NamedTuple):
    """Where all kinds of tensors live, how the block is cut, and what else the run does differently."""

    shares: dict[str, float]
    policy: dict[str, Any]
    emulate_gpu: str | None = None


TIERS = {
    "cpu": Tier({"cpu": 1.0}, {"gpu_batch_size": 2, "num_gpu_batches": 3, "prefill_chunk": 16}),
    "disk": Tier({"disk": 1.0}, {"gpu_batch_size": 2, "num_gpu_batches": 2, "lookahead": 2}),
    "gpu": Tier(
        {"gpu": 0.3, "cpu": 0.3, "disk": 0.4},
        {"gpu_batch_size": 3, "num_gpu_batches": 2, "prefill_chunk": 21},
        emulate_gpu="1GiB",
    ),
}
TURNS = [(i, name, POLICIES[i % len(POLICIES)]) for i, name in enumerate(FAMILIES)]
CASES = [
    (name, policy, i // len(POLICIES) % 2 == 0 and policy.name != "full" and name not in OPT_VARIANTS, tier)
    for (i, name, policy), tier in product(TURNS, TIERS)
]


def _answers(folder: str, eviction: EvictionConfig, policy: dict[str, Any], emulate_gpu: str | None = None):
    settings = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 0}
    engine = {"dtype": "float32", "eviction": eviction, "seed": eviction.seed, "emulate_gpu": emulate_gpu}
    with Engine(folder, policy=policy, **engine) as llm:
        return llm.generate(PROMPTS, **settings)


@pytest.fixture(scope="module")
def resident() -> Callable[..., list[RequestOutput]]:
    """`resident(folder, eviction)`: what comes of everything in memory, in one batch; once for all tiers."""
    return cache(partial(_answers, policy={}, emulate_gpu=None))


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "policy", "rolls", "tier"), CASES, ids=lambda value: str(getattr(value, "name", value))
)
def test_the_same_tokens_on_every_tier(
    name: str, policy: PolicyRow, rolls: bool, tier: str, checkpoint, resident
) -> None:
    _, folder = checkpoint(name)
    place = TIERS[tier]
    # A budget that stays within the trained context of the models whose angles depend on the length.
    changes = {} if policy.name == "full" else {"budget": 3 if name == "phi3-longrope-beyond" else 9}
    eviction = policy.eviction(rolling_positions=rolls and bool(changes), **changes)
    expected = resident(folder, eviction)
    placement = {kind: place.shares for kind in ("weights", "cache", "hidden")}
    found = _answers(folder, eviction, {**placement, **place.policy}, place.emulate_gpu)
    for one, offloaded in zip(expected, found, strict=True):
        assert offloaded.token_ids == one.token_ids
        assert offloaded.logprobs == pytest.approx(one.logprobs, abs=1e-3)


def test_the_selection_covers_every_pair() -> None:
    assert {(name, tier) for name, _, _, tier in CASES} == set(product(FAMILIES, TIERS))
    names = [row.name for row in POLICIES]
    assert {(policy.name, tier) for _, policy, _, tier in CASES} == set(product(names, TIERS))
    found = {(policy.name, rolls, tier) for _, policy, rolls, tier in CASES if policy.name != "full"}
    assert found == set(product(names[1:], (False, True), TIERS))
