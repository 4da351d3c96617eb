"""Texts that must have a form: schemas that are refused; random texts of the others are valid by jsonschema."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.engine.requests.grammars import Grammars, Guide
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import UsageError

END = 256
CLOSING = (*b'"}]', END)
MOST_BYTES = 300


class Bytes:
    """A tokenizer whose tokens are the bytes, as `token_bytes` reads one."""

    class decoder:
        @staticmethod
        def __getstate__() -> bytes:
            return b'{"type": "ByteFallback"}'

    @staticmethod
    def get_vocab(with_added_tokens: bool) -> dict[str, int]:
        return {f"<0x{byte:02X}>": byte for byte in range(256)}

    @staticmethod
    def get_added_tokens_decoder() -> dict[int, Any]:
        return {}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TextCodec(list, list, str, light=Bytes()), END + 1)
    yield made
    made.close()


def guide_of(grammars: Grammars, form: ResponseFormat) -> Guide:
    row: Any = SimpleNamespace(grammar=grammars.of(form, "it"), eos=frozenset([END]))
    return Guide(row, END + 1)


def random_text(grammars: Grammars, form: ResponseFormat, seed: int) -> str | None:
    """What a model that draws evenly among all allowed bytes writes; None where it does not come to an end."""
    draw, guide, written = random.Random(seed), guide_of(grammars, form), bytearray()
    while len(written) < MOST_BYTES:
        bits = guide.mask.numpy()[0]
        allowed = [token for token in range(END + 1) if bits[token // 32] >> token % 32 & 1]
        # What closes a text comes often enough for some to be closed.
        closing = [token for token in allowed if token in CLOSING]
        token = draw.choice(closing if closing and draw.random() < 0.3 else allowed)
        guide.take(token)
        assert not guide.error
        if token == END:
            return written.decode()
        written.append(token)
    return None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "maxLength": 1},
        {"type": "string", "pattern": "^.$"},
        {"type": "string", "pattern": "^[^a]$"},
        {"type": "string", "pattern": "^\\W$"},
    ],
    ids=str,
)
def test_characters_are_utf8(grammars: Grammars, schema: Any) -> None:
    """Neither a half of a surrogate pair, nor a longer form than needed, nor what is beyond Unicode: decoders make
    several characters of each."""

    def follows(data: bytes) -> bool:
        guide = guide_of(grammars, ResponseFormat.of_schema(schema))
        for byte in b'"' + data + b'"':
            in_mask = bool(guide.mask[0, byte // 32] >> byte % 32 & 1)
            assert guide.tries(byte) == in_mask
            if not in_mask:
                return False
            guide.take(byte)
        return True

    for number in (0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, 0x10FFFF):
        assert follows(chr(number).encode()), hex(number)
    for broken in ("c080", "c1bf", "e09fbf", "eda080", "edbfbf", "f08fbfbf", "f4908080", "f5808080", "ff", "80"):
        assert not follows(bytes.fromhex(broken)), broken


def names() -> st.SearchStrategy[str]:
    return st.sampled_from(["a", "b", "name", "é", "x y", 'q"', "\\"])


def leaves() -> st.SearchStrategy[Any]:
    whole = st.integers(-20, 20)
    numbers = st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": whole, "maximum": whole.map(lambda n: n + 41)},
    )
    beyond = st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"exclusiveMinimum": whole, "exclusiveMaximum": whole.map(lambda n: n + 50)},
    )
    multiples = st.fixed_dictionaries({"type": st.just("integer"), "multipleOf": st.integers(1, 12)})
    lengths = st.fixed_dictionaries(
        {"type": st.just("string")}, optional={"minLength": st.integers(0, 3), "maxLength": st.integers(3, 6)}
    )
    patterns = st.sampled_from(
        ["^[a-z]{2,4}$", "^\\d{3}-\\d+$", "^(x|yy)+$", "b", "^a.c$", "^[^a]$", "^\\s$", "^\\S\\W\\D$", "^\\w*$", '^"$']
    ).map(lambda pattern: {"type": "string", "pattern": pattern})
    formats = st.sampled_from(["date", "uuid", "email", "ipv4", "date-time", "time", "uri", "hostname", "ipv6"]).map(
        lambda form: {"type": "string", "format": form}
    )
    values = st.one_of(st.none(), st.booleans(), whole, st.floats(-9, 9), st.text(max_size=3), st.lists(whole))
    consts = values.map(lambda value: {"const": value})
    fixed = st.one_of(consts, st.lists(values, min_size=1).map(lambda several: {"enum": several}))
    plain = st.sampled_from([{"type": "null"}, {"type": ["integer", "null", "boolean"]}, {"$ref": "#/$defs/d"}])
    return st.one_of(numbers, beyond, multiples, lengths, patterns, formats, fixed, plain)


def nested(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def of_object(properties: dict[str, Any]) -> st.SearchStrategy[Any]:
        some = st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([])
        rest = st.one_of(st.booleans(), parts)
        return st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.just(properties), "required": some},
            optional={"additionalProperties": rest, "maxProperties": st.integers(len(properties), 4)},
        )

    objects = st.dictionaries(names(), parts, max_size=3).flatmap(of_object)
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": parts},
        optional={"minItems": st.integers(0, 2), "maxItems": st.integers(2, 4)},
    )
    tuples = st.fixed_dictionaries(
        {"type": st.just("array"), "prefixItems": st.lists(parts, min_size=1, max_size=2)},
        optional={"items": st.one_of(st.booleans(), parts)},
    )
    named = st.fixed_dictionaries(
        {"type": st.just("object"), "patternProperties": st.fixed_dictionaries({"^x[0-9]$": parts})},
        optional={"additionalProperties": st.just(False)},
    )
    keys = st.just({"type": "object", "propertyNames": {"pattern": "^[ab]+$"}})
    choices = st.lists(parts, min_size=1, max_size=3).map(lambda cases: {"anyOf": cases})
    anything = st.sampled_from([{"type": "object"}, {"type": "array"}])
    return st.one_of(objects, arrays, tuples, choices, named, keys, anything)


SCHEMAS = st.recursive(leaves(), nested, max_leaves=6).map(
    lambda schema: {**schema, "$defs": {"d": {"type": "string", "maxLength": 2}}}
)


def follows_pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """With the classes of ECMA 262, which JSON Schema names for patterns: in Python's, \\w is any script's letter."""
    if isinstance(text, str) and not re.search(pattern, text, re.ASCII):
        yield jsonschema.ValidationError(f"{text!r} does not match {pattern!r}")


VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": follows_pattern})


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.booleans(), st.integers(0, 1 << 30))
def test_random_texts_of_a_grammar_are_valid(grammars: Grammars, schema: Any, strict: bool, seed: int) -> None:
    try:
        form = ResponseFormat.of_schema(schema, strict)
        text = random_text(grammars, form, seed)
    except UsageError:
        return
    if text is not None:
        jsonschema.validate(json.loads(text), schema, VALIDATOR)


@pytest.mark.parametrize("word", ["\u00fcber", "caf\u00e90", "\x800", "\u00e9\u00e9a"])
def test_a_letter_of_latin_1_before_a_digit_of_sixteen_is_itself(grammars: Grammars, word: str) -> None:
    """xgrammar prints it as \\xfc, and reads what follows as more of the same number."""
    schema = {
        "type": "object",
        "properties": {word: {"const": word}},
        "required": [word],
        "additionalProperties": False,
    }
    text = None
    for seed in range(9):  # until one of them closes
        text = text or random_text(grammars, ResponseFormat.of_schema(schema, True), seed)
    assert text is not None
    assert json.loads(text) == {word: word}


REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "at # has 'not'"),
    ({"type": "object", "properties": {"a": {"contains": {}}}}, "at #/properties/a has 'contains'"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"allOf": [{}, {}]}, "'allOf' with several"),
    ({"type": "integer", "anyOf": [{"minimum": 3}]}, "'anyOf' beside 'type'"),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {}}}, "'\\$ref' beside 'minimum'"),
    ({"$ref": "http://example.com/schema"}, "the reference"),
    ({"$ref": "#/$defs/none"}, "cannot be followed: .*none"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "cases that may both hold"),
    ({"type": "string", "const": 1}, "has the value 1"),
    ({"type": "string", "enum": ["a", 1]}, "has the value 1"),
    ({"minimum": 3}, "'minimum' and not the type number"),
    ({"type": "string", "pattern": "a", "minLength": 2}, "'pattern' beside a length"),
    ({"type": "string", "pattern": "(?=a)b"}, "the pattern"),
    ({"type": "string", "pattern": 'say "x"'}, "the pattern"),
    ({"type": "number", "multipleOf": 3}, "has multipleOf=3"),
    ({"type": ["string", "number"], "multipleOf": 3}, "has multipleOf=3"),
    ({"type": "integer", "multipleOf": 3, "minimum": 2}, "'multipleOf' beside 'minimum'"),
    ({"type": "string", "format": "date", "maxLength": 3}, "'format' beside 'maxLength'"),
    ({"type": "string", "format": "uuid", "pattern": "^a$"}, "'format' beside 'pattern'"),
    ({"type": "string", "format": "json-pointer"}, "the format 'json-pointer'"),
    ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "minProperties=2"),
    ({"type": "object", "patternProperties": {"^a$": {}, "a": {}}}, "several patterns"),
    ({"type": "object", "patternProperties": {"^a$": {}}, "additionalProperties": True}, "beside 'additional"),
    ({"type": "object", "patternProperties": {"^a$": {}}, "properties": {"a": {}}}, "beside 'properties'"),
    ({"type": "object", "propertyNames": {"maxLength": 1}, "properties": {"ab": {}}}, "beside 'properties'"),
    ({"maxItems": 3}, "'maxItems' and not the type array"),
    ({"type": "object", "properties": {}, "required": ["b"]}, "requires 'b'"),
    ({"type": "strin"}, "cannot be followed: Unsupported type"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "cannot be followed: Invalid range"),
    ({"type": "integer", "minimum": 1, "maximum": -(10**400)}, "cannot be followed: "),
    ({"properties": 3}, "has properties=3"),
    ({"properties": 3, "required": ["a"]}, "has properties=3"),
    ({"oneOf": [{"properties": 3, "required": ["a"]}, {"required": 3}]}, "has properties=3"),
    ({"type": "object", "patternProperties": 3}, "has patternProperties=3"),
    ([], "is \\[\\]"),
    (False, "cannot be followed"),
    ({"a": float("nan")}, "not JSON"),
    ({"title": "\ud800"}, "not JSON"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=str)
def test_schemas_that_no_grammar_can_promise_are_refused(grammars: Grammars, schema: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grammars.of(ResponseFormat.of_schema(schema), "prompt 0")


PAIRED: dict[str, dict[str, Any]] = {
    "string": {"minLength": 2, "maxLength": 3, "pattern": "^[a-c]+$", "format": "date"},
    "integer": {"minimum": 2, "maximum": 30, "exclusiveMinimum": 3, "exclusiveMaximum": 20, "multipleOf": 3},
    "number": {"minimum": 2.5, "maximum": 30, "exclusiveMinimum": 3, "exclusiveMaximum": 20.5, "multipleOf": 3},
    "array": {"items": {"type": "integer"}, "prefixItems": [{"type": "null"}], "minItems": 1, "maxItems": 2},
    "object": {
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "patternProperties": {"^[ab]$": {"type": "string", "maxLength": 2}},
        "propertyNames": {"pattern": "^[b-d]$"},
        "minProperties": 2,
        "maxProperties": 2,
    },
}
PAIRS = [
    {"type": kind, **{word: words[word] for word in pair}}
    for kind, words in PAIRED.items()
    for pair in itertools.combinations_with_replacement(words, 2)
]


@pytest.mark.turns
@pytest.mark.parametrize("schema", PAIRS, ids=str)
def test_pairs_of_words_are_followed_or_refused(grammars: Grammars, schema: Any) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for seed in range(8):
        try:
            text = random_text(grammars, ResponseFormat.of_schema(schema), seed)
        except UsageError:
            return
        if text is not None:
            jsonschema.validate(json.loads(text), schema, VALIDATOR, format_checker=checker)


@pytest.mark.parametrize(
    "pattern",
    [
        "^a(b[0-9]+)?$",
        "^(b[0-9]*)?a$",
        "^a(b(c[0-9]+)?)?$",
        r"^[)?]x([)])?([.][0-9]{1,2})?$",
        "^(?:ab[0-9]+)?(c|[?]d+)?$",
    ],
)
def test_groups_that_may_be_left_out_are_whole_or_not_there(grammars: Grammars, pattern: str) -> None:
    for schema in (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"type": "string", "pattern": pattern}},
    ):
        form = ResponseFormat.of_schema(schema)
        for seed in range(12):
            text = random_text(grammars, form, seed)
            if text is not None:
                jsonschema.validate(json.loads(text), schema, VALIDATOR)


@pytest.mark.parametrize("form", ["date", "time", "date-time", "ipv4"])
def test_formats_are_what_python_reads(grammars: Grammars, form: str) -> None:
    """Judged by the standard library: jsonschema checks dates and times only with packages that it does not bring."""
    reads = {
        "date": datetime.date.fromisoformat,
        "time": datetime.time.fromisoformat,
        "date-time": datetime.datetime.fromisoformat,
        "ipv4": ipaddress.IPv4Address,
    }
    for seed in range(24):
        text = random_text(grammars, ResponseFormat.of_schema({"type": "string", "format": form}), seed)
        if text is not None:
            reads[form](json.loads(text))


def test_deep_schemas_are_refused() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    with pytest.raises(UsageError, match="levels deep"):
        ResponseFormat.of_schema(deep)
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(UsageError, match="not JSON"):
        ResponseFormat.of_schema(deep)


@pytest.mark.parametrize(
    "given",
    [
        "json_object",
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1.5}},
    ],
)
def test_other_forms_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="response_format"):
        ResponseFormat.read(given)


def test_cases_told_apart_by_a_tag_are_taken(grammars: Grammars) -> None:
    cases = [
        {"type": "object", "properties": {"kind": {"const": kind}, "x": {"type": part}}, "required": ["kind", "x"]}
        for kind, part in (("a", "integer"), ("b", "boolean"))
    ]
    form = ResponseFormat.of_schema({"oneOf": cases})
    texts = {random_text(grammars, form, seed) for seed in range(20)} - {None}
    assert {json.loads(text or "")["kind"] for text in texts} == {"a", "b"}


def test_grammars_are_compiled_once_per_schema(grammars: Grammars) -> None:
    schema = {"type": "integer", "minimum": 17}
    first = grammars.of(ResponseFormat.of_schema(schema), "a")
    assert grammars.of(ResponseFormat.of_schema(dict(schema)), "b") is first
    assert grammars.of(ResponseFormat.of_schema(schema, strict=False), "b") is not first


def test_a_likeliest_token_without_text_is_passed_over_in_silence(
    grammars: Grammars, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library wrote a line to stderr for each."""
    guide = guide_of(grammars, ResponseFormat.of_schema({"enum": ["ab"]}))
    assert not guide.tries(ord("\t"))
    assert [guide.tries(token) for token in (*b'"ab"', END)] == [True] * 5
    assert not guide.error
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", [3, ["string", 3], {}], ids=str)
def test_a_type_has_a_name(kind: Any) -> None:
    with pytest.raises(UsageError, match="needed a type's name or a list of them"):
        ResponseFormat.of_schema({"type": kind})
