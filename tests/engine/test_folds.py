"""Thoughts that are folded: tokens equal transformers' under a mask that hides what has been dropped, step by step."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from h2o_flexgen.cli.prompts import read_prompts
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.fold import Fold
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.tiny import TooCloseToCall, decided, prompts_of

LENGTHS, NEW, KEEP, THEN = [11, 5, 17, 8], 40, (7, 9, 11), (13,)
DISK, CPU = {"disk": 1.0}, {"cpu": 1.0}


@torch.no_grad()
def folded(model: PreTrainedModel, prompt: list[int], fold: Fold) -> tuple[list[int], int, int]:
    """Greedy tokens, what their queries saw in all, and how many thoughts were folded. Everything is computed anew in
    every step: each query sees what was there in its own step."""
    ids, here, thought, given = list(prompt), set(range(len(prompt))), len(prompt), list[int]()
    saw, leaving, folds = [set(range(i + 1)) for i in range(len(prompt))], (-1, set[int]()), 0
    while True:
        hidden = torch.full((1, 1, len(ids), len(ids)), torch.finfo(torch.float32).min)
        for i, seen in enumerate(saw):
            hidden[0, 0, i, sorted(seen)] = 0
        logits = model(torch.tensor([ids]), attention_mask=hidden, use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values
        token, sampled = int(logits.argmax()), not given
        if given:
            token = given.pop(0)
        elif best - second < 1e-4:
            raise TooCloseToCall(f"{float(best - second)} between the two likeliest tokens")
        if len(ids) - len(prompt) == NEW:
            return ids[len(prompt) :], sum(map(len, saw[len(prompt) - 1 : -1])), folds
        ids.append(token)
        if len(ids) - 1 > leaving[0] >= 0:
            here -= leaving[1]
            leaving = -1, set()
        here.add(len(ids) - 1)
        saw.append(set(here))
        if sampled and token == fold.trigger:
            leaving = len(ids) - 1 + len(fold.keep), set(range(thought, len(ids)))
            given, folds = [*fold.keep, *fold.then], folds + 1
            thought = len(ids) + len(given)


PLACES: dict[str, dict[str, Any]] = {
    "together": {"gpu_batch_size": 4, "num_gpu_batches": 1},
    "caches that move": {"gpu_batch_size": 2, "num_gpu_batches": 2, "cache": DISK, "weights": CPU, "hidden": CPU},
    "few places": {"gpu_batch_size": 1, "num_gpu_batches": 1},
}


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "place"), [("llama-gqa", "together"), ("llama-gqa", "caches that move"), ("qwen2", "few places")]
)
def test_folded_thoughts_are_not_seen(name: str, place: str, checkpoint, rewriting: None) -> None:
    model, folder = checkpoint(name)
    fold, prompts, expected = _expected(model)
    settings = {"max_new_tokens": NEW, "ignore_eos": True, "fold": fold}
    with Engine(folder, dtype="float32", policy=PLACES[place]) as llm:
        outputs = llm.generate(prompts, **settings)
    assert [output.token_ids for output in outputs] == [tokens for tokens, _, _ in expected]
    assert sum(folds for _, _, folds in expected) >= 2
    assert llm.last_record is not None
    assert llm.last_record.dependency == sum(seen for _, seen, _ in expected)


@cache
def _frequent(model: PreTrainedModel) -> int:
    """A token that answers hold again and again, whatever random weights say."""
    prompts = prompts_of(LENGTHS)
    tokens = Counter(token for prompt in prompts for token in folded(model, prompt, Fold(96, KEEP))[0][4:20])
    often = [token for token, _ in tokens.most_common(3)]
    return max(often, key=lambda token: sum(folded(model, prompt, Fold(token, KEEP, THEN))[2] for prompt in prompts))


@cache
def _expected(model: PreTrainedModel) -> tuple[Fold, list[list[int]], list[tuple[list[int], int, int]]]:
    fold = Fold(trigger=_frequent(model), keep=KEEP, then=THEN)
    return fold, *decided(prompts_of(LENGTHS), lambda _, prompt: folded(model, prompt, fold))


def test_rows_with_and_without_a_fold(checkpoint) -> None:
    model, folder = checkpoint("llama-gqa")
    fold = Fold(trigger=_frequent(model), keep=KEEP)
    prompts = prompts_of(LENGTHS)
    asked = [SamplingParams(max_new_tokens=NEW, ignore_eos=True, fold=each) for each in (fold, None, fold, None)]
    with Engine(folder, dtype="float32", policy=PLACES["together"]) as llm:
        mixed = [output.token_ids for output in llm.generate(prompts, asked)]
        alone = [llm.generate([prompt], params)[0].token_ids for prompt, params in zip(prompts, asked, strict=True)]
    assert mixed == alone


def test_what_is_refused(checkpoint, tmp_path) -> None:
    fold = {"trigger": 5, "keep": [6]}
    assert SamplingParams(fold=fold).fold == Fold(5, (6,))
    for wrong, message in (
        ({"trigger": 5, "keep": []}, "keep of a fold is empty"),
        ({"trigger": -1, "keep": [6]}, "the trigger of a fold"),
        ({"trigger": 5, "keep": "ab"}, "needed a list of token ids"),
        ({"triger": 5, "keep": [6]}, "triger"),
        ("5", "fold is '5'"),
    ):
        with pytest.raises(UsageError, match=message):
            SamplingParams(fold=wrong)
    with pytest.raises(UsageError, match=r"fold=.* and a response_format"):
        SamplingParams(fold=fold, response_format={"type": "json_object"})
    folder, prompts = checkpoint("opt")[1], prompts_of([9])
    with (
        Engine(folder, eviction=EvictionConfig("h2o", budget=10)) as llm,
        pytest.raises(UsageError, match="fold with --eviction h2o"),
    ):
        llm.generate(prompts, fold=fold)
    with Engine(folder) as llm, pytest.raises(UsageError, match="fold holds token id 100000"):
        llm.generate(prompts, fold={"trigger": 5, "keep": [100000]})
    with Engine(checkpoint("mistral")[1]) as llm, pytest.raises(UsageError, match="more than the window"):
        llm.generate(prompts, fold=fold, max_new_tokens=40)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "fold": {"trigger": 5, "keep": [6]}}\n', encoding="utf-8")
    assert read_prompts(path)[0].settings == {"fold": Fold(5, (6,))}
