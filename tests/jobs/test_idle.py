"""Fields of a body that ask for nothing are taken; those that ask for something that is not served are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from h2o_flexgen.jobs.idle import _IDLE, asks_nothing, known
from h2o_flexgen.jobs.openai import OpenAIFormat
from h2o_flexgen.jobs.requests import BatchRequest, Refused
from h2o_flexgen.jobs.source import Record
from tests.jobs.files import request
from tests.programs import write_talker

TALK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> OpenAIFormat:
    from h2o_flexgen.engine.requests.tokenizer import TextCodec

    codec = TextCodec.open(write_talker(tmp_path_factory.mktemp("talker") / "model"))
    return OpenAIFormat("model", codec, (2,), 0, {}, 1, "f" * 64)


def asked(form: OpenAIFormat, chat: bool, **fields: Any) -> BatchRequest:
    body = {"messages": TALK} if chat else {"prompt": "Hi"}
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return form.asked(Record(1, request("a", {"max_tokens": 3, **body, **fields}, url=url).encode()))


BOTH: list[dict[str, Any]] = [
    {"n": 1},
    {"best_of": 1},
    {"logit_bias": {}},
    {"frequency_penalty": 0, "presence_penalty": 0.0},
    {"repetition_penalty": 1, "top_k": -1, "min_p": 0, "min_tokens": 0},
    {"stream": False},
    {"stream": None, "stream_options": None},
    {"stream_options": {"include_usage": True}},
    {"user": "someone"},
    {"metadata": {"run": "1"}},
    {"metadata": {}},
    {"store": False},
    {"logprobs": False},
    {"logprobs": None, "top_logprobs": None},
    {"top_logprobs": 0},
    {"stop": None},
    {"stop": []},
    {"stop": ""},
    {"tools": []},
    {"tools": None, "tool_choice": None},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
    {"tool_choice": "auto", "parallel_tool_calls": False},
    {"functions": [], "function_call": "none"},
    {"service_tier": "auto"},
    {"service_tier": "flex"},
    {"modalities": ["text"]},
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"echo": False, "suffix": ""},
    {"reasoning_effort": None, "verbosity": "medium"},
    {"safety_identifier": "x", "prompt_cache_key": "y"},
    {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
    {"ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"stop_token_ids": [], "bad_words": [], "allowed_token_ids": None, "logits_processors": None},
    {"guided_json": None, "guided_regex": None, "structured_outputs": None, "truncate_prompt_tokens": None},
    {"priority": 0, "request_id": "r"},
    {"spans": [], "fold": None},
    {"temperature": None, "top_p": None, "seed": None, "n": None, "user": None},
    {"max_completion_tokens": None},
    {"unheard_of": None},
]


@pytest.mark.parametrize("fields", BOTH, ids=[json.dumps(each)[:60] for each in BOTH])
def test_what_asks_for_nothing_changes_nothing(form: OpenAIFormat, fields: dict[str, Any]) -> None:
    for chat in (False, True):
        plain, found = asked(form, chat), asked(form, chat, **fields)
        assert (found.params, found.prompts, found.scores, found.body) == (
            plain.params,
            plain.prompts,
            plain.scores,
            plain.body,
        )


def test_a_seed_is_taken(form: OpenAIFormat) -> None:
    assert [asked(form, chat, seed=7).params.seed for chat in (False, True)] == [7, 7]


SOMETHING: list[dict[str, Any]] = [
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"functions": [{}]},
    {"store": True},
    {"store": 0},
    {"stream": True},
    {"stream_options": {"include_obfuscation": True}},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "x"}},
    {"top_logprobs": 2},
    {"top_logprobs": False},
    {"best_of": 3},
    {"suffix": "x"},
    {"stop": False},
    {"stop": [""]},
    {"n": True},
    {"logit_bias": []},
    {"use_beam_search": True},
    {"num_beams": 4},
    {"num_beams": True},
    {"length_penalty": 2},
    {"guided_json": {}},
    {"bad_words": ["x"]},
    {"continue_final_message": True},
    {"metadata": "x"},
    {"user": 3},
    {"priority": True},
    {"reasoning_effort": "high"},
    {"web_search_options": {}},
    {"truncate_prompt_tokens": 5},
    {"skip_special_tokens": False},
    {"unheard_of": 0},
]


@pytest.mark.parametrize("fields", SOMETHING, ids=[json.dumps(each) for each in SOMETHING])
def test_what_asks_for_something_is_refused_by_name(form: OpenAIFormat, fields: dict[str, Any]) -> None:
    (name,) = fields
    for chat in (False, True):
        with pytest.raises(Refused) as why:
            asked(form, chat, **fields)
        assert why.value.param == name
        assert name in why.value.message or name == "skip_special_tokens"


def test_echo_is_for_completions_alone(form: OpenAIFormat) -> None:
    assert asked(form, False, echo=True).body["echo"]
    with pytest.raises(Refused, match="'echo' of the body is True, which is not supported"):
        asked(form, True, echo=True)


def test_every_field_may_be_null() -> None:
    for name in _IDLE:
        assert asks_nothing(name, None)
        assert known(name)
    assert not known("unheard_of")
