"""Thoughts that an answer folds up: LightThinker's mechanism (Zhang et al. 2025, arXiv 2502.15589)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from h2o_flexgen.config.checks import known_keys, whole
from h2o_flexgen.errors import UsageError


@dataclass(frozen=True)
class Fold:
    """What becomes of a thought when the token `trigger` has been generated behind it.

    The answer goes on with the tokens `keep` and then with those of `then`, which are given instead of sampled. Once
    the last one of `keep` has attended to the thought, all that was generated since the prompt, or since the last fold,
    leaves the KV cache, the trigger included. Positions go on counting. A model must have been trained for it.
    """

    trigger: int
    keep: tuple[int, ...]
    then: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole(self.trigger, "the trigger of a fold", 0)
        for name in ("keep", "then"):
            tokens = getattr(self, name)
            if isinstance(tokens, str) or not hasattr(tokens, "__iter__"):
                raise UsageError(f"{name} of a fold is {tokens!r}", "needed a list of token ids")
            object.__setattr__(self, name, tuple(whole(token, f"a token of a fold's {name}", 0) for token in tokens))
        if not self.keep:
            raise UsageError("keep of a fold is empty", "needed one token id or more")

    @classmethod
    def read(cls, asked: Any) -> Fold | None:
        """A Fold, or the JSON object of one; None stays None."""
        if asked is None or isinstance(asked, Fold):
            return asked
        if not isinstance(asked, Mapping):
            raise UsageError(f"fold is {asked!r}", 'needed {"trigger": token id, "keep": [token ids], "then": [...]}')
        return cls(**known_keys(asked, cls))
