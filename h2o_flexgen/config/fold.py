"""Thoughts of an answer: where one begins and ends and how long it may get, and thoughts that an answer folds up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from h2o_flexgen.config.checks import Checked, Natural, TokenIds, given_as
from h2o_flexgen.errors import UsageError


@dataclass(frozen=True)
class Fold(Checked):
    """How a thought is folded away when the token `trigger` has been generated behind it.

    The answer goes on with the tokens `keep` and then with those of `then`, which are given instead of sampled. Once
    the last one of `keep` has attended to the thought, all that was generated since the prompt, or since the last fold,
    leaves the KV cache, the trigger included. Positions go on counting. A model must have been trained for it.
    LightThinker's mechanism (Zhang et al. 2025, arXiv 2502.15589).
    """

    CALLED = "the {} of a fold"
    trigger: Natural
    keep: TokenIds
    then: TokenIds = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.keep:
            raise UsageError("keep of a fold is empty", "needed one token id or more")

    @classmethod
    def read(cls, asked: Any) -> Fold | None:
        """A Fold, or the JSON object of one; None stays None."""
        return given_as(cls, asked, "fold", '{"trigger": token id, "keep": [token ids], "then": [...]}')


@dataclass(frozen=True)
class Thinking(Checked):
    """The thought that an answer may begin with: from the tokens `begin` to the tokens `end`.

    inside   the prompt has begun it
    opens    `begin` is given instead of sampled, where the prompt has not begun it
    most     tokens of it, between `begin` and `end`, after which `end` and `then` are given; None: as many as come
    joins    `then` is given behind an `end` that was sampled, too
    A form (`response_format`) is that of what follows; within a thought an eos then counts as its end.
    """

    CALLED = "{} of thinking"
    begin: TokenIds
    end: TokenIds
    inside: bool = False
    opens: bool = False
    most: Natural | None = None
    then: TokenIds = ()
    joins: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.begin or not self.end:
            raise UsageError("thinking has no begin or no end", "needed one token id or more for each")

    @classmethod
    def read(cls, asked: Any) -> Thinking | None:
        """A Thinking, or the dict of one; None stays None."""
        return given_as(cls, asked, "thinking", '{"begin": [token ids], "end": [token ids], ...}')
