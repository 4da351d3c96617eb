"""The oracle is right where transformers can say so: with every token kept, it is transformers' own model."""

from __future__ import annotations

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from tests.oracles.eviction import FullOracle, H2OOracle
from tests.oracles.model import oracle_generate
from tests.tiny import FAMILIES, WINDOW, decided, make_model, prompts_of, transformers_greedy

NEW = 10
WINDOWED = {"mistral": {0, 1, 2}, "qwen2-window": {1, 2}, "gemma3": {0, 2}}
WINDOWED |= {"gpt-oss": {0, 2}, "mixtral-window": {0, 1, 2}, "smollm3-window": {0, 2}}
WINDOWED |= {"gemma2": {0, 2}, "olmo3": {0, 2}, "exaone4": {0, 2}, "cohere2": {0, 2}, "dots1": {2}}
"""Layers with a sliding window, by row of FAMILIES."""


@pytest.mark.turns
@pytest.mark.parametrize("name", FAMILIES)
def test_the_full_cache_is_transformers_own_model(name: str) -> None:
    model = make_model(name)
    prompts, answers = decided(prompts_of([1, 7, 29]), lambda _, prompt: transformers_greedy(model, prompt, NEW))
    for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
        run = oracle_generate(model, prompt, NEW, FullOracle, EvictionConfig())
        assert run.tokens == tokens
        assert run.logprobs == pytest.approx(logprobs, abs=1e-4)
        for step, layers in enumerate(run.kept):
            for layer, heads in enumerate(layers):
                length = len(prompt) + step
                first = max(0, length + 1 - WINDOW) if layer in WINDOWED.get(name, ()) else 0
                assert all(kept == set(range(first, length)) for kept in heads)


def test_a_small_budget_changes_the_answer() -> None:
    model = make_model("llama-gqa")
    (prompt,), ((tokens, _),) = decided(prompts_of([29]), lambda _, prompt: transformers_greedy(model, prompt, NEW))
    run = oracle_generate(model, prompt, NEW, H2OOracle, EvictionConfig("h2o", ratio=0.2))
    assert run.tokens != tokens
    assert all(len(kept) == 8 for layers in run.kept for heads in layers for kept in heads)
