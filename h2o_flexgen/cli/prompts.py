"""Where `run` gets its prompts: flags, files, the demo's own, or random tokens for measuring."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from h2o_flexgen.config.checks import is_text, json_fault, no_number
from h2o_flexgen.config.fold import Fold
from h2o_flexgen.config.prompt import Prompt, Span
from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.engine.requests.chat import Message, checked_arguments, checked_messages, with_system
from h2o_flexgen.errors import UsageError


class Messages(list[Message]):
    """A conversation, as opposed to a list of token ids; with spans, which count in what a template makes of it, and
    arguments of that template."""

    spans: tuple[Span, ...] = ()
    arguments: Mapping[str, Any] = MappingProxyType({})


PromptLike = str | list[int] | Messages | Prompt
"""Text or token ids to be completed, either with spans, or a conversation to be answered."""


class GivenPrompt(NamedTuple):
    """A prompt with the settings of its line alone, by their names in SamplingParams; or why there is none."""

    prompt: PromptLike | UsageError
    settings: Mapping[str, Any] = MappingProxyType({})


_WANTED = 'needed {"prompt": "..."}, "...", {"prompt": [token ids]} or {"messages": [{"role": ..., "content": ...}]}'
_TEXT = "needed a text file or .jsonl, in UTF-8"
_SHOWN = 5


def read_prompts(path: Path, *, skip: bool = False) -> list[GivenPrompt]:
    """Prompts in a text file (one per line) or a .jsonl file ({"prompt": ...} per line); "-" is stdin.

    Blank lines and a byte order mark are passed over; "prompt" may be text or a list of token ids, and "messages" in
    its place holds a conversation; "response_format" and "fold" are of their line alone. UsageError names the file and
    the lines that cannot be used, or with `skip` stands in their places. Stdin is JSONL where its first line is a JSON
    object.
    """
    name = "stdin" if str(path) == "-" else str(path)
    if name == "stdin" and sys.stdin is None:
        raise UsageError("--prompts -: stdin is closed", "needed prompts on stdin, or a file")
    try:
        data = sys.stdin.buffer.read() if name == "stdin" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"--prompts {name}: {error.strerror}", "needed a readable file") from None
    # Not splitlines(): a form feed or U+2028 belongs to the prompt in which it stands.
    lines = [line.removesuffix("\r") for line in _text_of(data, name, skip).split("\n")]
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json") or (name == "stdin" and lines[0].lstrip().startswith("{")):
        return _parsed(lines, name, _json_prompt, skip)
    return _parsed(lines, name, GivenPrompt, skip)


def checked_text(text: str, where: str) -> str:
    """`text` if it can be encoded; UsageError for a command line that is not UTF-8, and half surrogate pairs."""
    if not is_text(text):
        raise UsageError(f"{where} is not valid Unicode text: {text!r}", "needed UTF-8")
    return text


def stop_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts typed for --stop. UsageError for an empty one, which every text contains."""
    stops = tuple(checked_text(text, "--stop") for text in texts)
    if "" in stops:
        raise UsageError("--stop is empty", "needed one character or more", "leave it out, or name what ends an answer")
    return stops


def as_conversations(
    prompts: list[PromptLike | UsageError], system: str | None, *, skip: bool = False
) -> list[PromptLike | UsageError]:
    """`prompts` with every text as what a user says, after the message `system` where there is none yet.

    UsageError for token ids, which no template can be put around; with `skip` it stands in their place.
    """
    talks: list[PromptLike | UsageError] = []
    for index, prompt in enumerate(prompts):
        try:
            talks.append(prompt if isinstance(prompt, UsageError) else _conversation(prompt, system, f"prompt {index}"))
        except UsageError as error:
            if not skip:
                raise
            talks.append(error)
    return talks


def _conversation(prompt: PromptLike, system: str | None, where: str) -> Messages:
    if not isinstance(prompt, str | Messages):
        what = "has spans" if isinstance(prompt, Prompt) else "is token ids"
        raise UsageError(f"{where} {what}, and --chat is given", "needed text or messages")
    messages = checked_messages(prompt, where)
    talk = Messages(messages if system is None else with_system(messages, system))
    if isinstance(prompt, Messages):
        talk.spans, talk.arguments = prompt.spans, prompt.arguments
    return talk


def demo_prompts() -> list[str]:
    text = resources.files("h2o_flexgen").joinpath("data/demo/prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids: work of a known size, for measuring."""
    source = random.Random(seed)
    first = min(4, vocab_size - 1)  # the first ids are special tokens in most vocabularies
    return [[source.randrange(first, vocab_size) for _ in range(length)] for _ in range(count)]


def _text_of(data: bytes, name: str, skip: bool) -> str:
    """With `skip`, bytes that are no text are left for the lines that they are in."""
    if skip:
        return data.decode("utf-8-sig", "surrogateescape")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: byte {error.start}", _TEXT) from None
    if "\0" in text:
        raise UsageError(f"{name} is not text: it holds a NUL byte", _TEXT)
    return text


def _parsed(lines: list[str], name: str, parse: Callable[[str], GivenPrompt], skip: bool) -> list[GivenPrompt]:
    """`parse` of every line that is not blank; all complaints together, or with `skip` in the places of their lines."""
    prompts: list[GivenPrompt] = []
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.strip(" \t\v\f\r"):  # blank as bytes are, like a job's lines: U+2028 alone is a prompt
            try:
                prompts.append(parse(_line(line)))
            except UsageError as error:
                if skip:
                    prompts.append(GivenPrompt(UsageError(f"line {number} {error.found}", error.needed or _WANTED)))
                faults.append(f"line {number} {error.found}")
    if faults and not skip:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise UsageError(f"{name}: " + "; ".join(faults[:_SHOWN]) + more, _WANTED)
    return prompts


def _line(line: str) -> str:
    if not is_text(line):
        raise UsageError("is not UTF-8 text", _TEXT)
    if "\0" in line:
        raise UsageError("is not text: it holds a NUL byte", _TEXT)
    return line


def _json_prompt(line: str) -> GivenPrompt:
    try:
        entry = json.loads(line, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not JSON ({json_fault(error)})") from None
    if not isinstance(entry, dict):
        entry = {"prompt": entry}
    settings: dict[str, Any] = {}
    try:
        settings.update({"fold": fold} if (fold := Fold.read(entry.get("fold"))) is not None else {})
    except UsageError as error:
        raise UsageError(f"has {error.found}") from None
    if entry.get("response_format") is not None:
        try:
            settings["response_format"] = ResponseFormat.read(entry["response_format"])
        except UsageError as error:
            raise UsageError(f"has a response_format that cannot be served: {error.found}") from None
    return GivenPrompt(_messages(entry) if "messages" in entry else _completion(entry), settings)


def _completion(entry: dict[str, Any]) -> PromptLike:
    prompt: Any = entry.get("prompt")
    ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    if not ids and not isinstance(prompt, str):
        raise UsageError("has no prompt that is text or token ids")
    found = prompt if ids else _whole_text(prompt)
    spans = entry.get("spans")
    return _spans(found, spans) if spans else found


def _spans(prompt: str | list[int], spans: Any) -> Prompt:
    try:
        return Prompt(prompt, spans)
    except UsageError as error:
        raise UsageError(f"has {error.found}") from None


def _messages(entry: dict[str, Any]) -> Messages:
    if "prompt" in entry:
        raise UsageError("has both a prompt and messages")
    if not isinstance(entry["messages"], list):
        raise UsageError("has messages that are not a list")
    if not entry["messages"]:
        raise UsageError("has no messages")
    messages = checked_messages(entry["messages"], "it")
    _whole_text(json.dumps(messages, ensure_ascii=False))
    talk = Messages(messages)
    talk.spans = tuple(_spans("", entry["spans"]).spans) if entry.get("spans") else ()
    try:
        talk.arguments = checked_arguments(entry.get("chat_template_kwargs"), "it")
    except UsageError as error:
        raise UsageError(f"has {error.found}") from None
    return talk


def _whole_text(text: str) -> str:
    if not is_text(text):
        raise UsageError("holds half a surrogate pair, which is not text")
    return text
