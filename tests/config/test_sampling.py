"""Settings of sampling: what is refused, what is the same, and what is warned of."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from h2o_flexgen.config.fold import Thinking
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.errors import UsageError


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"top_p": 1.1},
        {"top_k": -1},
        {"stop_strings": ("",)},
        {"num_return_sequences": 2},
        {"max_new_token": 8},
        {"min_p": 1.1},
        {"min_p": None},
        {"typical_p": 0.0},
        {"top_h": 0.0},
        {"epsilon_cutoff": -0.1},
        {"max_time": -1.0},
        {"no_repeat_ngram_size": -1},
        {"suppress_tokens": [-1]},
        {"suppress_tokens": 5},
        {"bad_words_ids": [5]},
        {"bad_words_ids": [[]]},
        {"sequence_bias": {(1,): "x"}},
        {"sequence_bias": {(1,): 10**400}},
        {"sequence_bias": [[[1], float("nan")]]},
        {"sequence_bias": [[[1], float("inf")]]},
        {"exponential_decay_length_penalty": (3,)},
        {"exponential_decay_length_penalty": (3, 0.0)},
        {"forced_eos_token_id": [4, 5], "suppress_tokens": [5, 4, 6]},
        {"max_new_tokens": np.array([1, 2])},
        {"temperature": np.array([1, 2])},
        {"stop_strings": torch.tensor(2)},
        {"forced_bos_token_id": np.float32(0.5)},
        {"sequence_bias": np.array([1, 2])},
        {"seed": [3]},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**settings)


def test_an_unknown_setting_names_the_closest() -> None:
    with pytest.raises(UsageError, match="did you mean 'max_new_tokens'"):
        SamplingParams(max_new_token=8)


def test_lists_and_tuples_are_the_same_settings() -> None:
    lists = SamplingParams(bad_words_ids=[[1, 2]], suppress_tokens=[3], sequence_bias={(4,): 1.0}, eos_token_id=[5])
    tuples = SamplingParams(
        bad_words_ids=((1, 2),), suppress_tokens=(3,), sequence_bias=(((4,), 1.0),), eos_token_id=(5,)
    )
    assert lists == tuples
    assert hash(lists) == hash(tuples)


def test_sampling_settings_without_sampling_are_warned_of_where_they_are_written() -> None:
    with pytest.warns(UserWarning, match=r"temperature, min_p have no effect without do_sample=True") as caught:
        SamplingParams(temperature=0.5, min_p=0.1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingParams(do_sample=True, temperature=0.5, min_p=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"do_sample": "false"}, "do_sample is 'false'. needed true or false"),
        ({"seed": "x"}, "seed is 'x'. needed a whole number"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'. needed a whole number"),
        ({"stop_strings": 5}, "stop_strings is 5. needed a string, or a list of them"),
        ({"exponential_decay_length_penalty": 5}, "exponential_decay_length_penalty=5. needed (tokens before it, "),
        ({"thinking": 5}, "thinking is 5. needed {"),
        ({"thinking": {"begin": [1]}}, "Thinking lacks the keys end"),
        ({"thinking": {"begin": "<", "end": [2]}}, "begin of thinking is '<'. needed a list of token ids"),
        ({"max_tokens": 8}, "'max_tokens' is not a generation setting. needed one of max_new_tokens, "),
    ],
    ids=str,
)
def test_values_of_another_kind_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**settings)
    assert str(caught.value).startswith(words)


def test_thinking_may_be_a_dict() -> None:
    asked = {"begin": [1], "end": [2, 3], "most": 4}
    assert SamplingParams(thinking=asked).thinking == Thinking((1,), (2, 3), most=4)  # type: ignore[arg-type]
