"""Reasoning apart from the answer: where a model's text marks it, how long it may get, and what a template is told."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from h2o_flexgen.config.checks import shown
from h2o_flexgen.config.fold import Thinking
from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.sequence import RequestOutput
from h2o_flexgen.engine.requests.tokenizer import TextCodec, stop_in
from h2o_flexgen.jobs.requests import Refused
from h2o_flexgen.jobs.tools import TOOL_FIELDS, CallStyle, Tools, calls_of, style_of, with_texts

REASONING_FIELDS = ("reasoning_effort", "enable_thinking")
"""Fields of a body that are arguments of the template."""
LIMITS = ("max_reasoning_tokens", "thinking_token_budget")
"""Fields that bound the tokens of reasoning, ours and vLLM's."""
SPEECH_FIELDS = (*TOOL_FIELDS, "chat_template_kwargs", *REASONING_FIELDS, "include_reasoning", *LIMITS)
"""Fields of a chat's body that this is about."""
_TAIL = 32
_PLAIN = ("<think>", "</think>")
_TAGS = (_PLAIN, ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("<seed:think>", "</seed:think>"))
_HARMONY = ("<|channel|>analysis<|message|>", "<|end|>")
_NEXT, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)"
    r"(?=<\|end\|>|<\|return\|>|<\|start\|>|\Z)(?:<\|end\|>)?",
    re.DOTALL,
)
_HEADER = re.compile(r"(?:<\|(?:start|channel|constrain)\|>[^<]*)+\Z")
"""Of a part that was cut before it said anything."""


class Marks(NamedTuple):
    """`begin` and `end` of reasoning; `known`: its template or vocabulary has them, else they are only looked for;
    `special`: some are special tokens, which no text shows."""

    begin: str
    end: str
    known: bool
    special: bool

    @property
    def harmony(self) -> bool:
        return self.begin == _HARMONY[0]


class Parts(NamedTuple):
    """An answer in parts: `reasoning` is None where there is none; `tokens` are its, with the marks."""

    reasoning: str | None
    rest: str
    tokens: int


def template_of(codec: TextCodec | None) -> str:
    """The source of a model's chat template, empty where it has none."""
    template = getattr(None if codec is None else codec.transformed, "chat_template", None)
    return str((template.get("default") if isinstance(template, dict) else template) or "")


def marks_of(codec: TextCodec) -> Marks:
    """The marks of a model's reasoning, by its chat template or its vocabulary; <think> where neither has any."""
    template, tokenizer = template_of(codec), codec.transformed
    if "<|channel|>" in template and "analysis" in template:
        return Marks(*_HARMONY, True, True)
    added = {str(token): token.special for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    for begin, end in _TAGS:
        if begin in template or end in template or end in added:
            return Marks(begin, end, True, added.get(begin, False) or added.get(end, False))
    return Marks(*_PLAIN, False, False)


def with_reasoning(codec: TextCodec | None, model: str, arguments: Any, said: Mapping[str, Any]) -> Any:
    """Arguments of a template with those of `said`, the REASONING_FIELDS that a body has. Refused for one that the
    template does not know, and for one that is given twice."""
    template = template_of(codec)
    for name, value in said.items():
        if name == "reasoning_effort" and value == "none" and name not in template:
            name, value = "enable_thinking", False
        if not isinstance(value, bool if name == "enable_thinking" else str):
            needed = "true or false" if name == "enable_thinking" else "a text such as low, medium or high"
            raise Refused(f"{name} is {shown(value)}, needed {needed}", param=name)
        if name not in template:
            found = f"the chat template of {model} does not know {name}"
            raise Refused(found, "unsupported_field", param=name)
        if isinstance(arguments, Mapping) and name in arguments:
            raise Refused(f"{name} is given in the body and in chat_template_kwargs", param=name)
        if arguments is None or isinstance(arguments, Mapping):  # else refused where templates are rendered
            arguments = {**(arguments or {}), name: value}
    return arguments


def thinking_of(codec: TextCodec, marks: Marks, ids: Sequence[int], most: int | None, form: str) -> Thinking | None:
    """The engine's settings for the reasoning behind a prompt `ids`; None where it needs none.

    most   tokens of reasoning at most
    form   "" for free text, "json" or "calls": the form begins behind the reasoning, which is begun if need be
    """
    open_, closed = state_of(codec, marks, ids)
    if closed or (most is None and not (form and marks.known)):
        return None
    then = "\n\n"
    if marks.harmony:
        then = _NEXT if form == "calls" else _NEXT + _FINAL
    begin, end, after = (codec.encode_bare(text) for text in (marks.begin, marks.end, then))
    if not marks.harmony and codec.decode(after) != then:
        after = []  # no token is a line's end
    opens, joins = bool(form), bool(form) and marks.harmony
    return Thinking(tuple(begin), tuple(end), open_, opens and not open_, most, tuple(after), joins)


def state_of(codec: TextCodec, marks: Marks, ids: Sequence[int]) -> tuple[bool, bool]:
    """Whether a prompt ends within reasoning, and whether it ends behind some."""
    tail = spelt(codec, ids[-_TAIL:]).rstrip()
    return tail.endswith(marks.begin), tail.endswith(marks.end) and not marks.harmony


def spelt(codec: TextCodec, ids: Sequence[int]) -> str:
    """Text with the special tokens in it."""
    if codec.transformed is None:
        return codec.decode(list(ids))
    return str(codec.transformed.decode(list(ids), skip_special_tokens=False))


Spell = Callable[[TextCodec, Sequence[int]], str]
"""`spelt`, or what knows its text up to the last tokens already."""


def parts_of(codec: TextCodec, marks: Marks, text: str, ids: Sequence[int], inside: bool) -> Parts:
    """`text`, which the tokens `ids` read, special tokens spelt where `marks` are special."""
    if marks.harmony:
        return _channels(codec, text, ids)
    start = 0 if inside else len(text) - len(text.lstrip()) + len(marks.begin)
    if not inside and not text.lstrip().startswith(marks.begin):
        return Parts(None, text, 0)
    stop = text.find(marks.end, start)
    if stop < 0:
        return Parts(text[start:].strip(), "", len(ids))
    return Parts(
        text[start:stop].strip(),
        text[stop + len(marks.end) :].lstrip("\r\n"),
        _tokens(codec, marks, ids, stop + len(marks.end)),
    )


def _tokens(codec: TextCodec, marks: Marks, ids: Sequence[int], length: int) -> int:
    """How many tokens the first `length` characters of a text take."""

    def read(count: int) -> int:
        return len(spelt(codec, ids[:count]) if marks.special else codec.decode(list(ids[:count])))

    return bisect_left(range(len(ids)), length, key=read)


def _channels(codec: TextCodec, text: str, ids: Sequence[int]) -> Parts:
    """The parts of a text in harmony: messages of the channel of analysis, and the rest as it is written."""
    thoughts, rest, at, last = list[str](), list[str](), 0, 0
    for found in _CHANNEL.finditer(text):
        if found[1] == "analysis":
            thoughts.append(found[2])
            rest.append(text[at : found.start()])
            at = last = found.end()
    rest.append(text[at:])
    if not thoughts:
        return Parts(None, text, 0)
    return Parts("\n".join(thoughts), "".join(rest), _tokens(codec, Marks(*_HARMONY, True, True), ids, last))


def shown_text(codec: TextCodec, marks: Marks, text: str) -> str:
    """The text without special tokens, for readers: of harmony the messages of its channels, without calls."""
    if marks.harmony:
        said = [found[2] for found in _CHANNEL.finditer(text) if " to=" not in found[0]]
        text = "\n".join(said) if said else _HEADER.sub("", text)
    specials = map(str, getattr(codec.transformed, "all_special_tokens", ()))
    for special in specials:
        text = text.replace(special, "")
    return text


class Speech(NamedTuple):
    """A chat's messages, tools, limit of reasoning, and the arguments that tell the template of these."""

    messages: list[dict[str, Any]]
    arguments: Any
    tools: Tools | None
    most: int | None
    shown: bool
    form: ResponseFormat | None = None


class Speaker:
    """How one model calls tools and reasons: asked for in bodies, and read out of its answers."""

    def __init__(self, codec: TextCodec | None, model: str, eos: Sequence[int]) -> None:
        self._codec, self._model, self._eos = codec, model, eos

    @cached_property
    def _calls(self) -> CallStyle:
        if self._codec is None or not template_of(self._codec):
            raise Refused(f"{self._model} has no chat template, which tools need", "unsupported_field", param="tools")
        return style_of(self._codec, self._model, self._eos)

    @cached_property
    def _marks(self) -> Marks:
        return Marks(*_PLAIN, False, False) if self._codec is None else marks_of(self._codec)

    @property
    def marks(self) -> tuple[str, str]:
        """The texts that begin and end reasoning."""
        return self._marks.begin, self._marks.end

    @property
    def in_order(self) -> bool:
        """Whether parts of an answer can be told while it is written; channels are known once they are closed."""
        return not self._marks.harmony

    def asked(self, body: Mapping[str, Any], messages: list[dict[str, Any]]) -> Speech:
        """Of the body of a chat; Refused by name for a field that makes no sense or that is not the model's."""
        tools = Tools.read(*(body.get(name) for name in TOOL_FIELDS))
        spoken = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
        if tools is not None or spoken:  # calls, or results of some
            messages = with_texts(messages, self._calls)
        arguments = body.get("chat_template_kwargs")
        said = {name: body[name] for name in REASONING_FIELDS if body.get(name) is not None}
        arguments = with_reasoning(self._codec, self._model, arguments, said) if said else arguments
        if tools is not None:
            arguments = tools.among(arguments)
        limits = [(name, body[name]) for name in LIMITS if body.get(name) is not None]
        for name, value in limits:
            if len(limits) > 1 or type(value) is not int or value < 0:
                raise Refused(f"{name} is {shown(value)}, needed one whole number from 0", param=name)
            if not self._marks.known:
                found = f"{name} is given, and the chat template of {self._model} marks no reasoning"
                raise Refused(found, "unsupported_field", param=name)
        told = body.get("include_reasoning")
        if told is not None and not isinstance(told, bool):
            raise Refused(f"include_reasoning is {shown(told)}, needed true or false", param="include_reasoning")
        form = None if tools is None else tools.form(self._calls)
        return Speech(messages, arguments, tools, limits[0][1] if limits else None, told is not False, form)

    def thinking(self, speech: Speech, ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """The settings of a chat, whose prompt is `ids`, with what the engine has to know of reasoning."""
        if self._codec is None or (speech.most is None and params.response_format is None):
            return params
        form = "" if params.response_format is None else "json" if speech.form is None else "calls"
        thinking = thinking_of(self._codec, self._marks, ids, speech.most, form)
        return params if thinking is None else replace(params, thinking=thinking)

    def message(
        self, speech: Speech, output: RequestOutput, params: SamplingParams, name: str, spell: Spell = spelt
    ) -> dict[str, Any]:
        """The message of an answer: text, reasoning, calls. `name`: the text that ids of calls are made from."""
        said: dict[str, Any] = {"role": "assistant", "content": output.text or ""}
        if self._codec is None:
            return said
        calling = speech.form is not None
        special = self._marks.special or (calling and self._calls.special)
        parts = self._parts(output, special, spell, counts=False)
        text, calls = parts.rest, list[dict[str, Any]]()
        if calling and speech.tools is not None:
            text, calls = calls_of(self._calls, speech.tools, text, name)
        if parts.reasoning is None and not calls and not self._marks.harmony:
            return said
        if special:
            text = shown_text(self._codec, self._marks, text)
            cut = stop_in(text, self._codec.decode, output.prompt_ids, output.token_ids, params)
            text = text if cut is None else text[: cut[0]]
        said["content"] = (text.strip() if calls else text) or None
        if parts.reasoning is not None and speech.shown:
            said |= {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning}
        return said | ({"tool_calls": calls} if calls else {})

    def reasoning_tokens(self, output: RequestOutput) -> int:
        """How many tokens of an answer are reasoning, with what marks it."""
        return 0 if self._codec is None else self._parts(output, self._marks.special, spelt).tokens

    def _parts(self, output: RequestOutput, special: bool, spell: Spell, *, counts: bool = True) -> Parts:
        assert self._codec is not None, "only texts have parts"
        ids = output.token_ids
        if special:
            ids = ids[:-1] if ids and ids[-1] in {*self._eos, *self._codec.turn_ends} else ids
        text = spell(self._codec, ids) if special else output.text or ""
        inside, _ = state_of(self._codec, self._marks, output.prompt_ids)
        return parts_of(self._codec, self._marks, text, ids if counts else (), inside)
