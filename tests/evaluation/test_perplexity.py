"""Windows tile the text, and the likelihood is transformers' own where nothing is evicted."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.errors import H2OFlexGenError, UsageError
from h2o_flexgen.evaluation.quality import cut_windows, likelihood
from h2o_flexgen.evaluation.settings import EvaluationSettings, read_text
from h2o_flexgen.planning.llm import LLM
from tests.evaluation.conftest import POSITIONS, make_tiny


def settings(**changes: int) -> EvaluationSettings:
    return EvaluationSettings(**changes)


def test_windows_cover_the_text_once(tiny: str, files: tuple[str, str]) -> None:
    with LLM(tiny) as llm:
        assert llm.model.codec is not None
        ids = llm.model.codec.encode(read_text(files[1]))
        windows = cut_windows(llm, read_text(files[1]), settings(context=33, continuation=12))
    assert len(windows) == 30
    for at, (context, continuation) in enumerate(windows):
        assert context[0] == 2
        assert context[1:] + continuation == ids[at * 12 + 1 :][:44]
    scored = [token for _, continuation in windows for token in continuation]
    assert scored == ids[33 : 33 + 360]


def test_lengths_follow_the_context_of_the_model(tiny: str, files: tuple[str, str]) -> None:
    with LLM(tiny) as llm:
        windows = cut_windows(llm, read_text(files[1]), settings())
    assert sum(map(len, windows[0])) == POSITIONS
    assert {(len(a), len(b)) for a, b in windows} == {(96, 32)}


def test_a_limit_takes_windows_from_all_over_the_text(tiny: str, files: tuple[str, str]) -> None:
    with LLM(tiny) as llm:
        every = cut_windows(llm, read_text(files[1]), settings(context=20, continuation=20))
        some = cut_windows(llm, read_text(files[1]), settings(context=20, continuation=20, limit=3))
    assert some == [every[at] for at in (3, 9, 15)]
    assert len(every) == 19


def test_what_does_not_fit_is_refused(tiny: str) -> None:
    with LLM(tiny) as llm:
        with pytest.raises(UsageError, match="the model's context is 128"):
            cut_windows(llm, "w4 " * 400, settings(context=100, continuation=40))
        with pytest.raises(UsageError, match="the text has 30 tokens"):
            cut_windows(llm, "w4 " * 30, settings(context=20, continuation=20))
    with LLM("demo") as llm, pytest.raises(UsageError, match="nothing but the token that a text begins with"):
        cut_windows(llm, "A long text. " * 30, settings(context=1, continuation=1))


def test_the_full_cache_gives_transformers_likelihood(tiny: str, files: tuple[str, str]) -> None:
    with LLM(tiny, dtype="float32") as llm:
        windows = cut_windows(llm, read_text(files[1]), settings(limit=5))
        nll, tokens = likelihood(llm, windows)
    model, total = make_tiny(), 0.0
    with torch.no_grad():
        for context, continuation in windows:
            logprobs = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)
            total -= sum(float(logprobs[len(context) - 1 + at, token]) for at, token in enumerate(continuation))
    assert tokens == 5 * 32
    assert nll == pytest.approx(total / tokens, abs=1e-4)


def test_numbers_that_are_not_finite_have_no_likelihood(broken: str, files: tuple[str, str]) -> None:
    with LLM(broken) as llm:
        windows = cut_windows(llm, read_text(files[1]), settings(limit=2))
        with pytest.raises(H2OFlexGenError, match=r"logits that are not finite.* no perplexity can be given"):
            likelihood(llm, windows)


def test_eviction_is_active_while_scoring(tiny: str, files: tuple[str, str]) -> None:
    found = {}
    for eviction in (EvictionConfig(), EvictionConfig(name="h2o"), EvictionConfig(name="h2o", budget=8)):
        with LLM(tiny, dtype="float32", eviction=eviction) as llm:
            found[eviction] = likelihood(llm, cut_windows(llm, read_text(files[1]), settings(limit=2)))[0]
    full, whole, evicted = found.values()
    assert whole == full
    assert abs(evicted - full) > 1e-3
