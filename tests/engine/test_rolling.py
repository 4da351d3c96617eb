"""Rolling positions: the engine against the slow oracle, within the model's context and past it."""

from __future__ import annotations

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.engine.compare import History, assert_engine_equals_oracle
from tests.policy_matrix import EVICTING, PolicyRow
from tests.tiny import FAMILIES, OPT_VARIANTS, SIZES, prompts_of

LENGTHS, LONG = [17, 9, 41, 30], SIZES["max_position_embeddings"] + 5
"""LONG: beyond the context. The oracle takes ten times as long over it as over all the others."""
NEW = 7
ROTARY = tuple(name for name in FAMILIES if name not in OPT_VARIANTS)
CLOSER = ("llama-gqa", "gemma3", "pythia")
BY_LENGTH = ("llama-dynamic", "llama-yarn", "phi3-longrope", "gpt-oss")
"""Families of each kind of rotation that depends on the length."""
CASES = [
    (row, name, name in (*CLOSER, *BY_LENGTH) if row.name == "h2o" else name == CLOSER[i % len(CLOSER)])
    for i, row in enumerate(EVICTING)
    for name in (ROTARY if row.name == "h2o" else CLOSER)
]


@pytest.mark.turns
@pytest.mark.parametrize(("policy", "name", "beyond"), CASES, ids=lambda value: str(getattr(value, "name", value)))
def test_engine_equals_the_oracle_with_rolling_positions(
    policy: PolicyRow, name: str, beyond: bool, checkpoint, history: History
) -> None:
    """H2O for every family with rotary positions. `beyond`: one prompt is longer than the context and ends in decode
    steps; with every policy, and with every kind of rotation."""
    budget = {"phi3-longrope-beyond": 3, "ministral3": 12}.get(name, 20)  # within their trained contexts
    changes = {"budget": budget, "rolling_positions": True}
    lengths = [*LENGTHS[:2], LONG, LENGTHS[3]] if beyond else LENGTHS
    assert_engine_equals_oracle(checkpoint(name), policy, lengths, NEW, history, **changes)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "phi3-longrope", "gpt-neox-serial"])
def test_nothing_changes_while_nothing_goes(name: str, checkpoint) -> None:
    _, folder = checkpoint(name)
    settings = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 0}
    answers = []
    for rolls in (False, True):
        with Engine(folder, dtype="float32", eviction=EvictionConfig(rolling_positions=rolls)) as llm:
            answers.append(llm.generate(prompts_of([23, 9, 40]), **settings))
    for absolute, rolling in zip(*answers, strict=True):
        assert rolling.token_ids == absolute.token_ids
        assert rolling.logprobs == pytest.approx(absolute.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-dynamic", "phi3-longrope"])
def test_neighbours_with_larger_budgets_do_not_matter(name: str, checkpoint) -> None:
    """Angles that depend on the length may not depend on the largest cache of the block."""
    _, folder = checkpoint(name)
    prompts = prompts_of([30, 75, 12])
    settings = {"max_new_tokens": NEW, "ignore_eos": True}
    with Engine(folder, dtype="float32", eviction=EvictionConfig("h2o", ratio=0.35, rolling_positions=True)) as llm:
        together = [output.token_ids for output in llm.generate(prompts, **settings)]
        assert together == [llm.generate([prompt], **settings)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize(("name", "limit"), [("llama-gqa", 128), ("llama-dynamic", 32), ("phi3-longrope", 64)])
def test_budgets_that_do_not_fit_the_context_are_refused(name: str, limit: int, checkpoint) -> None:
    _, folder = checkpoint(name)
    for budget, fits in ((limit - 1, True), (limit, False)):
        eviction = EvictionConfig("streaming", budget=budget, rolling_positions=True)
        with Engine(folder, dtype="float32", eviction=eviction) as llm:
            if fits:
                assert len(llm.generate(prompts_of([limit]), max_new_tokens=5, ignore_eos=True)[0].token_ids) == 5
            else:
                with pytest.raises(UsageError, match=f"context of .* is {limit} tokens"):
                    llm.generate(prompts_of([limit]), max_new_tokens=5)
