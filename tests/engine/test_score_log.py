"""Recorded scores are the attention that transformers computes, and what was kept follows from them."""

from __future__ import annotations

import json

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.prompt import Prompt, Span
from h2o_flexgen.engine.metrics import trace
from h2o_flexgen.engine.metrics.trace import texts_of
from h2o_flexgen.planning.llm import LLM

SHARED = list(range(3, 12))
PROMPTS = [[*range(40, 64)], [*SHARED, 21, 22, 23, 24, 25, 26, 27], [*SHARED, 31, 32, 33, 34, 35, 36, 37, 38]]
"""One alone, and two that begin alike: prompts come into caches by two ways."""
BUDGET = 7


@pytest.fixture(scope="module")
def recorded(checkpoint):
    model, path = checkpoint("llama")
    eviction = EvictionConfig("h2o", budget=BUDGET)
    with LLM(path, dtype="float32", eviction=eviction, record_scores=True) as llm:
        llm.generate(PROMPTS, max_new_tokens=1, ignore_eos=True)
        return model, llm.score_log.to_json({}, None)


def test_scores_are_the_column_sums_of_attention(recorded) -> None:
    model, log = recorded
    model.set_attn_implementation("eager")
    for prompt, entry in zip(
        PROMPTS, sorted(log["sequences"], key=lambda entry: PROMPTS.index(ids(entry))), strict=True
    ):
        with torch.no_grad():
            attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
        for layer, probabilities in enumerate(attentions):
            scores = torch.tensor(entry["scores"][layer])
            expected = probabilities[0].unflatten(0, (len(scores), -1)).mean(1).sum(1)
            torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def ids(entry) -> list[int]:
    return [int(token) for token in entry["tokens"][: entry["prompt"]]]


def test_what_was_kept_follows_from_the_scores(recorded) -> None:
    _, log = recorded
    for entry in log["sequences"]:
        length, recent = entry["prompt"], entry["budget"]["recent"]
        assert entry["budget"] == {"heavy": BUDGET // 2, "recent": BUDGET - BUDGET // 2, "sinks": 0, "total": BUDGET}
        for scores, kept in zip(entry["scores"], entry["kept"], strict=True):
            for head, positions in zip(scores, kept, strict=True):
                others = sorted(range(length - recent), key=lambda at: (-head[at], at))
                assert positions == sorted([*others[: entry["budget"]["heavy"]], *range(length - recent, length)])


def test_prompts_beyond_the_room_are_left_out(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(
        checkpoint("llama")[1], dtype="float32", eviction=EvictionConfig("h2o", budget=4), record_scores=True
    ) as llm:
        heads = llm.model.spec.num_kv_heads * llm.model.spec.num_layers
        monkeypatch.setattr(trace, "MOST_SCORES", 2 * 10 * heads)
        llm.generate([[token, *range(20, 29)] for token in (1, 2, 3)], max_new_tokens=2, ignore_eos=True)
        log = llm.score_log.to_json({}, None)
        assert (len(log["sequences"]), log["left_out"]) == (2, 1)
        llm.generate([[4, 5, 6]], max_new_tokens=1)  # a budget that holds the prompt whole: nothing is scored
        assert llm.score_log.to_json({}, None)["sequences"] == []


@pytest.mark.parametrize("rule", ["fair", "whitelist"])
def test_tokens_that_spans_keep_have_the_highest_scores(checkpoint, rule: str) -> None:
    prompt = Prompt(PROMPTS[0], [Span(2, 6, "rule", keep=True)])
    eviction = EvictionConfig("h2o", budget=14, spans=rule)
    with LLM(checkpoint("llama")[1], dtype="float32", eviction=eviction, record_scores=True) as llm:
        llm.generate([prompt], max_new_tokens=1, ignore_eos=True)
        (entry,) = json.loads(json.dumps(llm.score_log.to_json({}, None), allow_nan=False))["sequences"]
    for scores, kept in zip(entry["scores"], entry["kept"], strict=True):
        for head, positions in zip(scores, kept, strict=True):
            if rule == "whitelist":
                assert sorted(range(len(head)), key=head.__getitem__)[-4:] == [2, 3, 4, 5]
                assert len({head[at] for at in (2, 3, 4, 5)}) == 1
            else:
                assert {at for at, score in enumerate(head) if score} <= {*positions}


def test_what_is_no_number_is_recorded_as_nothing() -> None:
    scores = torch.tensor([[1.0, torch.nan, torch.inf], [0.0, 0.0, torch.inf], [3e38, torch.inf, 2.0]])
    assert trace._finite(scores)[:2].tolist() == [[1, 0, 2], [0, 0, 1]]
    assert trace._finite(scores).isfinite().all()


def test_what_recall_brings_back_is_recorded(checkpoint) -> None:
    """Fewer places than rows, so that rows move meanwhile."""
    eviction = EvictionConfig("h2o", budget=10, sinks=1, recall="cpu", recall_every=2)
    settings = {"dtype": "float32", "policy": {"gpu_batch_size": 2}, "record_scores": True}
    with LLM(checkpoint("llama-gqa")[1], eviction=eviction, **settings) as llm:
        llm.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
        log, recall = llm.score_log.to_json({}, None), llm.last_record.recall
    assert len(log["sequences"]) == len(PROMPTS)
    returns = [
        (at, times, len(entry["tokens"]))
        for entry in log["sequences"]
        for layer in entry["returns"]
        for head in layer
        for at, times in head
    ]
    assert sum(times for _, times, _ in returns) == recall["recalled"] > 0
    assert all(1 <= at < length - 1 for at, _, length in returns), "the sink does not leave"
    assert {"bits", "newest"}.isdisjoint(log)


def test_bits_of_packed_caches_are_recorded(checkpoint) -> None:
    with LLM(checkpoint("llama-gqa")[1], eviction=EvictionConfig("h2o", bytes=0.5), record_scores=True) as llm:
        llm.generate([list(range(3, 90))], max_new_tokens=2, ignore_eos=True)
        log = llm.score_log.to_json({}, None)
    assert (log["bits"], log["newest"]) == ([4, 4], 16)
    assert len(log["sequences"]) == 1
    assert "returns" not in log["sequences"][0]


def test_texts_of_tokens_add_up() -> None:
    def decode(tokens: list[int]) -> str:
        """As tokenizers do that begin words with a space: the first one of a text has none."""
        return " ".join(f"w{token}" for token in tokens)

    assert texts_of([1, 2, 3], decode) == ["w1", " w2", " w3"]
