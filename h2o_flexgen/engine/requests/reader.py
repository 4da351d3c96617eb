"""From a user's prompts to sequences: token ids and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from h2o_flexgen.config.budget import Budget, Range
from h2o_flexgen.config.checks import iterable, shown
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.prompt import Prompt, TokenSpan, marked, token_spans
from h2o_flexgen.config.sampling import SamplingLike, SamplingParams
from h2o_flexgen.config.workload import Workload, first_pass
from h2o_flexgen.engine.requests.chat import offsets_of, prompt_ids
from h2o_flexgen.engine.requests.grammars import Grammar, Grammars
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import UsageError

PromptLike = str | SequenceOf[int] | Prompt
"""A text, token ids, or either with spans."""

SAMPLE_BITS = 16
"""Of a sequence's number in a job, those that count the samples of a request."""


@dataclass(frozen=True)
class Request:
    """A prompt of a job that is run in several calls.

    number   differs within a call, below 2 ** 47; randomness depends on it, `index` and the seed in `params` alone
    scores   the prompt's own tokens get log-probabilities, as by `LLM.score`, and nothing is generated
    fits     as many new tokens as the context leaves, at most those of `params`
    """

    prompt: PromptLike
    params: SamplingParams
    number: int
    index: int = 0
    scores: bool = False
    fits: bool = False


class RefusedPrompt(NamedTuple):
    place: int
    samples: int
    error: str


@dataclass(frozen=True)
class RequestReader:
    """Makes sequences of prompts for one model. codec: None without a tokenizer. grammars: for `response_format`, which
    is refused without."""

    spec: ModelSpec
    eviction: EvictionConfig
    codec: TextCodec | None
    seed: int
    grammars: Grammars | None = None

    def read(
        self,
        prompts: SequenceOf[PromptLike | UsageError],
        params: SamplingLike | SequenceOf[SamplingLike],
        refused: list[RefusedPrompt] | None = None,
        advice: str = "",
    ) -> list[Sequence]:
        """One sequence per prompt and sample, in order. UsageError naming the prompt if one cannot be run, with
        `advice` if there are others; with a list `refused`, such prompts are added to it. An error in place of a prompt
        is raised as its own."""
        if isinstance(prompts, str):
            raise UsageError("prompts is one string", "needed a list of prompts", "wrap it: [prompt]")
        if not _listed(prompts) or not hasattr(prompts, "__len__"):
            raise UsageError(f"prompts is {type(prompts).__name__}, not a list", "needed a list of prompts")
        if isinstance(params, SamplingParams | Mapping) or not hasattr(params, "__iter__"):
            params = [SamplingParams.read(params, "params")] * len(prompts)
        each = list(params)
        if len(each) != len(prompts):
            raise UsageError(f"{len(each)} SamplingParams for {len(prompts)} prompts", "needed one, or one per prompt")
        sequences, number = list[Sequence](), 0
        for index, (prompt, given) in enumerate(zip(prompts, each, strict=True)):
            settings = SamplingParams.read(given, f"the settings of prompt {index}")
            try:
                sequences += self._samples(index, number, prompt, settings)
            except UsageError as error:
                if refused is None:
                    changes = [error.change, advice] if len(prompts) > 1 else [error.change]
                    raise type(error)(error.found, error.needed, "; ".join(filter(None, changes))) from None
                refused.append(RefusedPrompt(index, settings.num_return_sequences, str(error)))
            number += settings.num_return_sequences
        return sequences

    def _samples(
        self, index: int, number: int, prompt: PromptLike | UsageError, params: SamplingParams
    ) -> list[Sequence]:
        """All sequences of a prompt, whose numbers begin with `number`."""
        if isinstance(prompt, UsageError):
            raise prompt
        ids, spans = self._marked(prompt, f"prompt {index}")
        params = self._ending(params, prompt)
        samples = range(params.num_return_sequences)
        return [self._sequence(index, sample, number + sample, ids, params, spans=spans) for sample in samples]

    def read_one(self, request: Request) -> list[Sequence]:
        """The sequences of a request. UsageError if it cannot be run."""
        (ids, spans), forced = self._marked(request.prompt, "the prompt"), None
        params = self._ending(request.params, request.prompt)
        left = self.spec.max_positions - len(ids)
        if request.fits and left > 0 and not self.eviction.rolling_positions:
            most = min(params.max_new_tokens, left)
            params = replace(params, max_new_tokens=most, min_new_tokens=min(most, params.min_new_tokens))
        if request.scores:
            if spans:
                raise UsageError("the prompt has spans, and its own tokens are scored", "needed a prompt to complete")
            # As a continuation of its first token: so that all others go through the cache, and eviction is active.
            ids, forced = ids[:1], ids[1:]
            if not forced:
                return []
            if params.fold is not None:
                raise UsageError(
                    "a fold is given, and the prompt's own tokens are scored", "needed a prompt to complete"
                )
            params = replace(params, max_new_tokens=len(forced))
        first = request.number << SAMPLE_BITS
        samples = range(params.num_return_sequences)
        rows = [self._sequence(request.index, i, first + i, ids, params, "the prompt", spans) for i in samples]
        return rows if forced is None else [replace(row, forced=forced, turn=0) for row in rows]

    def read_scored(self, pairs: Iterable[tuple[PromptLike, PromptLike]]) -> list[Sequence]:
        """One sequence per (context, continuation), which is forced; its length counts as gen_len."""
        sequences = []
        for index, pair in enumerate(iterable(pairs, "pairs", "needed a list of (context, continuation)")):
            # A string of two letters would unpack too, and be scored without a word.
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise UsageError(f"pair {index} is {shown(pair)}", "needed a list of (context, continuation)")
            context, continuation = pair
            ids, forced = self._split(_content(context), continuation, index)
            params, spans = SamplingParams(max_new_tokens=len(forced)), tuple[TokenSpan, ...]()
            if isinstance(context, Prompt) and context.spans:
                first = len(self._opening) if isinstance(context.content, str) else 0
                spans = self._spans(context, len(ids), first, f"pair {index}")
            row = self._sequence(index, 0, index, ids, params, spans=spans)
            sequences.append(replace(row, forced=forced, turn=0))  # all of it is known: it is as one prompt
        return sequences

    def _split(
        self, context: str | SequenceOf[int], continuation: PromptLike, index: int
    ) -> tuple[list[int], list[int]]:
        """Token ids of a pair. Strings are encoded together, so that the boundary is tokenised as in running text,
        after the special tokens that open a text."""
        where = f"pair {index}"
        if isinstance(continuation, Prompt):
            raise UsageError(f"{where} has a continuation with spans", "needed spans of the context alone")
        ids, forced = self._bare(context, where), self._bare(continuation, where)
        if isinstance(context, str) and isinstance(continuation, str):
            whole = self._bare(context + continuation, where)
            if whole[: len(ids)] == ids:
                forced = whole[len(ids) :]
        if not forced:
            raise UsageError(f"{where} has an empty continuation", "needed at least one token to score")
        opening = self._opening if isinstance(context, str) else []
        return [*opening, *ids] or [self.spec.bos_token_id], forced

    def _marked(self, prompt: PromptLike, where: str) -> tuple[list[int], tuple[TokenSpan, ...]]:
        ids = self.token_ids(_content(prompt), where)
        return ids, self._spans(prompt, len(ids), None, where) if isinstance(prompt, Prompt) else ()

    def _ending(self, params: SamplingParams, prompt: PromptLike) -> SamplingParams:
        """`params` with the prompt's own end tokens, if they leave these to the model."""
        if not isinstance(prompt, Prompt) or params.eos_token_id is not None or params.ignore_eos:
            return params
        own = self.spec.eos_token_ids
        more = tuple(token for token in prompt.ends if token < self.spec.vocab_size and token not in own)
        return replace(params, eos_token_id=(*own, *more)) if more else params

    def _spans(self, prompt: Prompt, length: int, bare: int | None, where: str) -> tuple[TokenSpan, ...]:
        """bare: special tokens that were put before the text by hand; None: the tokenizer has added its own."""
        if not prompt.spans:
            return ()
        try:
            return token_spans(prompt, length, offsets_of(prompt, self.codec, bare is None), bare or 0)
        except UsageError as error:
            raise UsageError(f"{where}: {error.found}", error.needed, error.change) from None

    def token_ids(self, prompt: str | SequenceOf[int], where: str) -> list[int]:
        """Ids of one prompt, special tokens as the tokenizer adds them; an empty one becomes BOS."""
        if isinstance(prompt, str):
            return self._known(prompt_ids(self._tokenizer(where), prompt, where), where) or [self.spec.bos_token_id]
        return self._bare(prompt, where) or [self.spec.bos_token_id]

    def _bare(self, prompt: str | SequenceOf[int], where: str) -> list[int]:
        """Ids of one prompt without added special tokens."""
        if isinstance(prompt, str):
            return self._known(prompt_ids(self._tokenizer(where), prompt, where, bare=True), where)
        if not _listed(prompt):
            raise UsageError(
                f"{where}: {shown(prompt)} is not a prompt",
                "needed a string or a list of token ids",
                "wrap the token ids of one prompt: [[1, 2, 3]]",
            )
        return self._known([_as_int(token, where) for token in prompt], where)

    @property
    def _opening(self) -> list[int]:
        return self._known(self._tokenizer("a text").opening, "what opens a text")

    def _tokenizer(self, where: str) -> TextCodec:
        if self.codec is None:
            raise UsageError(
                f"{where} is text, and this model has no tokenizer",
                "needed lists of token ids, or a tokenizer.json beside its config.json",
            )
        return self.codec

    def _known(self, ids: list[int], where: str) -> list[int]:
        for token in ids:
            if not 0 <= token < self.spec.vocab_size:
                raise UsageError(f"{where} holds token id {shown(token)}", f"needed 0 to {self.spec.vocab_size - 1}")
        return ids

    def _sequence(
        self,
        index: int,
        sample: int,
        row_id: int,
        ids: list[int],
        params: SamplingParams,
        where: str = "",
        spans: tuple[TokenSpan, ...] = (),
    ) -> Sequence:
        if params.stop_strings and self.codec is None:
            raise UsageError(
                "a stop string is given, and this model has no tokenizer",
                "needed a tokenizer, or eos_token_id instead",
            )
        params.check_vocabulary(self.spec.vocab_size)
        ranges = marked(spans, self.eviction.spans)
        budget = _budget(self.eviction, len(ids), params.max_new_tokens, ranges)
        # With rolling positions the end of a prompt past the context goes through decode steps.
        first = first_pass(self.spec, self.eviction, len(ids), params.max_new_tokens, where or f"prompt {index}")
        if spans and first < len(ids):
            raise UsageError(
                f"{where or f'prompt {index}'} has spans, and {len(ids)} tokens, more than the context of {first}",
                "needed a prompt within the context",
            )
        turn = 0 if self.eviction.rolling_positions else self.spec.turn(len(ids), params.max_new_tokens)
        if params.fold is not None:
            self._check_fold(budget, where or f"prompt {index}", turn)
        uniform = self.eviction.how_layers_share == "uniform"  # budgets differ by windows only
        return Sequence(
            index=index,
            sample=sample,
            row_id=row_id,
            prompt_ids=ids[:first],
            fed=ids[first:],
            params=params,
            budget=budget,
            by_layer=()
            if uniform
            else self.eviction.by_layer(self.spec.windows, len(ids), params.max_new_tokens, ranges),
            spans=spans,
            turn=turn,
            replays=self.eviction.split.replays and not budget.full,
            eos=_eos(params.eos_token_id, self.spec.eos_token_ids, self.spec.vocab_size),
            seed=self.seed if params.seed is None else params.seed,
            grammar=self._grammar(params, f"prompt {index}"),
        )

    def _check_fold(self, budget: Budget, where: str, turn: int) -> None:
        """UsageError if tokens leave the cache by other rules, too, come back to it, or change positions."""
        if not self.spec.keeps_caches:
            raise UsageError(f"{where} has a fold, and {self.spec.name} runs row by row", "needed no fold")
        if turn:
            found = f"{where} has a fold, and {self.spec.name} computes all keys anew after {turn - 1} tokens"
            raise UsageError(found, f"needed at most {turn - 1} tokens, with those to be generated")
        if self.spec.has_states:
            raise UsageError(
                f"{where} has a fold, and {self.spec.name} has layers that keep states, which forget no token",
                "needed a model all of whose layers attend",
            )
        if self.eviction.name != "full" or self.eviction.rolling_positions:
            used = "--rolling-positions" if self.eviction.rolling_positions else f"--eviction {self.eviction.name}"
            raise UsageError(
                f"{where} has a fold with {used}", "needed the full cache, of which it drops what it folds"
            )
        narrow = [window for window in self.spec.windows if budget.within(window) != budget]
        if narrow:
            found = (
                f"{where} has a fold, and {budget.total} tokens, more than the window of {min(filter(None, narrow))}"
            )
            raise UsageError(found, "needed a sequence within all windows")

    def _grammar(self, params: SamplingParams, where: str) -> Grammar | None:
        if params.response_format is None:
            return None
        if self.grammars is None:
            raise UsageError(f"{where} has a response_format, which is not offered here")
        return self.grammars.of(params.response_format, where)


def _content(prompt: PromptLike) -> str | SequenceOf[int]:
    return prompt.content if isinstance(prompt, Prompt) else prompt


def _listed(value: object) -> bool:
    """Whether it is a list, or like one: bytes would pass for token ids, and the keys of a dict for prompts."""
    ordered = isinstance(value, Iterable) and not isinstance(value, bytes | Mapping | set | frozenset)
    return ordered and getattr(value, "shape", None) != ()


def _as_int(token: Any, where: str) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise UsageError(f"{where} holds {shown(token)}", "needed a string or a list of token ids")
    return int(token)


# Sequences share what is equal: a call may have a million, most of them as long as others.


@lru_cache(4096)
def _budget(eviction: EvictionConfig, prompt_len: int, gen_len: int, ranges: tuple[Range, ...]) -> Budget:
    return eviction.resolve(prompt_len, gen_len, ranges)


@lru_cache(64)
def _eos(given: int | tuple[int, ...] | None, own: tuple[int, ...], vocab_size: int) -> frozenset[int]:
    """Tokens that end a sequence: the `given` ones, else the model's `own`; without numbers that are no tokens, which
    never come."""
    eos = own if given is None else given
    return frozenset(token for token in ((eos,) if isinstance(eos, int) else eos) if 0 <= token < vocab_size)


def workload_of(sequences: SequenceOf[Sequence]) -> Workload:
    """The largest lengths and the count."""
    return Workload(
        prompt_len=max(s.longest_pass[0] for s in sequences),
        gen_len=max(s.longest_pass[1] for s in sequences),
        num_sequences=len(sequences),
    )
