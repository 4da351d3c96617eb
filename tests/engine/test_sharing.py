"""Shared prefixes and prompts in parts change the work alone: same tokens, same log-probabilities, fewer FLOPs."""

from __future__ import annotations

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from tests.policy_matrix import POLICIES, PolicyRow
from tests.tiny import prompts_of

NEW = 10
SETTINGS = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 0}


def _few_shot() -> list[list[int]]:
    """Two headers, questions under them that share more, answers of unequal length, strangers, twins."""
    first, second, *rest = prompts_of([40, 25, 20, 7, 3, 5, 9, 30], seed=3)
    question, *tails = rest
    prompts = [first + question[1:] + tail[1:] for tail in tails] + [first + tail[1:] for tail in tails]
    return [*prompts, *(second + tail[1:] for tail in tails[:2]), *tails, tails[3], second]


def _assert_same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.turns
@pytest.mark.parametrize("shape", [{"gpu_batch_size": 32}, {"gpu_batch_size": 3, "num_gpu_batches": 4}])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_shared_prefixes_change_nothing(policy: PolicyRow, shape: dict[str, int], checkpoint) -> None:
    _, folder = checkpoint("opt")
    prompts = _few_shot()
    outputs, computed = [], []
    for share in (True, False):
        with Engine(folder, dtype="float32", eviction=policy.eviction(), policy=shape, share_prefixes=share) as llm:
            outputs.append(llm.generate(prompts, **SETTINGS))
            computed.append(llm.last_record.computed_prompt_tokens)
            assert llm.last_record.prompt_tokens == sum(map(len, prompts))
    _assert_same(*outputs)
    assert computed[1] == sum(map(len, prompts))
    assert computed[0] < 0.7 * computed[1]


@pytest.mark.turns
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_prompts_in_parts_change_nothing(policy: PolicyRow, checkpoint) -> None:
    _, folder = checkpoint("opt")
    prompts = [*_few_shot(), *prompts_of([90, 70], seed=8)]
    outputs = []
    for chunk in (16, 2048):
        shape = {"gpu_batch_size": 5, "num_gpu_batches": 2, "prefill_chunk": chunk}
        with Engine(folder, dtype="float32", eviction=policy.eviction(), policy=shape) as llm:
            outputs.append(llm.generate(prompts, **SETTINGS))
    _assert_same(*outputs)


def test_a_question_with_four_answers_is_computed_once(checkpoint) -> None:
    _, folder = checkpoint("opt")
    question, *answers = prompts_of([60, 3, 5, 2, 4], seed=4)
    pairs = [(question, answer[1:] or answer) for answer in answers]
    eviction = EvictionConfig("h2o", budget=20)
    with Engine(folder, dtype="float32", eviction=eviction) as llm:
        together = llm.score(pairs)
        assert llm.last_record.computed_prompt_tokens == 60 + 3  # all but the last token once
        for pair, score in zip(pairs, together, strict=True):
            assert llm.score([pair])[0].token_logprobs == pytest.approx(score.token_logprobs, abs=1e-4)


def test_samples_of_one_prompt_share_it(checkpoint) -> None:
    _, folder = checkpoint("opt")
    with Engine(folder, dtype="float32") as llm:
        many = llm.generate(prompts_of([50]), do_sample=True, num_return_sequences=4, max_new_tokens=6)
        assert llm.last_record.computed_prompt_tokens == 49 + 4
        alone = llm.generate(prompts_of([50]), do_sample=True, num_return_sequences=1, max_new_tokens=6)
    assert many[0].token_ids == alone[0].token_ids
