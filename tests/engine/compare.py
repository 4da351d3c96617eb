"""The engine beside the slow oracle: tokens, log-probabilities and kept sets, step by step."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.packing import CacheBits
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.sequence import RequestOutput
from tests.oracles.eviction import EvictionOracle
from tests.oracles.model import OracleRun, oracle_generate
from tests.oracles.packed import rounding
from tests.policy_matrix import PolicyRow
from tests.tiny import TooCloseToCall, decided, prompts_of

History = dict[tuple[int, int], list[list[set[int]]]]
CLOSE = 1e-5
"""Scores and logits that differ by less are a matter of rounding."""


def assert_engine_equals_oracle(
    checkpoint: tuple[PreTrainedModel, str],
    policy: PolicyRow,
    lengths: list[int],
    new_tokens: int,
    history: History,
    bits: CacheBits = 16,
    places: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    """Prompts of all `lengths` in GPU batches of three, and the first alone; `changes` are of the eviction config.

    bits: of the caches; `places`: other settings of the engine, those of its policy included.
    """
    model, folder = checkpoint
    # A last digit that differs may make another code of a number, and that another answer.
    close, loose = (CLOSE, 1e-3) if bits == 16 else (1e-3, 1e-2)
    eviction = policy.eviction(**changes)
    centred = (places or {}).get("cache_rotation") == "centre"
    newest = (places or {}).get("cache_newest", 0)
    oracle = rounding(policy.oracle, bits, scaled=True, newest=newest, centred=centred)
    prompts, runs = _expected(model, oracle, eviction, tuple(lengths), new_tokens, close)
    settings = {"max_new_tokens": new_tokens, "ignore_eos": True, "logprobs": 0}
    engine = {"dtype": "float32", "eviction": eviction, "seed": eviction.seed, "cache_bits": bits}
    history.clear()
    with Engine(folder, **{"policy": {"gpu_batch_size": 3}, **engine, **(places or {})}) as llm:
        for i, (run, output) in enumerate(zip(runs, llm.generate(prompts, **settings), strict=True)):
            assert_outputs_equal(run, output, history, i, loose)
        history.clear()
        assert_outputs_equal(runs[0], llm.generate(prompts[:1], **settings)[0], history, 0, loose)


@cache
def _expected(
    model: PreTrainedModel,
    oracle: type[EvictionOracle],
    eviction: EvictionConfig,
    lengths: tuple[int, ...],
    new_tokens: int,
    close: float,
) -> tuple[list[list[int]], list[OracleRun]]:
    """Prompts of these lengths and what the oracle makes of them: once for all places that an engine may use."""

    def answer(row_id: int, prompt: list[int]) -> OracleRun:
        run = oracle_generate(model, prompt, new_tokens, oracle, eviction, row_id)
        if run.closest <= close:
            raise TooCloseToCall(f"{run.closest} between two scores or logits")
        return run

    return decided(prompts_of(list(lengths)), answer)


def assert_outputs_equal(run: OracleRun, output: RequestOutput, history: History, row_id: int, loose: float) -> None:
    assert output.token_ids == run.tokens
    assert output.logprobs == pytest.approx(run.logprobs, abs=loose)
    for i, layer in enumerate(run.layers):
        expected = [step[i] for step in run.kept]
        assert history[layer, row_id][: len(expected)] == expected, f"row {row_id}, layer {layer}"
