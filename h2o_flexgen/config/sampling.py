"""How tokens are chosen and when a sequence ends, under the names of transformers' GenerationConfig."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

from h2o_flexgen.config.checks import Checked, Count, Natural, Positive, iterable, number, shown, whole
from h2o_flexgen.config.flags import option
from h2o_flexgen.config.fold import Fold, Thinking
from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.errors import UsageError

Words = tuple[tuple[int, ...], ...]
"""Sequences of token ids."""
Probability = Annotated[float, partial(number, low=0, high=1)]
AboveZero = Annotated[float, partial(number, low=0, high=1, above=True)]
Penalty = Annotated[float, partial(number, low=-2, high=2)]


@dataclass(frozen=True)
class SamplingParams(Checked):
    """One sequence's generation settings; greedy unless `do_sample`. Raises UsageError for values that make no sense.

    The settings mean what transformers' GenerationConfig says they do; a default is a setting that does nothing. Lists
    are taken where tuples stand. `eos_token_id`: None means the model's own; of a tuple any ends the sequence, an empty
    one means none does. `seed`: None means the engine's; drawn tokens depend on it, on the prompt's place in the call
    and on the sample's number. `logprobs`: None, or how many of the likeliest tokens to report beside the chosen one
    (0: only the chosen). `max_time`: seconds of the call after which a sequence ends with its next token.
    `sequence_bias`: (token ids, what is added to the last one's logit), or a dict of these. `presence_penalty`,
    `frequency_penalty`, -2 to 2: OpenAI's, taken from the logit of each new token that is there already, once, and as
    often as it is there. `response_format`: OpenAI's, a dict of the type json_schema, json_object or text: the text is
    such JSON, and an eos ends it only where it is complete; needs the extra `schemas`. `fold`: how a generated token
    folds away the thought before it, a `Fold` or its dict; with the full cache. `thinking`: the thought that an
    answer may begin with, how long it may get, and that a form is for what follows.
    """

    CALLED, FIELD = "{}", "a generation setting"
    max_new_tokens: Count = option(
        32, "--gen-len", "--max-new-tokens", "--output-len", "-n", help="most new tokens per prompt"
    )
    min_new_tokens: Natural = option(0, help="new tokens before which no eos is taken")
    do_sample: bool = option(False, help="draw tokens instead of taking the likeliest")
    temperature: Positive = option(
        1.0, help="with --do-sample: above 1 flattens the distribution, below 1 sharpens it", metavar="T"
    )
    top_k: Natural = option(50, help="with --do-sample: draw among the K likeliest tokens, 0 for all", metavar="K")
    top_p: Probability = option(
        1.0, help="with --do-sample: draw among the likeliest tokens of this total probability", metavar="P"
    )
    min_p: Probability = option(
        0.0, help="with --do-sample: draw only tokens of P times the likeliest one's probability or more", metavar="P"
    )
    repetition_penalty: Positive = option(1.0, help="above 1 discourages tokens already there", metavar="X")
    no_repeat_ngram_size: Natural = option(0, help="no N tokens in a row occur twice, 0 for off")
    stop_strings: tuple[str, ...] = ()
    eos_token_id: int | tuple[int, ...] | None = None
    ignore_eos: bool = option(False, help="go on to --gen-len tokens in any case")
    seed: int | None = None
    num_return_sequences: Count = option(1, help="with --do-sample: answers per prompt")
    logprobs: Natural | None = option(None, help="report log-probabilities, with the N likeliest beside")
    max_time: Annotated[float, partial(number, low=0)] | None = None
    top_h: AboveZero | None = None
    typical_p: AboveZero = 1.0
    epsilon_cutoff: Probability = 0.0
    eta_cutoff: Probability = 0.0
    bad_words_ids: Words = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    encoder_repetition_penalty: Positive = 1.0
    encoder_no_repeat_ngram_size: Natural = 0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    response_format: ResponseFormat | None = None
    fold: Fold | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        for name, value in _frozen(self).items():
            object.__setattr__(self, name, value)
        if isinstance(self.temperature, int | float) and 0 <= self.temperature < LEAST_TEMPERATURE:
            found, greedy = f"temperature is {self.temperature!r}", "for greedy search leave it and do_sample out"
            raise UsageError(found, f"needed {LEAST_TEMPERATURE} or more", greedy)
        super().__post_init__()
        if self.min_new_tokens > self.max_new_tokens:
            raise UsageError(
                f"min_new_tokens={self.min_new_tokens} is larger than max_new_tokens={self.max_new_tokens}"
            )
        self._check_tokens()
        self._check_form()
        for stop in self.stop_strings:
            if not isinstance(stop, str) or not stop:
                found = "an empty string" if stop == "" else repr(stop)
                raise UsageError(f"stop_strings holds {found}", "needed strings of one character or more")
        if self.num_return_sequences > 1 and not self.do_sample:
            raise UsageError(
                f"num_return_sequences={self.num_return_sequences} with greedy search gives equal sequences",
                change="set do_sample=True",
            )
        if not self.do_sample and (idle := [name for name in SAMPLING_ONLY if getattr(self, name) != _DEFAULTS[name]]):
            warn_idle(idle, stacklevel=3)

    @classmethod
    def read(cls, given: Any, where: str) -> SamplingParams:
        """`given`, or what a dict of settings describes. UsageError for anything else, as that of `where`."""
        if isinstance(given, Mapping):
            return cls(**{str(name): value for name, value in given.items()})
        if not isinstance(given, cls):
            raise UsageError(f"{where} are {shown(given)}", "needed SamplingParams, or a dict of its settings")
        return given

    @property
    def usual(self) -> bool:
        """Whether no setting but those of `_USUAL` has a say in which token is chosen."""
        names = _UNUSUAL if self.do_sample else _UNUSUAL.difference(SAMPLING_ONLY)
        return all(getattr(self, name) == _DEFAULTS[name] for name in names)

    def check_vocabulary(self, size: int) -> None:
        """UsageError for what a vocabulary of `size` tokens has not: a token id in any setting, as many logprobs."""
        if self.logprobs is not None and self.logprobs > size:
            raise UsageError(f"logprobs={self.logprobs}", f"needed at most {size}: there are no more tokens")
        for name, tokens in self._named_tokens():
            for token in tokens:
                if token >= size:
                    raise UsageError(f"{name} holds token id {token}", f"needed 0 to {size - 1}")

    def _check_tokens(self) -> None:
        seeds = () if self.seed is None else (self.seed,)
        for name, values in (("seed", seeds), ("eos_token_id", _tokens(self.eos_token_id))):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise UsageError(f"{name} is {shown(value)}", "needed a whole number")
        decay = self.exponential_decay_length_penalty
        if decay is not None:
            if not isinstance(decay, tuple) or len(decay) != 2:
                raise UsageError(f"exponential_decay_length_penalty={decay}", "needed (tokens before it, factor)")
            whole(decay[0], "the start of exponential_decay_length_penalty", 0)
            number(decay[1], "the factor of exponential_decay_length_penalty", 0, above=True)
        for name, tokens in self._named_tokens():
            if not tokens:
                raise UsageError(f"{name} holds an empty list", "needed one token id or more")
            for token in tokens:
                whole(token, f"a token id in {name}", 0)
        for _, bias in self.sequence_bias:
            known = not isinstance(bias, bool) and isinstance(bias, (int, float))
            if not (known and (bias == -math.inf or abs(bias) <= sys.float_info.max)):
                raise UsageError(f"sequence_bias holds the bias {shown(bias)}", "needed a number")
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            forced = _tokens(getattr(self, name))
            if forced and set(forced) <= set(self.suppress_tokens):
                raise UsageError(f"suppress_tokens forbids what {name}={getattr(self, name)} wants")

    def _check_form(self) -> None:
        against = ("ignore_eos", "forced_bos_token_id", "forced_eos_token_id", "fold")
        if self.thinking is not None and self.fold is not None:
            raise UsageError("thinking is given beside a fold", "needed one of the two")
        for name in against if self.response_format is not None else ():
            if getattr(self, name) != _DEFAULTS[name]:
                raise UsageError(f"{name}={getattr(self, name)} and a response_format", "needed one of the two")

    def _named_tokens(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every list of token ids that must not be empty, with its setting's name; eos may be any number at all."""
        named = [("bad_words_ids", word) for word in self.bad_words_ids]
        named += [("sequence_bias", word) for word, _ in self.sequence_bias]
        if self.fold is not None:
            named.append(("fold", (self.fold.trigger, *self.fold.keep, *self.fold.then)))
        if self.thinking is not None:
            named.append(("thinking", (*self.thinking.begin, *self.thinking.end, *self.thinking.then)))
        for name in ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"):
            if tokens := _tokens(getattr(self, name)):
                named.append((name, tokens))
        return named


SamplingLike = SamplingParams | Mapping[str, Any]
"""Settings, or a dict of some."""

LEAST_TEMPERATURE = 1e-30
"""Logits over less than that are infinite."""

SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that only `do_sample` gives a meaning."""

_ELSEWHERE: tuple[str, ...] = ("max_new_tokens", "do_sample", "eos_token_id", "ignore_eos", "stop_strings", "max_time")
_ELSEWHERE += ("seed", "num_return_sequences", "logprobs", "response_format", "fold", "thinking")
"""Settings that change no logits; all the others do, those in SAMPLING_ONLY of sampled rows alone."""

_NUMBERS: tuple[str, ...] = ("max_new_tokens", "num_return_sequences", "logprobs", "min_new_tokens", "top_k", "seed")
_NUMBERS += ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty")
_NUMBERS += ("eos_token_id", "forced_bos_token_id", "forced_eos_token_id")
"""Settings that may come as numpy's numbers or arrays, or as tensors."""

_USUAL = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "min_new_tokens", "repetition_penalty", "renormalize_logits"}
)
"""The settings that the engine samples by itself, for all rows with equal settings at once."""

_DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(SamplingParams)}
_IDLE = {**_DEFAULTS, "num_beams": 1}
_UNUSUAL = frozenset(_DEFAULTS).difference(_USUAL, _ELSEWHERE)


def shapes_greedy(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for generation, among a model's `stored` ones, that change its greedy tokens."""
    names = set(_IDLE).difference(_ELSEWHERE, SAMPLING_ONLY)
    return {name: stored[name] for name in sorted(names) if stored.get(name) not in (None, [], _IDLE.get(name))}


def warn_idle(names: list[str], stacklevel: int) -> None:
    """A warning that the sampling settings `names` do nothing, shown for the caller `stacklevel` frames up."""
    verb = "has" if len(names) == 1 else "have"
    warnings.warn(f"{', '.join(names)} {verb} no effect without do_sample=True", stacklevel=stacklevel + 1)


def _frozen(params: SamplingParams) -> dict[str, Any]:
    """The settings that may come as lists, sets, a string or a dict, as nested tuples. UsageError where they cannot."""
    bias = params.sequence_bias
    bias = () if bias is None else bias
    stops: Any = params.stop_strings
    if not isinstance(stops, str | None):
        stops = tuple(iterable(stops, "stop_strings", "needed a string, or a list of them"))
    made: dict[str, Any] = {"stop_strings": (stops,) if isinstance(stops, str) else stops or ()}
    made["response_format"], made["fold"] = ResponseFormat.read(params.response_format), Fold.read(params.fold)
    made["thinking"] = Thinking.read(params.thinking)
    try:
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            made[name] = tuple(map(plain, getattr(params, name) or ()))
        for name in _NUMBERS:
            value = plain(getattr(params, name))
            made[name] = tuple(map(plain, value)) if isinstance(value, (list, tuple, set, frozenset)) else value
        made["bad_words_ids"] = tuple(tuple(map(plain, word)) for word in params.bad_words_ids or ())
        made["sequence_bias"] = tuple(
            (tuple(map(plain, word)), value) for word, value in (bias.items() if isinstance(bias, dict) else bias)
        )
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"a setting of token ids has the wrong shape: {error}",
            "needed suppress_tokens=[id, ...], bad_words_ids=[[id, ...], ...], sequence_bias={(id, ...): number}",
        ) from error
    return made


def plain(value: Any) -> Any:
    """`value`; of numpy and torch Python's own numbers, or a list of them. A whole number may be written 3.0."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tokens(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return () if value is None else value if isinstance(value, tuple) else (value,)
