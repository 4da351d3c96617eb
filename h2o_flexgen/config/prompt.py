"""Prompts, and the spans that they may mark: the system's words, instructions, context.

"The Pitfalls of KV Cache Compression", arXiv 2510.00231.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from h2o_flexgen.config.budget import Range
from h2o_flexgen.config.checks import known_keys, one_of, shown, token_ids, truth, whole
from h2o_flexgen.errors import UsageError

_UNITS = ("token", "char")


@dataclass(frozen=True)
class Span:
    """A part of a prompt, [start, end) in tokens or in characters, whose tokens are counted under `name`.

    `keep`: under `EvictionConfig(spans="whitelist")` none of them is evicted. UsageError for what makes no sense.
    """

    start: int
    end: int
    name: str
    keep: bool = False
    unit: Literal["token", "char"] = "token"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"the name of a span is {shown(self.name)}", "needed a text")
        start, end = whole(self.start, f"start of {self}", 0), whole(self.end, f"end of {self}", 0)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", end)
        if end <= start:
            raise UsageError(f"{self} is empty", "needed an end after its start")
        truth(self.keep, f"keep of {self}")
        one_of(self.unit, f"the unit of {self}", _UNITS)

    def __str__(self) -> str:
        return f"span {shown(self.name)} [{shown(self.start)}, {shown(self.end)})"


@dataclass(frozen=True)
class Prompt:
    """A text, or token ids, with marked spans, in any order. UsageError where these overlap, differ in their unit, or
    count the characters of token ids.

    `ends`: tokens that end what follows it besides the model's own, unless its settings name others.
    """

    content: str | Sequence[int]
    spans: Sequence[Span] = ()
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.spans, str | Mapping) or not isinstance(self.spans, Sequence):
            raise UsageError(f"spans are {shown(self.spans)}", "needed a list of them")
        object.__setattr__(self, "ends", token_ids(self.ends, "ends of a prompt"))
        spans = (each if isinstance(each, Span) else Span(**known_keys(each, Span)) for each in self.spans)
        object.__setattr__(self, "spans", tuple(sorted(spans, key=lambda span: span.start)))
        if len({span.unit for span in self.spans}) > 1:
            raise UsageError("spans of one prompt are in tokens and in characters", "needed one unit")
        if any(span.unit == "char" for span in self.spans) and not isinstance(self.content, str):
            raise UsageError("spans are in characters, and the prompt is token ids", 'needed "unit": "token"')
        for one, other in zip(self.spans, self.spans[1:], strict=False):
            if other.start < one.end:
                raise UsageError(f"{one} and {other} overlap", "needed spans that are apart")


class TokenSpan(NamedTuple):
    """A span of a prompt whose tokens are known: [start, stop)."""

    start: int
    stop: int
    name: str
    keep: bool


def token_spans(
    prompt: Prompt, length: int, offsets: Sequence[tuple[int, int]] | None, first: int = 0
) -> tuple[TokenSpan, ...]:
    """Where the spans of `prompt` are among its `length` tokens; UsageError for those that end beyond it.

    offsets: of the tokens from `first` on, the characters that they stand for, where spans are in characters. A token
    that two spans share goes to the first of them.
    """
    found, done = list[TokenSpan](), 0
    for span in prompt.spans:
        if span.unit == "token":
            start, stop, most, what = span.start, span.end, length, "tokens"
        else:
            # The tokens that stand for any of its characters.
            own = [i for i, (at, end) in enumerate(offsets or ()) if max(at, span.start) < min(end, span.end)]
            start, stop = (max(done, first + own[0]), first + own[-1] + 1) if own else (0, 0)
            most, what = len(prompt.content), "characters"
        if span.end > most:
            raise UsageError(f"{span} ends beyond the prompt, which has {most} {what}", f"needed an end up to {most}")
        if stop <= start:
            raise UsageError(f"{span} holds no token of its own", "needed a longer span")
        found.append(TokenSpan(start, stop, span.name, span.keep))
        done = stop
    return tuple(found)


def marked(spans: Sequence[TokenSpan], rule: str | None) -> tuple[Range, ...]:
    """Of these, the ranges that matter under `EvictionConfig.spans`."""
    return tuple((span.start, span.stop) for span in spans if rule == "fair" or (rule == "whitelist" and span.keep))
