"""The engine beside the slow oracle: tokens, log-probabilities and kept sets, step by step."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from h2o_flexgen.engine.llm import LLM
from h2o_flexgen.engine.sequence import RequestOutput
from tests.oracles.model import OracleRun, oracle_generate
from tests.policy_matrix import PolicyRow

History = dict[tuple[int, int], list[list[set[int]]]]


def assert_engine_equals_oracle(
    checkpoint: tuple[PreTrainedModel, str],
    policy: PolicyRow,
    prompts: list[list[int]],
    new_tokens: int,
    history: History,
    **changes: Any,
) -> None:
    """All of `prompts` in GPU batches of three, and the first alone; `changes` are of the eviction config."""
    model, folder = checkpoint
    eviction = policy.eviction(**changes)
    runs = [
        oracle_generate(model, prompt, new_tokens, policy.oracle, eviction, row_id=i)
        for i, prompt in enumerate(prompts)
    ]
    settings = {"max_new_tokens": new_tokens, "ignore_eos": True, "logprobs": 0}
    engine = {"dtype": "float32", "eviction": eviction, "seed": eviction.seed}
    with LLM(folder, policy={"gpu_batch_size": 3}, **engine) as llm:
        for i, (run, output) in enumerate(zip(runs, llm.generate(prompts, **settings), strict=True)):
            _assert_equal(run, output, history, i)
        history.clear()
        _assert_equal(runs[0], llm.generate(prompts[:1], **settings)[0], history, 0)


def _assert_equal(run: OracleRun, output: RequestOutput, history: History, row_id: int) -> None:
    assert run.closest > 1e-5, "this seed hangs a decision on a rounding error: choose another"
    assert output.token_ids == run.tokens
    assert output.logprobs == pytest.approx(run.logprobs, abs=1e-3)
    for layer in range(len(run.kept[0])):
        expected = [step[layer] for step in run.kept]
        assert history[layer, row_id][: len(expected)] == expected, f"row {row_id}, layer {layer}"
