"""`response_format` in the engine: rows that finish are valid, and what the grammar does not forbid stays the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from h2o_flexgen import LLM, OffloadPolicy, RequestOutput, SamplingParams
from h2o_flexgen.engine.requests import grammars
from h2o_flexgen.engine.requests.grammars import Guide
from h2o_flexgen.errors import UsageError
from tests.engine.test_gguf_real import FILE

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}
SCHEMAS: list[Any] = [
    PERSON,
    {"enum": ["yes", "no"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 20}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    {"type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"], "$defs": {"p": PERSON}},
    {"const": {"done": True}},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "top_p": 0.9},
    "penalised": {"repetition_penalty": 1.3},
    "rare settings": {"no_repeat_ngram_size": 4, "do_sample": True, "typical_p": 0.9},
    "log-probabilities": {"logprobs": 2},
    "no eos": {"eos_token_id": ()},
    "a stop token": {"eos_token_id": (7, 4000)},
}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def check(outputs: list[RequestOutput], schemas: list[Any]) -> int:
    """How many rows with a schema finished; all of them are valid."""
    finished = 0
    for output, schema in zip(outputs, schemas, strict=True):
        assert output.error is None
        if schema is not None and output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text or ""), schema, jsonschema.Draft202012Validator)
            finished += 1
    return finished


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    # Two GPU batches of five rows: with and without schemas side by side, and places that are filled again.
    shares = {"cpu": 1.0}
    policy = OffloadPolicy(5, 2, weights=shares, cache=shares, hidden=shares)
    with LLM("demo", policy=policy, dtype="float32") as llm:
        yield llm


@pytest.mark.turns
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_that_finish_are_valid_beside_rows_without_a_schema(demo: LLM, settings: dict[str, Any]) -> None:
    schemas = [*SCHEMAS, None, *SCHEMAS[:3], None]
    params = [
        SamplingParams(max_new_tokens=60, response_format=None if schema is None else form(schema), **settings)
        for schema in schemas
    ]
    outputs = demo.generate(["Once there was"] * len(schemas), params)
    assert check(outputs, schemas) >= 7
    at = [place for place, schema in enumerate(schemas) if schema is None]
    lengths = [60 if place in at else 1 for place in range(len(schemas))]
    params = [SamplingParams(max_new_tokens=length, **settings) for length in lengths]
    free = demo.generate(["Once there was"] * len(schemas), params)
    assert [outputs[place].token_ids for place in at] == [free[place].token_ids for place in at]


def test_an_object_of_any_kind(demo: LLM) -> None:
    params = SamplingParams(max_new_tokens=80, do_sample=True, seed=5, response_format={"type": "json_object"})
    outputs = demo.generate(["An object:"] * 8, params)
    # The demo model seldom closes an object that may go on.
    assert all((output.text or "").startswith("{") for output in outputs)
    assert check(outputs, [{"type": "object"}] * 8) <= 8


def test_where_the_grammar_forbids_nothing_tokens_are_those_without_it(
    demo: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SamplingParams(max_new_tokens=20, do_sample=True, seed=1)
    expected = [output.token_ids for output in demo.generate(["One morning", "The old"], plain)]
    monkeypatch.setattr(Guide, "take", lambda self, token: None)
    make = Guide.__init__

    def unbound(self: Guide, *args: Any) -> None:
        make(self, *args)
        self._mask.fill_(-1)
        self._filled = True

    monkeypatch.setattr(Guide, "__init__", unbound)
    for settings in ({"do_sample": True, "seed": 1}, {"do_sample": True, "seed": 1, "bad_words_ids": [[4000]]}):
        free = SamplingParams(max_new_tokens=20, **settings)
        guided = SamplingParams(max_new_tokens=20, response_format=form({"type": "string"}), **settings)
        prompts = ["One morning", "The old"]
        found = [[output.token_ids for output in demo.generate(prompts, each)] for each in (free, guided)]
        assert found[0] == found[1]
        assert settings.keys() - {"do_sample", "seed"} or found[0] == expected


def test_a_row_whose_grammar_fails_leaves_its_neighbours_alone(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    accepts = Guide._accepts

    def failing(self: Guide, token: int) -> bool:
        if self is first[0]:
            self._error = "its grammar failed"
        return accepts(self, token)

    make, first = Guide.__init__, list[Guide]()

    def noting(self: Guide, *args: Any) -> None:
        make(self, *args)
        first.append(self)

    monkeypatch.setattr(Guide, "__init__", noting)
    monkeypatch.setattr(Guide, "_accepts", failing)
    outputs = demo.generate(["A"] * 3, SamplingParams(max_new_tokens=60, response_format=form(SCHEMAS[0])))
    assert [output.finish_reason for output in outputs] == ["error", "stop", "stop"]
    assert outputs[0].error == "its grammar failed"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_schema_of_no_text_is_to_blame(demo: LLM, sampled: bool) -> None:
    endless = form({"anyOf": [{"$ref": "#"}]})  # a bare {"$ref": "#"} is refused as such since xgrammar 0.2.9
    outputs = demo.generate(["The"], max_new_tokens=5, do_sample=sampled, response_format=endless)
    assert outputs[0].error == "its response_format and other settings forbid every token"


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_schema_that_fails_when_it_is_compiled_ends_its_row(
    demo: LLM, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As this pattern's does in xgrammar 0.2.8; 0.2.9 compiles it, and the failure is made here."""

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("[19:08:09] /project/functor.cc:3567: Check failed: (hashes.has_value()) is false")

    monkeypatch.setattr("xgrammar.GrammarCompiler.compile_json_schema", failing)
    evil = form({"type": "string", "pattern": "^(a|a)*b{1,1000}$"})
    params = [SamplingParams(max_new_tokens=4, response_format=each, **settings) for each in (None, evil)]
    plain, failed = demo.generate(["The", "The"], params)
    assert plain.error is None
    assert failed.error.startswith("its response_format cannot be followed: Check failed")


def test_a_schema_that_cannot_be_followed_names_its_prompt(demo: LLM) -> None:
    params = [SamplingParams(), SamplingParams(response_format=form({"type": "strin"}))]
    with pytest.raises(UsageError, match=r"prompt 1: the schema cannot be followed: Unsupported type"):
        demo.generate(["a", "b"], params)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"forced_eos_token_id": 3}])
def test_settings_that_contradict_a_form_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="and a response_format"):
        SamplingParams(response_format={"type": "json_object"}, **other)


def test_plain_text_is_no_form() -> None:
    assert SamplingParams(response_format={"type": "text"}) == SamplingParams()


def test_without_xgrammar_the_message_says_what_to_install(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    monkeypatch.setattr(demo, "_grammars", grammars.Grammars(demo.model.codec, demo.model.spec.vocab_size))
    with pytest.raises(UsageError, match=r"pip install 'h2o_flexgen\[schemas\]'"):
        demo.generate(["a"], response_format={"type": "json_object"})


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(not FILE.is_file(), reason=f"scripts/real_model.sh has not put {FILE} there")
def test_eight_schemas_in_one_block_on_a_real_model() -> None:
    with LLM(str(FILE)) as llm:
        prompts = [f"As JSON, something about number {number}: " for number in range(len(SCHEMAS))]
        params = [
            SamplingParams(max_new_tokens=48, response_format=form(each), do_sample=number % 2 == 1, seed=2)
            for number, each in enumerate(SCHEMAS)
        ]
        assert check(llm.generate(prompts, params), SCHEMAS) >= 7
