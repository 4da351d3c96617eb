"""One prompt with its generated tokens, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.prompt import TokenSpan
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.errors import required

FinishReason = Literal["stop", "length", "error"]
Fault = Literal["settings", "response_format", "numbers"]
"""Why a sequence failed: its settings, its response format, or numbers of the model that are not finite."""
Processor = Callable[[Tensor, Tensor], Tensor]
"""(ids so far (1, n) int64, scores (1, vocab) float32) to scores: the protocol of transformers' logits processors."""
Criterion = Callable[[Tensor, Any], Any]
"""(ids so far (1, n), the scores of every step or None) to whether to stop: transformers' stopping criteria."""


@dataclass
class Hooks:
    """The options of `generate_ids` for a row that SamplingParams cannot express.

    context         the prompt with its caller's padding, the first `padding` ids, as processors and criteria see it
    prefix          the processor of prefix_allowed_tokens_fn; `processors` run before temperature and the like
    told            tokens that `on_token` was called for, so that a row that is run again does not repeat them
    logits, scores  unless None get a (vocab,) float32 host tensor per step: before and after all processors
    """

    context: list[int]
    padding: int = 0
    prefix: Processor | None = None
    processors: list[Processor] = field(default_factory=list)
    criteria: list[Criterion] = field(default_factory=list)
    on_token: Callable[[int], None] | None = None
    told: int = 0
    logits: list[Tensor] | None = None
    scores: list[Tensor] | None = None


class Dropped(NamedTuple):
    """Positions [start, stop), which leave the cache after decode step 1, 2, ..."""

    start: int
    stop: int
    step: int


@dataclass(slots=True)
class Sequence:
    """The state of one row while it runs. The sampler appends tokens and sets `finish_reason` and `error`.

    index     the prompt's place in the call; sample: its number among num_return_sequences; row_id: its number among
              all sequences of the call. Policies and generators are seeded by these, so that neighbours never matter
    forced    appended instead of sampled tokens, with their log-probabilities (`LLM.score`)
    by_layer  the budget of each layer, within its window, if layers do not share `budget` evenly
    kept      by "prefill" and "decode", at their end: tokens kept of each span, the mean over layers and KV heads
    replays   the prompt is computed twice, for a policy that looks at the second time
    fed       the end of a prompt longer than the context, which goes through decode steps (rolling positions)
    given     tokens that follow instead of sampled ones, at a fold or at the ends of a thought
    dropped   folded thoughts, in order
    turn      the length, of prompt and answer, at which all keys are computed anew; 0: never
    again     how many tokens of the answer are the end of `prompt_ids`, too, as keys are being computed anew
    returns   length of the prefix shared with the neighbours of the run, which a prefix store may keep
    grammar   a Grammar, if the text has a form (`response_format`); guide: its state, the sampler's
    chooser   the sampler's state; None once it is `prepared`: the largest logit is the answer
    """

    index: int
    sample: int
    row_id: int
    prompt_ids: list[int]
    params: SamplingParams
    budget: Budget
    eos: frozenset[int]
    seed: int = 0
    forced: list[int] | None = None
    by_layer: tuple[Budget, ...] = ()
    spans: tuple[TokenSpan, ...] = ()
    kept: dict[str, list[float]] = field(default_factory=dict)
    replays: bool = False
    fed: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    turn: int = 0
    again: int = 0
    _thinks: bool = False
    _thought: int = 0
    _folding: Dropped | None = None
    returns: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    error: str | None = None
    fault: Fault | None = None
    hooks: Hooks | None = None
    grammar: Any = field(default=None, repr=False)
    guide: Any = field(default=None, repr=False)
    chooser: Any = field(default=None, repr=False)
    prepared: bool = field(default=False, repr=False)
    _taken: int = 0
    _generator: torch.Generator | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._begin_thought()

    @property
    def max_new_tokens(self) -> int:
        return len(self.forced) if self.forced is not None else self.params.max_new_tokens

    def budget_in(self, layer: int, window: int | None) -> Budget:
        return self.by_layer[layer] if self.by_layer else self.budget.within(window)

    @property
    def pass_ids(self) -> list[int]:
        """The tokens that go through the layers in the step of the prompt."""
        return self.prompt_ids * 2 if self.replays else self.prompt_ids

    @property
    def given_ids(self) -> list[int]:
        return self.prompt_ids[: len(self.prompt_ids) - self.again] + self.fed

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids) - self.again + len(self.fed)

    @property
    def steps(self) -> int:
        """Steps that the row takes part in, that of its prompt included; until its `turn`, if it has one."""
        if self.turn:
            return self.turn - len(self.prompt_ids)
        return len(self.fed) + self.max_new_tokens - self.again

    @property
    def longest_pass(self) -> tuple[int, int]:
        """Prompt tokens and steps of the pass that takes most memory: after its `turn`, if it has one."""
        if self.turn:
            return self.turn, self.max_new_tokens - self.steps
        return len(self.prompt_ids), self.steps

    @property
    def remaining(self) -> int:
        """Steps that are still to come, at most."""
        return self.steps - self._taken - (len(self.token_ids) - self.again)

    @property
    def last_token(self) -> int:
        """The token that the next decode step starts from."""
        if self.token_ids:
            return self.token_ids[-1]
        return self.fed[self._taken - 1] if self._taken else self.prompt_ids[-1]

    def take_fed(self) -> bool:
        """Takes the next token of `fed`; False if there is none, so that one is sampled."""
        waiting = self._taken < len(self.fed)
        self._taken += waiting
        return waiting

    @property
    def takes_likeliest(self) -> bool:
        """Whether further tokens are the likeliest ones, and nothing else is read from logits."""
        chooses = self.forced is not None or self.params.logprobs is not None or self._taken < len(self.fed)
        own = self.grammar is not None or self.params.fold is not None or self.params.thinking is not None
        return self.prepared and self.chooser is None and not own and not chooses

    def append(self, token: int, *, sampled: bool) -> None:
        """Adds a token to the answer; begins and ends thoughts."""
        self.token_ids.append(token)
        if self._thinks:
            self._think()
        fold, count, prompt = self.params.fold, len(self.token_ids), len(self.prompt_ids)
        if self._folding is not None and count > self._folding.step:
            self.dropped.append(self._folding)
            self._folding = None
        if fold is not None and sampled and token == fold.trigger:
            # Step n reads token n of the answer; the tokens of `keep` follow the trigger.
            self._folding = Dropped(prompt + self._thought, prompt + count, count + len(fold.keep))
            self.given = [*fold.keep, *fold.then]
            self._thought = count + len(self.given)

    @property
    def thinks(self) -> bool:
        """Whether the next token belongs to the opening thought, or to the tokens given after it."""
        return self._thinks or (self.params.thinking is not None and bool(self.given))

    def close_thought(self) -> None:
        """Ends the thought: its end is given."""
        assert self.params.thinking is not None, "only a row that thinks"
        self.given = [*self.params.thinking.end, *self.params.thinking.then]

    def _begin_thought(self) -> None:
        thinking = self.params.thinking
        self._thinks = thinking is not None
        if thinking is None or self.token_ids:
            return
        self.given = [] if thinking.inside or not thinking.opens else [*thinking.begin]
        if thinking.most == 0 and (thinking.inside or thinking.opens):
            self.given += [*thinking.end, *thinking.then]

    def _think(self) -> None:
        """After a token in a thought, or where one may begin."""
        thinking, count = self.params.thinking, len(self.token_ids)
        assert thinking is not None, "only a row that thinks"
        first = 0 if thinking.inside else len(thinking.begin)
        if count <= first:
            self._thinks = tuple(self.token_ids) == thinking.begin[:count]
        elif count - first >= len(thinking.end) and tuple(self.token_ids[-len(thinking.end) :]) == thinking.end:
            self._thinks = False
            if thinking.joins and not self.given:
                self.given = [*thinking.then]
        if self._thinks and count >= first and not self.given and thinking.most == count - first:
            self.close_thought()

    def fail(self, error: str, fault: Fault | None = None) -> None:
        """Ends it with an error."""
        self.finish_reason, self.error, self.fault = "error", error, fault

    def missing(self, step: int) -> int:
        """Tokens that have been dropped before a decode step: 1, 2, ..."""
        return sum(each.stop - each.start for each in self.dropped if each.step < step)

    @property
    def paused(self) -> bool:
        """Whether it leaves its block unfinished, at its `turn`."""
        return self.finish_reason is None and 0 < self.turn == len(self.prompt_ids) + len(self.token_ids)

    @property
    def finished(self) -> bool:
        """Whether it takes part in no further step of its block."""
        return self.paused or self.finish_reason is not None

    def take_turn(self) -> None:
        """Readies a paused row: its tokens so far are its next prompt."""
        self.prompt_ids = [*self.prompt_ids, *self.token_ids]
        self.turn, self.again = 0, len(self.token_ids)

    def generator(self, device: torch.device) -> torch.Generator:
        """The row's random stream, which depends on (seed, prompt index, sample index) alone."""
        if self._generator is None:
            # SplitMix-style mixing, so that neighbouring indices do not give related streams.
            mixed = (
                self.seed * 0x9E3779B97F4A7C15 + self.index * 0xBF58476D1CE4E5B9 + self.sample * 0x94D049BB133111EB
            ) & ((1 << 63) - 1)
            self._generator = torch.Generator(device=device).manual_seed(mixed)
        return self._generator

    def restart(self) -> None:
        """Forgets everything since the prompt: run again, the row gives the same tokens."""
        recorded = (self.hooks.logits, self.hooks.scores) if self.hooks is not None else ()
        self.kept.clear()
        self._thought, self._folding = 0, None
        if self.again:
            self.turn, self.again, self.prompt_ids = len(self.prompt_ids), 0, self.given_ids
        answer = self.token_ids, self.logprobs, self.top_logprobs, self.greedy
        for kept in (*answer, self.given, self.dropped, *recorded):
            if kept is not None:
                kept.clear()
        self.finish_reason = self.stop_string = self.error = self.fault = None
        self.chooser = self.guide = self._generator = None
        self.prepared, self._taken = False, 0
        self._begin_thought()


Kept = dict[str, dict[str, float]]
"""By the name of a span its `tokens`, and how many of them are kept at the end of `prefill` and of `decode`: the mean
over layers and KV heads."""


def kept_of_spans(row: Sequence) -> Kept | None:
    """The kept tokens of a finished sequence's spans, summed by name; None without spans."""
    if not row.spans:
        return None
    found: Kept = {span.name: {"tokens": 0, **dict.fromkeys(row.kept, 0.0)} for span in row.spans}
    for i, span in enumerate(row.spans):
        found[span.name]["tokens"] += span.stop - span.start
        for when, counts in row.kept.items():
            found[span.name][when] += counts[i]
    return found


@dataclass(frozen=True)
class RequestOutput:
    """The result of a finished sequence.

    token_ids  the new tokens, with the eos that stopped the row
    text       without special tokens and the stop string; None without a tokenizer
    logprobs   of the chosen tokens, if asked for
    kept       of a prompt with spans
    fault      of an `error`, if it is the request's or the model's numbers'
    """

    index: int
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    error: str | None = None
    kept: Kept | None = None
    fault: Fault | None = None

    @classmethod
    def of(cls, row: Sequence, text: str | None) -> RequestOutput:
        return cls(
            row.index,
            row.sample,
            row.given_ids,
            row.token_ids,
            text,
            required(row.finish_reason, "the sequence is not finished"),
            row.logprobs if row.params.logprobs is not None else None,
            row.top_logprobs if row.params.logprobs else None,
            row.error,
            kept_of_spans(row),
            row.fault,
        )

    @classmethod
    def refused(cls, index: int, sample: int, error: str, text: str | None) -> RequestOutput:
        return cls(index, sample, [], [], text, "error", error=error)


@dataclass(frozen=True)
class Score:
    """`LLM.score` of one (context, continuation): natural-log probabilities with eviction active.

    token_is_greedy  whether each token of the continuation is the likeliest; is_greedy: whether all are
    error            why a pair could not be scored, else None; then `logprob` is NaN, `is_greedy` False, and the lists
                     end where it failed
    """

    logprob: float
    is_greedy: bool
    token_logprobs: list[float]
    token_is_greedy: list[bool] = field(default_factory=list)
    error: str | None = None
    kept: Kept | None = None

    @classmethod
    def of(cls, row: Sequence) -> Score:
        """Of a finished sequence whose tokens were given."""
        if row.error is not None:
            return cls(math.nan, False, row.logprobs, row.greedy, row.error, kept_of_spans(row))
        return cls(sum(row.logprobs), all(row.greedy), row.logprobs, row.greedy, None, kept_of_spans(row))
