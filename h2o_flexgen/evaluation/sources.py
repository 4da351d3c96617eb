"""Questions and text from files: the user's, or those that ship with the demo model. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeVar

from h2o_flexgen.errors import UsageError

T = TypeVar("T")

RECALL_FILE, TEXT_FILE = "recall_prompts.jsonl", "heldout.txt"


class Question(NamedTuple):
    """A prompt that ends where the answer must come, and that answer.

    kind: any name that questions are counted under. question_at: the passage without its question is
    `prompt[:question_at]`; None where that is not known.
    """

    prompt: str
    answer: str
    kind: str = ""
    question_at: int | None = None


def spread(items: Sequence[T], count: int | None) -> list[T]:
    """`count` of `items` (None: all), evenly from beginning to end, in their order."""
    wanted = len(items) if count is None else min(count, len(items))
    return [items[(2 * place + 1) * len(items) // (2 * wanted)] for place in range(wanted)]


def read_cases(file: str | None) -> list[Question]:
    """The questions in a .jsonl file, the demo's for None; UsageError naming the line where one cannot be used."""
    # Not splitlines(): a form feed or U+2028 belongs to the prompt in which it stands.
    name, lines = file or RECALL_FILE, _read(file, RECALL_FILE, "--recall").split("\n")
    cases = [_case(line, f"{name} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not cases:
        raise UsageError(f"{name} holds no questions", 'needed {"prompt": "...", "answer": "..."} per line')
    return cases


def read_text(file: str | None) -> str:
    """The text to score, the demo's held-out text for None."""
    return _read(file, TEXT_FILE, "--text")


def _read(file: str | None, shipped: str, flag: str) -> str:
    try:
        if file is None:
            return resources.files("h2o_flexgen").joinpath("data/demo", shipped).read_text(encoding="utf-8")
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: byte {error.start}", "needed a text file") from None
    except OSError as error:
        raise UsageError(f"{flag} {file or shipped}: {error.strerror}", "needed a readable file") from None


def _case(line: str, where: str) -> Question:
    needed = 'needed {"prompt": "...", "answer": "..."}'
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", needed) from None
    prompt, answer = (entry.get("prompt"), entry.get("answer")) if isinstance(entry, dict) else (None, None)
    if not (isinstance(prompt, str) and isinstance(answer, str) and prompt.strip() and answer.strip()):
        raise UsageError(f"{where} lacks a prompt or an answer", needed)
    kind, question_at = entry.get("kind", ""), entry.get("question_at")
    inside = question_at is None or (type(question_at) is int and 0 < question_at < len(prompt))
    if not (isinstance(kind, str) and inside):
        raise UsageError(
            f"{where} has kind {kind!r} and question_at {question_at!r}", "needed text, and a place in the prompt"
        )
    return Question(prompt, answer, kind, question_at)
