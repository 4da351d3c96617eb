"""The newer policies in whole models: each on some family, tier and number of bits, in parts and sharing prefixes.

What a tier, a family or packing does wrong with a cache, it does with every policy's: those of the matrix run through
the products of these. Here every policy goes with one family and tier, and every family meets every tier.
"""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from tests.engine.compare import History, assert_engine_equals_oracle
from tests.engine.test_packed_caches import PLACES
from tests.policy_matrix import LATER, POLICIES, THEN_H2O, PolicyRow
from tests.seeds import torch_generator
from tests.tiny import VOCAB, WINDOW, prompts_of

FAMILIES = ("llama-gqa", "opt", "gemma3", "gpt-neox", "mistral")
CASES = [
    (row, FAMILIES[i % len(FAMILIES)], tuple(PLACES)[i % len(PLACES)], 8 if i % 3 == 0 and row in LATER else 16)
    for i, row in enumerate((*LATER, *THEN_H2O))
]


@pytest.mark.turns
@pytest.mark.parametrize(("policy", "name", "place", "bits"), CASES, ids=lambda x: str(getattr(x, "name", x)))
def test_engine_equals_the_oracle(
    policy: PolicyRow, name: str, place: str, bits: int, checkpoint, history: History
) -> None:
    changes = {"budget": WINDOW - 3} if name in ("mistral", "gemma3") else {}
    if changes and policy.eviction().split.takes_recent:
        changes["recent"] = 2
    # Of few bits one rounding is another code: more decisions would be too close to call.
    lengths, new = ([23, 40, 12], 6) if bits == 16 else ([12, 9], 3)
    assert_engine_equals_oracle(checkpoint(name), policy, lengths, new, history, bits, PLACES[place], **changes)


@pytest.mark.parametrize("policy", [*POLICIES, *LATER, *THEN_H2O], ids=lambda row: row.name)
def test_short_prompts_with_long_answers(policy: PolicyRow, checkpoint) -> None:
    """Of which the budget holds more tokens than the prompt has."""
    config = {} if policy.name == "full" else {"ratio": 0.5}
    with Engine(checkpoint("llama-gqa")[1], dtype="float32", eviction=EvictionConfig(policy.name, **config)) as llm:
        outputs = llm.generate(prompts_of([1, 2, 5]), max_new_tokens=40, ignore_eos=True)
    assert [len(output.token_ids) for output in outputs] == [40, 40, 40]


SPLITS = [
    ("h2o", "gemma3", "global", "cpu"),
    ("h2o", "gemma3", "far", "gpu"),
    ("roco", "gemma3", "far", "disk"),
    ("tova", "gemma3", "pyramid", "disk"),
    ("snapkv", "opt", "pyramid", "gpu"),
]


@pytest.mark.turns
@pytest.mark.parametrize(("policy", "name", "split", "place"), SPLITS)
def test_budgets_of_layers(policy: str, name: str, split: str, place: str, checkpoint, history: History) -> None:
    row = next(each for each in (*POLICIES, *LATER) if each.name == policy)
    lengths, changes = ([23, 40, 12], {"budget_split": split, "ratio": 0.4})
    assert_engine_equals_oracle(checkpoint(name), row, lengths, 6, history, 16, PLACES[place], **changes)


@pytest.mark.turns
@pytest.mark.parametrize("policy", [*LATER, *THEN_H2O[:1]], ids=lambda row: row.name)
def test_prompts_in_parts_that_share_a_beginning(policy: PolicyRow, checkpoint) -> None:
    _, folder = checkpoint("llama-gqa")
    # No token twice: at both places its keys are as long but for rounding, which `knorm` would choose by.
    tokens = (torch.randperm(VOCAB - 3, generator=torch_generator(3)) + 3).tolist()
    header, *tails = ([2, *tokens[a:b]] for a, b in ((0, 27), (27, 56), (27, 30), (30, 54)))
    outputs = []
    for chunk, share in ((16, True), (2048, False)):
        shape = {"gpu_batch_size": 2, "num_gpu_batches": 2, "prefill_chunk": chunk}
        eviction = EvictionConfig(policy.name, ratio=0.6)
        with Engine(folder, dtype="float32", eviction=eviction, policy=shape, share_prefixes=share) as llm:
            prompts = [*(header + tail[1:] for tail in tails), tails[0]]
            outputs.append(llm.generate(prompts, max_new_tokens=8, ignore_eos=True, logprobs=0))
    for one, other in zip(*outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("place", PLACES)
def test_many_tokens_that_go_at_once(place: str, checkpoint, history: History) -> None:
    """What is left moves to the first slots: caches that move are written anew."""
    policy = next(row for row in LATER if row.name == "scissorhands")
    assert_engine_equals_oracle(checkpoint("llama-gqa"), policy, [23, 9], 20, history, 16, PLACES[place], budget=8)


@pytest.mark.turns
@pytest.mark.parametrize("policy", THEN_H2O, ids=lambda row: row.name)
def test_prompts_of_which_nothing_goes_beside_others(policy: PolicyRow, checkpoint, history: History) -> None:
    """H2O's sums start with the rows that were looked at there, too."""
    changes = {"budget": WINDOW - 3, "recent": 2}
    assert_engine_equals_oracle(checkpoint("gemma3"), policy, [12, 9], 3, history, **changes)
