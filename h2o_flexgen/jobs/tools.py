"""Tools that a chat may call: how a model's template writes calls, the form of an answer that makes some, and what is
read out of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from h2o_flexgen.config.checks import shown
from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import UsageError
from h2o_flexgen.jobs.requests import Refused

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_MOST_TOOLS = 128
_MOST_SPACES = 20
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_PROBE, _KEY, _VALUE, _RESULT, _ANSWER = "probe_tool", "probe_key", "probe_value", "probe_result", "probe_answer"
_OPEN_MARK = re.compile(r"[<\[][^>\]]*\Z")
_ID = re.compile(r',? *"id": *"0+1?"')
"""Of a call by its template: models leave it out."""
_JSON = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class CallStyle:
    """How a template writes calls: `begin`, a name, `middle`, arguments in JSON, then `between` and the next name, or
    `end`. `between` is None where it takes one call at a time; `special`: whether special tokens are among these;
    `as_text`: whether it takes arguments as JSON text; `ids`: the length of the ids that it takes."""

    begin: str
    middle: str
    end: str
    between: str | None = None
    special: bool = False
    as_text: bool = False
    ids: int = 24


HARMONY = CallStyle("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", None, True)
"""The style of gpt-oss; its template puts calls of the past into another order."""


def style_of(codec: TextCodec, model: str, eos: Sequence[int]) -> CallStyle:
    """How the template of a model writes calls, from what it makes of some. Refused where it knows none."""
    tokenizer = codec.transformed
    named = tokenizer.added_tokens_decoder
    special = {str(token) for token in named.values() if token.special}
    ends = [str(named[token]) for token in {*eos, *codec.turn_ends} if token in named]
    for as_text, ids in ((False, 24), (True, 24), (False, 9), (True, 9)):
        style = CallStyle("", "", "", as_text=as_text, ids=ids)
        one = _written(tokenizer, style, 1)
        found = None if one is None else _read_style(style, *one)
        if found is None:
            continue
        if "<|channel|>" in found.middle:
            return replace(HARMONY, as_text=as_text, ids=ids)
        end = min((found.end.partition(mark)[0] for mark in ends if mark), key=len, default=found.end).rstrip()
        found = replace(found, end=end, between=_between(tokenizer, found))
        parts = (found.begin, found.middle, found.end, found.between or "")
        return replace(found, special=any(mark in part for mark in special for part in parts))
    raise Refused(
        f"the chat template of {model} takes no tools, or writes calls in a way that is not known: a name and then its "
        "arguments in JSON",
        "unsupported_field",
        param="tools",
    )


def _call(style: CallStyle, number: int, text: str) -> dict[str, Any]:
    arguments: Any = {_KEY: text}
    function = {"name": _PROBE, "arguments": json.dumps(arguments) if style.as_text else arguments}
    return {"id": f"{number:0{style.ids}d}", "type": "function", "function": function}


def _written(tokenizer: Any, style: CallStyle, count: int) -> tuple[str, str] | None:
    """The text that a template writes before an answer, and the whole text with so many calls in the answer's place;
    None where it takes no tools, no calls or no results of these."""
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    function = {"name": _PROBE, "description": _PROBE, "parameters": parameters}
    given = {"tools": [{"type": "function", "function": function}], "tokenize": False}
    calls = [_call(style, number, f"{_VALUE}{number}") for number in range(count)]
    asked = [{"role": "user", "content": "x"}]
    called = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": _PROBE, "content": _RESULT} for call in calls]
    try:
        plain = str(tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": _ANSWER}], **given))
        text = str(tokenizer.apply_chat_template(called, **given))
        told = str(tokenizer.apply_chat_template([*called, *results], **given))
        offered = str(tokenizer.apply_chat_template(asked, add_generation_prompt=True, **given))
    except Exception:  # whatever a template raises for what it is not made for
        return None
    return (plain.partition(_ANSWER)[0], text) if _RESULT in told and _PROBE in offered else None


def _read_style(style: CallStyle, before: str, text: str) -> CallStyle | None:
    """From where an answer begins `before` its text, and the `text` of one call."""
    shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False)))
    rest = text[len(_OPEN_MARK.sub("", shared)) :]
    begin, found, behind = rest.partition(_PROBE)
    at = behind.rfind("{", 0, max(0, behind.find(f'"{_KEY}"')))
    if not found or at < 0 or not begin.strip():
        return None
    try:
        arguments, stop = _JSON.raw_decode(behind, at)
    except ValueError:
        return None
    if arguments != {_KEY: f"{_VALUE}0"}:
        return None
    return replace(style, begin=begin.lstrip(), middle=behind[:at], end=_ID.sub("", behind[stop:]))


def _between(tokenizer: Any, style: CallStyle) -> str | None:
    written = _written(tokenizer, style, 2)
    if written is None:
        return None
    _, found, rest = written[1].partition(f'{_VALUE}0"}}')
    text, another, _ = rest.partition(f"{_PROBE}{style.middle}")
    return _ID.sub("", text) if found and another else None


@dataclass(frozen=True)
class Tools:
    """The tools of one request: `given` as the template gets them, `schemas` of their arguments by name, `choice`
    none, auto, required, or the name of the one that is to be called; `several`: whether it may make several calls."""

    given: list[dict[str, Any]]
    schemas: Mapping[str, Any]
    choice: str
    named: bool = False
    several: bool = True

    @classmethod
    def read(cls, tools: Any, choice: Any, parallel: Any) -> Tools | None:
        """Of the fields of a body; None where there are no tools. Refused where they make no sense."""
        if parallel is not None and not isinstance(parallel, bool):
            raise Refused(
                f"parallel_tool_calls is {shown(parallel)}, needed true or false", param="parallel_tool_calls"
            )
        if tools is None or tools == []:
            if choice not in (None, "none", "auto"):
                raise Refused(f"tool_choice is {shown(choice)} without tools", param="tool_choice")
            return None
        if not isinstance(tools, list) or len(tools) > _MOST_TOOLS:
            raise Refused(f"tools is {shown(tools)}, needed a list of up to {_MOST_TOOLS}", param="tools")
        schemas = dict[str, Any]()
        for tool in tools:
            name, schema = _function(tool)
            if name in schemas:
                raise Refused(f"tools has two of the name {name!r}", param="tools")
            schemas[name] = schema
        made = cls(tools, schemas, "auto" if choice is None else choice, several=parallel is not False)
        if made.choice in ("none", "auto", "required") and isinstance(made.choice, str):
            return made
        function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
        called = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(called, str) or called not in schemas:
            needed = 'needed "none", "auto", "required" or {"type": "function", "function": {"name": one of tools}}'
            raise Refused(f"tool_choice is {shown(choice)}, {needed}", param="tool_choice")
        return replace(made, choice=called, named=True, several=False)

    def among(self, arguments: Any) -> Any:
        """Arguments of a template (`chat_template_kwargs`) with the tools."""
        if isinstance(arguments, Mapping) and "tools" in arguments:
            raise Refused("chat_template_kwargs has tools, and the body too", param="chat_template_kwargs")
        known = arguments is None or isinstance(arguments, Mapping)  # else refused where templates are rendered
        return {**(arguments or {}), "tools": self.given} if known else arguments

    def form(self, style: CallStyle) -> ResponseFormat | None:
        """The form of an answer in which every call fits its tool; None where none is to be made."""
        if self.choice == "none" and not self.named:
            return None
        between = style.between if self.several else None
        names = [self.choice] if self.named else list(self.schemas)
        calls = [_sequence(_text(name + style.middle), self._arguments(name)) for name in names]
        repeated = _sequence(_text(between or ""), {"type": "or", "elements": calls})
        more = [] if between is None else [{"type": "star", "content": repeated}]
        if self.named or self.choice == "required":
            made = _sequence(_text(style.begin), {"type": "or", "elements": calls}, *more, _text(style.end))
        else:
            tags = [
                {
                    "type": "tag",
                    "begin": style.begin + name + style.middle,
                    "content": _sequence(self._arguments(name), *more),
                    "end": style.end,
                }
                for name in names
            ]
            made = {"type": "triggered_tags", "triggers": [style.begin], "tags": tags}
            made |= {"stop_after_first": not self.several or not style.end}
        return ResponseFormat(tags=json.dumps({"type": "structural_tag", "format": made}, ensure_ascii=False))

    def _arguments(self, name: str) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": self.schemas[name], "max_whitespace_cnt": _MOST_SPACES}


def _function(tool: Any) -> tuple[str, Any]:
    """The name and the schema of a tool's arguments, as grammars take it."""
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        needed = 'needed {"type": "function", "function": {"name": ..., "parameters": {...}}}'
        raise Refused(f"tools holds {shown(tool)}, {needed}", param="tools")
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        form = ResponseFormat.of_schema(schema)
    except UsageError as error:
        raise Refused(f"the tool {name}: {error}", param="tools") from None
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise Refused(f"the tool {name} has parameters {shown(schema)}, needed the schema of an object", param="tools")
    return name, json.loads(form.schema or "{}")


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [part for part in parts if part.get("value") != ""]}


def with_texts(messages: list[dict[str, Any]], style: CallStyle) -> list[dict[str, Any]]:
    """Messages of a body as the template takes them: arguments of earlier calls as an object, or as text where it wants
    that. Refused for a call that is none."""
    made = []
    for message in messages:
        if message.get("tool_calls"):
            message = {**message, "content": message.get("content") or "", "tool_calls": _past(message, style)}
        made.append(message)
    return made


def _past(message: Mapping[str, Any], style: CallStyle) -> list[dict[str, Any]]:
    calls, found = list[dict[str, Any]](), message["tool_calls"]
    for call in found if isinstance(found, list) else [found]:
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        try:
            read = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        except (ValueError, RecursionError):
            read = None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not isinstance(read, dict):
            needed = 'needed {"id", "type": "function", "function": {"name", "arguments": a JSON object as text}}'
            raise Refused(f"messages holds the tool call {shown(call)}, {needed}", param="messages")
        given = json.dumps(read, ensure_ascii=False) if style.as_text else read
        calls.append({**call, "type": "function", "function": {**function, "arguments": given}})
    return calls


def calls_of(style: CallStyle, tools: Tools, text: str, name: str) -> tuple[str, list[dict[str, Any]]]:
    """An answer's text beside its calls, and these as a message has them. `name`: the source of their ids."""
    said, calls = calls_in(text, style, tools.schemas)
    return said, [
        {"id": _id(style, name, number), "type": "function", "function": {"name": called, "arguments": arguments}}
        for number, (called, arguments) in enumerate(calls)
    ]


def calls_in(text: str, style: CallStyle, names: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """An answer's text beside its calls, and the name and the arguments, as JSON text, of each whole call."""
    said, calls, at = list[str](), list[tuple[str, str]](), 0
    while (start := text.find(style.begin, at)) >= 0:
        found = list(_calls_at(text, start + len(style.begin), style, names))
        if not found:
            break
        said.append(text[at:start])
        calls += [call for call, _ in found]
        at = found[-1][1]
        at += len(style.end) if style.end and text.startswith(style.end, at) else 0
    return "".join([*said, text[at:]]).strip() if calls else text, calls


def _calls_at(text: str, at: int, style: CallStyle, names: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], int]]:
    """Calls that follow each other, each with where it stops."""
    while True:
        name, found, _ = text[at:].partition(style.middle)
        if not found or name not in names:
            return
        try:
            arguments, stop = _JSON.raw_decode(text, at + len(name) + len(style.middle))
        except (ValueError, RecursionError):
            return  # cut
        yield (name, json.dumps(arguments, ensure_ascii=False)), stop
        if style.between is None or not text.startswith(style.between, stop):
            return
        at = stop + len(style.between)


def _id(style: CallStyle, *parts: object) -> str:
    """The id of a call, the same in every run."""
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    return name[: style.ids] if style.ids < 24 else f"call_{name[: style.ids]}"
