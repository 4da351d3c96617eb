"""`generate_ids` with what callers bring along: logits processors, stopping criteria, allowed tokens and streamers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TopKLogitsWarper,
)

from tests.engine.against_generate import EOS, NEW, PAD, RAGGED, padded, same
from tests.tiny import VOCAB


class Favour(LogitsProcessor):
    """A caller's own: what it favours depends on the ids so far."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[torch.arange(len(ids)), (ids.sum(1) * 7) % VOCAB] += 6.0
        return scores


class StopAfter(StoppingCriteria):
    """Ends a row after a token of a set."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(ids[:, -1], self.tokens)


class TestCallables:
    def test_processors(self, model, llm) -> None:
        same(model, llm, padded(RAGGED), max_new_tokens=NEW, logits_processor=[Favour()], repetition_penalty=1.3)

    @pytest.mark.parametrize(
        "processor",
        [RepetitionPenaltyLogitsProcessor(3.0), MinLengthLogitsProcessor(20, EOS), TopKLogitsWarper(1)],
        ids=lambda processor: type(processor).__name__,
    )
    def test_a_processor_of_a_kind_that_an_option_makes_takes_its_place(self, model, llm, processor) -> None:
        settings = {"repetition_penalty": 1.3, "do_sample": True, "top_k": 1, "min_new_tokens": 3}
        same(model, llm, padded(RAGGED), max_new_tokens=NEW, logits_processor=[processor], **settings)

    def test_criteria(self, model, llm) -> None:
        plain = same(model, llm, padded([6]), max_new_tokens=NEW)[0].tolist()
        early, late = plain[len(plain) // 3], plain[-1]
        criteria = [StopAfter(late, VOCAB), StopAfter(early)]
        new = same(model, llm, padded([6]), max_new_tokens=NEW, stopping_criteria=criteria)
        assert new.tolist() == [plain[: min(plain.index(early), plain.index(late)) + 1]]

    def test_a_row_that_a_criterion_stops_is_padded(self, llm) -> None:
        ids, mask = padded(RAGGED)
        plain = llm.generate_ids(ids, mask, max_new_tokens=NEW)[:, ids.shape[1] :]
        token = int(plain[0, 3])
        found = llm.generate_ids(ids, mask, max_new_tokens=NEW, stopping_criteria=[StopAfter(token)])
        for row, expected in zip(found[:, ids.shape[1] :].tolist(), plain.tolist(), strict=True):
            end = expected.index(token) + 1 if token in expected else NEW
            assert row[:end] == expected[:end]
            assert set(row[end:]) <= {PAD}

    @pytest.mark.parametrize(
        "criterion", [MaxLengthCriteria(max_length=19), EosTokenCriteria([8, 89])], ids=lambda c: type(c).__name__
    )
    def test_criteria_that_options_make(self, model, llm, criterion) -> None:
        same(model, llm, padded([6]), max_new_tokens=4, stopping_criteria=[criterion])

    def test_prefix_allowed_tokens(self, model, llm) -> None:
        def allowed(row: int, ids: torch.Tensor) -> list[int]:
            return [(len(ids) + row) % VOCAB, (int(ids[-1]) * 3 + row) % VOCAB, 9]

        inputs, settings = padded(RAGGED), {"max_new_tokens": NEW, "forced_eos_token_id": EOS}
        same(model, llm, inputs, prefix_allowed_tokens_fn=allowed, **settings)
        same(model, llm, inputs, prefix_allowed_tokens_fn=allowed, suppress_tokens=[9], **settings)

    def test_time_is_up_after_a_token(self, model, llm) -> None:
        for engine in (model.generate, llm.generate_ids):
            assert engine(padded([6])[0], max_new_tokens=NEW, max_time=0.0).shape == (1, 7)


class Recorder:
    def __init__(self) -> None:
        self.got: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer(model, llm) -> None:
    ids, mask = padded([6])
    theirs, mine = Recorder(), Recorder()
    settings = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": 90}
    model.generate(ids, streamer=theirs, **settings)
    llm.generate_ids(ids, streamer=mine, **settings)
    assert mine.got == theirs.got
    assert mine.ended == theirs.ended == 1
    with pytest.raises(ValueError, match="a streamer for 4"):
        llm.generate_ids(*padded(RAGGED), streamer=mine, max_new_tokens=2)


def test_a_streamer_ends_when_generation_fails(llm) -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        llm.generate_ids(padded([6])[0], streamer=recorder, max_new_tokens=3, logits_processor=[lambda i, s: 1 / 0])
    assert recorder.ended == 1
    assert llm.generate_ids(padded([6])[0], max_new_tokens=3).shape == (1, 9)
