"""The tokens that one KV cache may hold, the spans that a prompt may mark, and what these make of a budget.

Spans are the system's words, instructions, context ("The Pitfalls of KV Cache Compression", arXiv 2510.00231).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from h2o_flexgen.config.checks import known_keys, truth, whole
from h2o_flexgen.errors import UsageError

Range = tuple[int, int]
"""Positions of a prompt, from the first to before the second."""


@dataclass(frozen=True)
class Budget:
    """Tokens that one KV cache may hold: total = sinks + heavy + recent, unless `prompt` says otherwise.

    `full`: total is the length, nothing goes. Of a budget that is `fair` to spans, heavy tokens are all that is kept of
    the prompt, and the recent ones are the answer's.
    """

    total: int
    heavy: int
    recent: int
    sinks: int
    full: bool
    burst: int = 1
    """Tokens that go at once, when there is one more than the total."""
    prompt: int | None = None
    """Where no more than this may be kept of the prompt, and what follows is added to it, up to the total."""
    spans: tuple[Range, ...] = ()
    """Of the prompt, in order: what is kept of it there never goes, and is all of it unless the budget is `fair`."""
    inside: Budget | None = None
    """What would be kept without spans, which are all of the prompt then: each has its share of this, and the policy
    chooses in it as if it were the prompt."""

    @property
    def after_prompt(self) -> int:
        """Tokens that may be held once the prompt is in: sinks + heavy + recent."""
        return self.total if self.prompt is None else self.prompt

    @property
    def fair(self) -> bool:
        """Whether spans have shares."""
        return self.inside is not None

    @property
    def latest(self) -> int:
        """Tokens at the end of a prompt that stay whatever they score."""
        return 0 if self.fair else self.recent

    @property
    def scored(self) -> bool:
        """Whether what stays is chosen by score; else tokens go in the order in which they came."""
        return bool(self.heavy) and not self.full

    def within(self, window: int | None) -> Budget:
        """The budget in a layer whose queries see the last `window` tokens, themselves included; None: all of them.

        A budget that holds all that the next query can see, window - 1 tokens, is exactly that: no choice is left, and
        nothing older is kept. A smaller one, or a sequence that never leaves the window, stays as it is.
        """
        if window is None or self.total < window - 1 or (self.full and self.total == window - 1):
            return self
        return Budget(total=window - 1, heavy=0, recent=window - 1, sinks=0, full=False)


def whitelisted(budget: Budget, spans: Sequence[Range], seen: int = 0) -> Budget:
    """`budget`, of which `spans` take their part before anything else; UsageError where it has no room for them.

    Where all the rest of the budget is recent, these are fewer. seen: the first position that the answer's queries see.
    """
    wanted = sum(max(0, stop - max(start, budget.sinks, seen)) for start, stop in spans)
    heavy, recent = (budget.heavy, budget.recent) if budget.heavy else (wanted, budget.recent - wanted)
    if wanted > heavy or (budget.recent and recent < 1):
        most, beside = (budget.heavy, f"{budget.recent} recent tokens") if budget.heavy else (budget.recent - 1, "1")
        sinks = f" and {budget.sinks} sinks" if budget.sinks else ""
        raise UsageError(
            f"spans to keep have {wanted} tokens, and a budget of {budget.after_prompt} leaves {most} beside "
            f"{beside}{sinks}",
            f"needed at most {most}",
            "raise --hh-ratio or --kv-budget, lower --recent, or keep less",
        )
    if not wanted:
        return budget
    burst = max(1, min(budget.burst, budget.total + 1 - budget.sinks - recent - wanted))
    return replace(budget, heavy=heavy, recent=recent, spans=tuple(spans), burst=burst)


def fair(
    budget: Budget, spans: Sequence[Range], prompt: int, new: int, burst: Callable[[int], int] | None = None
) -> Budget:
    """`budget` shared out by length: `spans`, what lies between them, and the answer of at most `new` tokens.

    A policy that prunes nothing but the prompt has its answer's room already. burst: as in `Split`.
    """
    ranges = parts_between(spans, prompt)
    lengths = [stop - start for start, stop in ranges]
    if budget.prompt is not None and budget.total == budget.prompt + new and budget.burst == 1:
        shares(budget.prompt, lengths)
        return Budget(budget.total, budget.prompt, 0, 0, False, prompt=budget.prompt, spans=ranges, inside=budget)
    answer = shares(budget.total, [*lengths, max(1, new)])[-1]
    recent = min(answer, max(min(1, budget.recent), budget.recent * answer // budget.total))
    going = 1 if burst is None else max(1, min(burst(answer), answer - recent))
    kept = budget.total - answer
    return Budget(budget.total, kept, recent, 0, False, going, prompt=kept, spans=ranges, inside=budget)


def parts_between(spans: Sequence[Range], length: int) -> tuple[Range, ...]:
    """`spans`, which are in order and apart, and what lies between them: together the first `length` positions."""
    ranges, done = list[Range](), 0
    for start, stop in spans:
        ranges += [(done, start)] * (start > done) + [(start, stop)]
        done = stop
    return (*ranges, *([(done, length)] if done < length else []))


def shares(total: int, lengths: Sequence[int]) -> list[int]:
    """`total` tokens by length, each share rounded down or up, and at least 1 of what is not empty.

    Of what rounding down leaves one each goes to the largest remainders, of equal ones to the first. UsageError where
    there are more parts than tokens.
    """
    length_of_all, some = sum(lengths), sum(length > 0 for length in lengths)
    if total < some:
        raise UsageError(
            f"a budget of {total} tokens is to be shared by {some} spans and what is beside them",
            f"needed at least {some}",
            "raise --hh-ratio or --kv-budget, or mark fewer spans",
        )
    found = [max(min(1, length), total * length // length_of_all) for length in lengths]
    rounded = (i for i, length in enumerate(lengths) if total * length >= length_of_all)
    rests = sorted(rounded, key=lambda i: (-(total * lengths[i] % length_of_all), i))
    for i in rests[: max(0, total - sum(found))]:
        found[i] += 1
    while sum(found) > total:  # what the smallest have got beyond their share comes from the largest
        found[max(range(len(found)), key=lambda i: (found[i], -i))] -= 1
    return found


def shares_of(budget: Budget, length: int, window: int | None) -> list[tuple[Range, Budget | None]]:
    """Of a fair budget: the parts of a prompt of `length` tokens and what each may keep; None: all of it.

    window: of the layer; what the next query does not see has no share. The most recent tokens are the same part of
    each share as of the whole, and every share has as many sinks.
    """
    inside, first = budget.inside, 0 if window is None else max(0, length + 1 - window)
    if inside is None:
        raise ValueError(f"{budget} is not fair")
    ranges = [(max(start, first), stop) for start, stop in budget.spans if stop > first]
    lengths = [stop - start for start, stop in ranges]
    if budget.after_prompt >= sum(lengths):
        return [(each, None) for each in ranges]
    counts = shares(budget.after_prompt, lengths)
    return [
        (each, None if count == size else _share(inside, count))
        for each, size, count in zip(ranges, lengths, counts, strict=True)
    ]


def _share(inside: Budget, count: int) -> Budget:
    """A budget of `count` tokens that divides as `inside` does."""
    sinks = min(inside.sinks, count - 1)
    recent = inside.recent * (count - sinks) // max(1, inside.after_prompt - inside.sinks)
    recent = min(count - sinks, max(min(1, inside.recent), recent))
    early = inside.prompt is not None
    total = count + inside.burst - 1 if early else count
    kept = count if early else None
    return Budget(total, count - sinks - recent, recent, sinks, False, inside.burst, prompt=kept)


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
            raise UsageError(f"the name of a span is {self.name!r}", "needed a text")
        start, end = whole(self.start, f"start of {self}", 0), whole(self.end, f"end of {self}", 0)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", end)
        if end <= start:
            raise UsageError(f"{self} is empty", "needed an end after its start")
        truth(self.keep, f"keep of {self}")
        if self.unit not in _UNITS:
            raise UsageError(f"the unit of {self} is {self.unit!r}", f"needed one of {', '.join(_UNITS)}")

    def __str__(self) -> str:
        return f"span {self.name!r} [{self.start}, {self.end})"


@dataclass(frozen=True)
class Prompt:
    """A text, or token ids, with marked spans, in any order. UsageError where these overlap, differ in their unit, or
    count the characters of token ids."""

    content: str | Sequence[int]
    spans: Sequence[Span] = ()

    def __post_init__(self) -> None:
        if isinstance(self.spans, str | Mapping) or not isinstance(self.spans, Sequence):
            raise UsageError(f"spans are {self.spans!r}", "needed a list of them")
        object.__setattr__(self, "spans", tuple(sorted(map(_checked, self.spans), key=lambda span: span.start)))
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


def _checked(span: Any) -> Span:
    """A Span, or the JSON object of one."""
    if isinstance(span, Span):
        return span
    return Span(**known_keys(span, Span))


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
            start, stop = _touched(span, offsets or ())
            start, stop = max(done, first + start), first + stop
            most, what = len(prompt.content), "characters"
        if span.end > most:
            raise UsageError(f"{span} ends beyond the prompt, which has {most} {what}", f"needed an end up to {most}")
        if stop <= start:
            raise UsageError(f"{span} holds no token of its own", "needed a longer span")
        found.append(TokenSpan(start, stop, span.name, span.keep))
        done = stop
    return tuple(found)


def _touched(span: Span, offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The tokens that stand for any of its characters."""
    tokens = [i for i, (start, end) in enumerate(offsets) if max(start, span.start) < min(end, span.end)]
    return (tokens[0], tokens[-1] + 1) if tokens else (0, 0)


def marked(spans: Sequence[TokenSpan], rule: str | None) -> tuple[tuple[int, int], ...]:
    """Of these, the ranges that matter under `EvictionConfig.spans`."""
    return tuple((span.start, span.stop) for span in spans if rule == "fair" or (rule == "whitelist" and span.keep))
