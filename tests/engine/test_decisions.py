"""What tells a rounding from a fault in the tests of a GPU: on runs made up, and on runs of the engine on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen.cache import slots
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.requests.sequence import RequestOutput
from tests.gpu import test_tokens
from tests.gpu.decisions import Kept, Run, fault

PROMPT = 10
TOKENS, LOGPROBS = [5, 6, 7, 8], [-1.0, -1.1, -1.2, -1.3]
HELD: Kept = {0: 0.5, 3: 0.25, 9: 0.1}


def run(tokens: list[int] = TOKENS, logprobs: list[float] = LOGPROBS, beside: float = -5.0, **steps: Kept) -> Run:
    """One row, one layer, one head. `beside`: of token 99, wherever; `steps`: what was held before them."""
    tops = [{token: value, 99: beside} for token, value in zip(tokens, logprobs, strict=True)]
    answer = RequestOutput(0, 0, [1] * PROMPT, tokens, None, "length", logprobs, tops)
    kept = {PROMPT + i: {0: [steps.get(f"step_{i}", HELD)]} for i in range(len(tokens) - 1)}
    return Run([answer], [PROMPT], {0: kept})


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        (run(), run(), None),
        (run(step_1={0: 0.5, 4: 0.250001, 9: 0.1}), run(), None),
        (run([5, 6, 1, 2], [-1.0, -1.1, -9, -9], step_1={0: 0.5, 4: 0.250001, 9: 0.1}), run(), None),
        (run(step_1={0: 0.5, 4: 0.27, 9: 0.1}), run(), "not close"),
        (run(step_1={0: 0.5, 9: 0.1}), run(), "not close"),
        (run([5, 1, 7, 8], step_1={0: 0.5, 4: 0.250001, 9: 0.1}), run(), "token 1 is 1, not 6"),
        (run(logprobs=[-1.0, -1.2, -1.2, -1.3]), run(), "token 1 is the same, and its log-probability is 0.1 off"),
        (run([5, 99, 1, 1]), run(beside=-1.1005), None),
        (run([5, 99, 1, 1]), run(), "token 1 is 99, not 6"),
        (run(TOKENS[:3], LOGPROBS[:3]), run(), "3 tokens, not 4"),
    ],
)
def test_what_no_rounding_explains(ours: Run, theirs: Run, found: str | None) -> None:
    told = fault(ours, theirs)
    assert (told is None) if found is None else (told is not None and found in told)


def test_what_the_engine_really_held(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same work in other batches holds the same; caches that keep other tokens of the prompts are found out."""
    work = checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3)
    alone, together = (test_tokens.run(*work, {"device": "cpu"}, {"gpu_batch_size": size}) for size in (1, 7))
    assert fault(alone, together) is None
    assert sorted(alone.kept) == list(range(len(test_tokens.LENGTHS)))
    for row, length in enumerate(test_tokens.LENGTHS):
        assert sorted(alone.kept[row]) == list(range(length, length + test_tokens.NEW - 1))
    choose = slots.choose

    def worst(score: Any, *args: Any) -> Any:
        return choose(score.max() - score, *args)

    monkeypatch.setattr(slots, "choose", worst)
    monkeypatch.setattr(KVCache, "packing", lambda *_: None)  # a kernel chooses by itself
    broken = test_tokens.run(*work, {"device": "cpu"}, {"gpu_batch_size": 7})
    assert "not close" in (fault(broken, together) or "")


def test_tokens_that_do_not_come_again_are_excused_by_nothing(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of recorded steps alone would not: the choices are compared without them."""
    work = checkpoint("opt")[1], EvictionConfig("h2o", ratio=0.3)
    monkeypatch.setattr(test_tokens, "engine_settings", lambda: {"device": "cpu"})
    wanted = test_tokens.outputs(*work, {"device": "cpu"}, {})
    test_tokens.assert_same(wanted, wanted, *work, {})
    with pytest.raises(AssertionError):
        test_tokens.assert_same(wanted[::-1], wanted, *work, {})
