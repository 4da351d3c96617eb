"""The form that a sequence's text must have: any text, a JSON object, JSON that a schema describes, or calls of tools.

The form is OpenAI's `response_format`. A schema is followed exactly or refused: keywords beyond the grammar library
(xgrammar 0.2 takes `not`, `contains` and others and ignores them) are refused by name here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from h2o_flexgen.config.checks import shown
from h2o_flexgen.errors import UsageError

_WANTED = 'needed {"type": "json_schema", "json_schema": {"schema": {...}}}, "json_object" or "text" as the type'
_MOST_LEVELS = 64
_MOST_CHARACTERS = 1 << 20

_REFUSED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedProperties", "unevaluatedItems", "$anchor", "$dynamicRef", "$dynamicAnchor"),
    *("$recursiveRef", "$recursiveAnchor", "additionalItems"),
)
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$schema", "$id", "$defs", "definitions", "discriminator"}
)
_TYPED = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "object": ("minProperties", "maxProperties", "propertyNames"),
    "array": ("minItems", "maxItems"),
}
_ONE_SCHEMA = ("additionalProperties", "items", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_PATTERN_BEYOND = re.compile(r"""\(\?(?!:)|\\[bBpPkcxunrtfv1-9\\]|["\x00-\x1f]""")
"""Of regular expressions what is not regular, not understood, or what a JSON string holds in escapes only."""

_DAY = r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d([.]\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]\d|\d)"
_FORMS = {
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
}
"""Formats by patterns of our own: the library's let the 30th of February and bytes with leading zeros pass. Leap days
are left out."""
_KNOWN_FORMATS = frozenset({*_FORMS, "uuid", "email", "ipv6", "hostname", "uri", "uri-reference", "duration"})


@dataclass(frozen=True)
class ResponseFormat:
    """JSON in one of two kinds: `schema` is a JSON schema as JSON text, None means any JSON object.

    strict   objects and arrays hold what the schema names and nothing else, unless `additionalProperties` says so
    tags     instead of a schema: text with JSON between marks, as xgrammar describes it (a structural tag, JSON text),
             in which special tokens may be spelt
    """

    schema: str | None = None
    strict: bool = True
    tags: str | None = None

    @classmethod
    def read(cls, given: Any) -> ResponseFormat | None:
        """Of OpenAI's `response_format`, None where that asks for plain text. UsageError for anything else, and for a
        schema that cannot be followed exactly."""
        if given is None or isinstance(given, cls):
            return given
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls()
        if kind != "json_schema":
            raise UsageError(f"response_format is {shown(given)}", _WANTED)
        said = given.get("json_schema")
        if not isinstance(said, Mapping) or "schema" not in said:
            raise UsageError(f"response_format has json_schema {shown(said)}", _WANTED)
        strict = said.get("strict")
        if strict not in (True, False, None):
            raise UsageError(f"strict is {shown(strict)} in response_format", "needed true or false")
        return cls.of_schema(said["schema"], strict is not False)

    @classmethod
    def of_schema(cls, schema: Any, strict: bool = True) -> ResponseFormat:
        """Of a JSON schema. UsageError for one that is damaged or cannot be followed exactly."""
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the schema is not JSON: {error}", "needed a JSON schema") from None
        if len(text) > _MOST_CHARACTERS:
            raise UsageError(f"the schema has {len(text)} characters", f"needed at most {_MOST_CHARACTERS}")
        # Read again, so that the schema that is checked is the one that is followed.
        read = json.loads(text)
        _check(read, "#", 0)
        return cls(json.dumps(read, ensure_ascii=False), strict)


def _check(schema: Any, where: str, level: int) -> None:
    """UsageError where `schema`, which stands at `where`, asks for more than a grammar can promise."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _fault(where, f"is {shown(schema)}", "needed an object, true or false")
    if level > _MOST_LEVELS:
        raise _fault(where, f"is more than {_MOST_LEVELS} levels deep")
    for word in _REFUSED:
        if word in schema:
            raise _fault(where, f"has {word!r}", f"needed a schema without it{_INSTEAD.get(word, '')}")
    if schema.get("uniqueItems"):
        raise _fault(where, "has 'uniqueItems'", "needed a schema without it")
    if level and "$id" in schema:
        raise _fault(where, "has an '$id' of its own", "needed references from the root")
    parts = list(_parts(schema, where))
    for check in (_check_alone, _check_types, _check_pattern, _check_required, _check_together):
        check(schema, where)
    for name, part in parts:
        _check(part, f"{where}/{name}", level + 1)
    _check_one_of(schema, where)
    _spell(schema)


def _spell(schema: dict[str, Any]) -> None:
    """Writes a schema that was checked so that the library follows it."""
    if schema.get("format") in _FORMS:
        schema["pattern"] = _FORMS[schema.pop("format")]
    if "pattern" in schema:
        schema["pattern"] = _without_optional_groups(schema["pattern"])
    if "patternProperties" in schema:
        named = schema["patternProperties"]
        schema["patternProperties"] = {_without_optional_groups(name): part for name, part in named.items()}


def _without_optional_groups(pattern: str) -> str:
    """`(...)?` as `(...){0,1}`, which means the same: of `(ab+)?` in a schema xgrammar 0.2.8 lets `b` pass as well."""
    spelled, within_class = [], False
    tokens = re.findall(r"\\.|.", pattern, re.DOTALL)
    for before, token in zip(["", *tokens], tokens, strict=False):
        within_class = token == "[" or (within_class and token != "]")
        spelled.append("{0,1}" if token == "?" and before == ")" and not within_class else token)
    return "".join(spelled)


_INSTEAD = {"if": ": anyOf with the cases", "not": ": what is wanted, in the place of what is not"}


def _parts(schema: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for word in _ONE_SCHEMA:
        if word in schema:
            yield word, schema[word]
    for word in _LISTS:
        parts = schema.get(word, [])
        if not isinstance(parts, list):
            raise _fault(where, f"has {word}={shown(parts)}", "needed a list of schemas")
        yield from ((f"{word}/{place}", part) for place, part in enumerate(parts))
    for word in _MAPS:
        parts = schema.get(word, {})
        if not isinstance(parts, dict):
            raise _fault(where, f"has {word}={shown(parts)}", "needed an object of schemas")
        yield from ((f"{word}/{name}", part) for name, part in parts.items())


def _check_alone(schema: dict[str, Any], where: str) -> None:
    """Words beside which others would have no effect."""
    for word in ("$ref", "anyOf", "oneOf", "allOf", "const", "enum"):
        beside = schema.keys() - _ANNOTATIONS - {word}
        known = {name for name in beside if name in _ASSERTIONS and not (word in ("const", "enum") and name == "type")}
        if word in schema and known:
            raise _fault(where, f"has {word!r} beside {sorted(known)[0]!r}", "needed one of the two")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _fault(where, f"has the reference {shown(reference)}", 'needed one into the schema itself: "#/..."')
    if len(schema.get("allOf") or ()) > 1:
        raise _fault(where, "has 'allOf' with several schemas", "needed one schema that says it all")


def _check_types(schema: dict[str, Any], where: str) -> None:
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise _fault(where, f"has the type {shown(types)}", "needed a type's name or a list of them")
    for kind, words in _TYPED.items():
        for word in words:
            if word in schema and not set(types) & ({"number", "integer"} if kind == "number" else {kind}):
                raise _fault(where, f"has {word!r} and not the type {kind}", f'needed "type": "{kind}" beside it')
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    for value in values if types else ():
        if not set(_types_of(value)) & set(types):
            raise _fault(where, f"has the value {shown(value)}, which is not of its type {types}")


def _check_pattern(schema: dict[str, Any], where: str) -> None:
    patterns = [schema["pattern"]] if "pattern" in schema else []
    named = schema.get("patternProperties")
    patterns += list(named) if isinstance(named, dict) else []
    for pattern in patterns:
        if not isinstance(pattern, str) or _PATTERN_BEYOND.search(pattern):
            needed = "needed one without look-around, references, quotes, backslashes and control characters"
            raise _fault(where, f"has the pattern {shown(pattern)}", needed)
    if "pattern" in schema and {"minLength", "maxLength"} & schema.keys():
        raise _fault(where, "has 'pattern' beside a length", "needed the length in the pattern: {3,8}")


def _check_required(schema: dict[str, Any], where: str) -> None:
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _fault(where, f"has required={shown(required)}", "needed a list of names")
    named = schema.get("properties", {})
    if lacking := [name for name in required if name not in named]:
        raise _fault(where, f"requires {lacking[0]!r} and does not describe it", "needed it among the properties")


def _check_together(schema: dict[str, Any], where: str) -> None:
    """Words that the library takes and ignores, some of them beside others only."""
    for word, others in _ALONE.items():
        if word in schema and (beside := [other for other in others if other in schema]):
            raise _fault(where, f"has {word!r} beside {beside[0]!r}", "needed one of the two")
    if "format" in schema and (not isinstance(schema["format"], str) or schema["format"] not in _KNOWN_FORMATS):
        raise _fault(where, f"has the format {shown(schema['format'])}", f"needed one of {sorted(_KNOWN_FORMATS)}")
    if "multipleOf" in schema:
        factor = schema["multipleOf"]
        if "number" in schema["type"] or type(factor) is not int or factor < 1:
            raise _fault(where, f"has multipleOf={shown(factor)}", "needed a whole number, and the type integer")
    if "minProperties" in schema:
        least = schema["minProperties"]
        if not isinstance(least, int) or least > len(set(schema.get("required", ()))):
            # Names may come twice in a text.
            raise _fault(where, f"has minProperties={shown(least)}", "needed as many names in 'required'")
    if len(schema.get("patternProperties") or ()) > 1:
        raise _fault(where, "has 'patternProperties' with several patterns", "needed one pattern")
    if schema.get("patternProperties") and schema.get("additionalProperties", False) is not False:
        raise _fault(where, "has 'patternProperties' beside 'additionalProperties'", "needed that to be false")


_ALONE = {
    "format": ("pattern", "minLength", "maxLength"),
    "multipleOf": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "patternProperties": ("properties", "propertyNames"),
    "propertyNames": ("properties", "additionalProperties"),
}


def _check_one_of(schema: dict[str, Any], where: str) -> None:
    cases = schema.get("oneOf")
    cases = cases if isinstance(cases, list) else []
    for place, case in enumerate(cases):
        if not all(_exclude_each_other(case, other) for other in cases[:place]):
            raise _fault(where, "has 'oneOf' with cases that may both hold", "needed anyOf, or a const in each")


def _exclude_each_other(one: Any, other: Any) -> bool:
    """Whether no value suits both, as far as their types, values and required properties show."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if _differ(_values(one), _values(other)) or _differ(_kinds(one), _kinds(other)):
        return True
    tags = set(one.get("required") or ()) & set(other.get("required") or ())
    mine, others = one.get("properties") or {}, other.get("properties") or {}
    return any(_exclude_each_other(mine[tag], others[tag]) for tag in tags & mine.keys() & others.keys())


def _differ(some: set[str] | None, others: set[str] | None) -> bool:
    return some is not None and others is not None and not some & others


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values that `schema` names, as text; None where it names none."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in named} if isinstance(named, list) else None


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    """The types that a value may have, None where any."""
    if (named := schema.get("type")) is None:
        values = _values(schema)
        return None if values is None else {_types_of(json.loads(value))[-1] for value in values}
    return {"number" if kind == "integer" else kind for kind in ([named] if isinstance(named, str) else named)}


def _types_of(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return ("integer", "number")
    return (_TYPE_NAMES[type(value)],)


_TYPE_NAMES = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
_ASSERTIONS = frozenset(
    {"type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems"}
    | {*_ONE_SCHEMA, *_LISTS, "properties", "patternProperties", *_TYPED["number"], *_TYPED["string"]}
)


def _fault(where: str, found: str, needed: str = "") -> UsageError:
    return UsageError(f"the schema at {where} {found}", needed)
