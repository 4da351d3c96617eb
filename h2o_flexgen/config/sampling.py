"""How tokens are chosen and when a sequence ends, under the names of transformers' GenerationConfig."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from h2o_flexgen.config.flags import flag
from h2o_flexgen.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """One sequence's generation settings; greedy unless `do_sample`. Raises UsageError for values that make no sense.

    `eos_token_id`: None means the model's own; of a tuple any ends the sequence. `seed`: None means the engine's.
    `logprobs`: None, or how many of the likeliest tokens to report beside the chosen one (0: only the chosen).
    """

    max_new_tokens: int = field(
        default=32,
        metadata=flag(
            "--gen-len", "--max-new-tokens", "--output-len", "-n", help="most new tokens per prompt", metavar="N"
        ),
    )
    min_new_tokens: int = field(
        default=0, metadata=flag("--min-new-tokens", help="new tokens before which no eos is taken", metavar="N")
    )
    do_sample: bool = field(
        default=False, metadata=flag("--do-sample", help="draw tokens instead of taking the likeliest")
    )
    temperature: float = field(
        default=1.0, metadata=flag("--temperature", help="with --do-sample: flatness of the distribution", metavar="T")
    )
    top_k: int = field(
        default=50, metadata=flag("--top-k", help="with --do-sample: among the K likeliest, 0 for all", metavar="K")
    )
    top_p: float = field(
        default=1.0, metadata=flag("--top-p", help="with --do-sample: among the likeliest of this mass", metavar="P")
    )
    repetition_penalty: float = field(
        default=1.0, metadata=flag("--repetition-penalty", help="above 1 discourages tokens already there", metavar="X")
    )
    stop_strings: tuple[str, ...] = ()
    eos_token_id: int | tuple[int, ...] | None = None
    ignore_eos: bool = field(default=False, metadata=flag("--ignore-eos", help="go on to --gen-len tokens in any case"))
    seed: int | None = None
    num_return_sequences: int = field(
        default=1, metadata=flag("--num-return-sequences", help="with --do-sample: answers per prompt", metavar="N")
    )
    logprobs: int | None = field(
        default=None,
        metadata=flag("--logprobs", help="report log-probabilities, with the N likeliest beside", metavar="N"),
    )

    def __post_init__(self) -> None:
        stops = (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings or ())
        object.__setattr__(self, "stop_strings", stops)
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        _require_int("max_new_tokens", self.max_new_tokens, 1)
        _require_int("min_new_tokens", self.min_new_tokens, 0)
        _require_int("top_k", self.top_k, 0)
        _require_int("num_return_sequences", self.num_return_sequences, 1)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise UsageError(
                f"min_new_tokens={self.min_new_tokens} is larger than max_new_tokens={self.max_new_tokens}"
            )
        _require_range("temperature", self.temperature, 0.0, math.inf)
        _require_range("top_p", self.top_p, 0.0, 1.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if not all(stops):
            raise UsageError("stop_strings holds an empty string", "needed strings of one character or more")
        if self.num_return_sequences > 1 and not self.do_sample:
            raise UsageError(
                f"num_return_sequences={self.num_return_sequences} with greedy search gives equal sequences",
                change="set do_sample=True (--do-sample)",
            )
        if not self.do_sample and (self.temperature != 1.0 or self.top_k != 50 or self.top_p != 1.0):
            warnings.warn("temperature, top_k and top_p have no effect without do_sample=True", stacklevel=3)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> SamplingParams:
        """Builds from keyword arguments; an unknown name raises UsageError with the closest known one."""
        return cls().with_kwargs(**kwargs)

    def with_kwargs(self, **kwargs: Any) -> SamplingParams:
        """A copy with some settings replaced; an unknown name raises UsageError with the closest known one."""
        known = [f.name for f in fields(self)]
        for name in kwargs:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                raise UsageError(
                    f"{name!r} is not a generation setting",
                    f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}",
                )
        return replace(self, **kwargs)


def _require_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}", f"needed a whole number of at least {least}")


def _require_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high or math.isinf(value):
        limit = f"at most {high:g}" if math.isfinite(high) else "finite"
        raise UsageError(f"{name}={value!r}", f"needed a number above {low:g} and {limit}")
