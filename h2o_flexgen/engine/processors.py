"""From one row's logits to its next token: the processors of transformers' `generate`, in its order, row by row.

The usual ones are here, in plain torch. The rare ones are transformers' own classes, imported when a row asks for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.sequence import Hooks, Processor, Sequence

NOTHING = float("-inf")
"""The score of a token that cannot be chosen."""


class Step(NamedTuple):
    """A processor under the name of transformers' class: a caller's own processor of that class takes its place."""

    name: str
    apply: Processor


class Library:
    """transformers' processors by name. Those that depend on settings alone are made once and serve many rows."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Step] = {}

    def make(self, name: str, *args: Any, **options: Any) -> Step:
        """A new one of class `name`."""
        from transformers.generation import logits_process

        return Step(name, getattr(logits_process, name)(*args, **options))

    def shared(self, key: tuple[Any, ...], name: str, *args: Any, **options: Any) -> Step:
        """The one made before under `key` and `name`, else a new one: some hold a bias as large as the vocabulary."""
        if (name, *key) not in self._made:
            self._made[name, *key] = self.make(name, *args, **options)
        return self._made[name, *key]


class Chooser:
    """Picks the tokens of one row that wants more than its largest logit. Owns the row's ids on the logits' device.

    `until`: the number of tokens after which it changes nothing any more.
    """

    def __init__(self, row: Sequence, library: Library, device: torch.device) -> None:
        self._hooks = row.hooks
        context = row.hooks.context if row.hooks else row.prompt_ids + row.fed
        self._given = len(context)
        known = torch.tensor(context + row.token_ids, dtype=torch.int64)
        self._ids = torch.zeros(1, self._given + row.max_new_tokens, dtype=torch.int64, device=device)
        self._ids[0, : known.numel()] = known.to(device)
        corrections = _corrected(row, context, library, device)
        self._may_forbid_all = bool(corrections)
        self._steps = [*corrections, *_shaping(row.params, library, device)]
        # A processor of the caller's own may stand under the name of ours.
        brief = all(step.name == _MIN_NEW for step in self._steps) and not (row.hooks and row.hooks.processors)
        ends = brief and not row.params.do_sample and not _watched(row.hooks)
        self.until: float = row.params.min_new_tokens if ends else math.inf

    def choose(self, row: Sequence, logits: Tensor) -> int | None:
        """A token for `logits` (vocab,) float32, which stay as they are; None where every token is forbidden."""
        scores = logits.unsqueeze(0)
        ids = self._ids[:, : self._given + len(row.token_ids)]
        for step in self._steps:
            scores = step.apply(ids, scores)
        if self._hooks is not None:
            self._record(self._hooks, logits, scores[0])
        if self._may_forbid_all or not row.params.do_sample:
            best, likeliest = torch.max(scores[0], dim=-1)
            if not math.isfinite(best):
                return None
            if not row.params.do_sample:
                return int(likeliest)
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=row.generator(logits.device)))

    def chosen(self, row: Sequence) -> bool:
        """Notes the token that the row got last; whether one of the caller's criteria stops the row with it."""
        self._ids[0, self._given + len(row.token_ids) - 1] = row.token_ids[-1]
        if self._hooks is None or not self._hooks.criteria:
            return False
        ids = self._ids[:, : self._given + len(row.token_ids)]
        recorded = self._hooks.scores
        scores = None if recorded is None else tuple(step.unsqueeze(0) for step in recorded)
        # Each of them sees every token, whatever the others say.
        answers = [criterion(ids, scores) for criterion in self._hooks.criteria]
        return any(bool(torch.as_tensor(answer).any()) for answer in answers)

    @staticmethod
    def _record(hooks: Hooks, logits: Tensor, scores: Tensor) -> None:
        for kept, values in ((hooks.logits, logits), (hooks.scores, scores)):
            if kept is not None:
                kept.append(values.detach().to("cpu", torch.float32, copy=True))


def make_chooser(row: Sequence, library: Library, device: torch.device) -> Chooser | None:
    """What chooses for `row`, None where the largest logit is always the answer."""
    if row.hooks is None and row.params.plain:
        return None
    chooser = Chooser(row, library, device)
    return chooser if chooser.until > 0 else None


_MIN_NEW = "MinNewTokensLengthLogitsProcessor"


def _watched(hooks: Hooks | None) -> bool:
    """Whether every step is to be seen, whatever becomes of its scores."""
    return hooks is not None and bool(hooks.criteria or hooks.logits is not None or hooks.scores is not None)


def _corrected(row: Sequence, context: list[int], library: Library, device: torch.device) -> list[Step]:
    """`_corrections` and then the caller's own processors, each in place of ours of the same class if there is one."""
    steps = list(_corrections(row, context, library, device))
    own = list(row.hooks.processors) if row.hooks else []
    for i, step in enumerate(steps):
        same = next((processor for processor in own if type(processor).__name__ == step.name), None)
        if same is not None:
            steps[i] = Step(step.name, same)
    placed = [step.apply for step in steps]
    return steps + [Step(type(processor).__name__, processor) for processor in own if processor not in placed]


def _corrections(row: Sequence, context: list[int], library: Library, device: torch.device) -> Iterator[Step]:
    """What applies to greedy and sampled rows alike. `context`: the prompt as the caller padded it."""
    params, given = row.params, len(context)
    eos = sorted(token for token in row.eos if token >= 0)
    make, shared = library.make, partial(library.shared, (params, row.eos, device))
    if params.sequence_bias:
        bias = {word: float(value) for word, value in params.sequence_bias}
        yield shared("SequenceBiasLogitsProcessor", sequence_bias=bias)
    prompt = torch.tensor([context], device=device)
    if params.encoder_repetition_penalty != 1.0:
        penalty = float(params.encoder_repetition_penalty)
        yield make("EncoderRepetitionPenaltyLogitsProcessor", penalty, encoder_input_ids=prompt)
    if params.repetition_penalty != 1.0:
        padding = row.hooks.padding if row.hooks else 0
        yield Step("RepetitionPenaltyLogitsProcessor", partial(penalise, params.repetition_penalty, padding))
    if params.no_repeat_ngram_size:
        yield make("NoRepeatNGramLogitsProcessor", params.no_repeat_ngram_size)
    if params.encoder_no_repeat_ngram_size:
        yield make("EncoderNoRepeatNGramLogitsProcessor", params.encoder_no_repeat_ngram_size, prompt)
    # An eos alone is no bad word: it is what ends the sequence.
    if bad := [list(word) for word in params.bad_words_ids if word not in {(token,) for token in eos}]:
        yield shared("NoBadWordsLogitsProcessor", bad)
    if params.min_new_tokens and eos:
        yield Step(_MIN_NEW, partial(forbid, torch.tensor(eos, device=device), given + params.min_new_tokens))
    if row.hooks is not None and row.hooks.prefix is not None:
        yield Step("PrefixConstrainedLogitsProcessor", row.hooks.prefix)
    if params.forced_bos_token_id is not None:
        yield make("ForcedBOSTokenLogitsProcessor", params.forced_bos_token_id)
    if params.forced_eos_token_id is not None:
        forced = params.forced_eos_token_id
        tokens = [forced] if isinstance(forced, int) else list(forced)
        yield make("ForcedEOSTokenLogitsProcessor", given + params.max_new_tokens, tokens, device=str(device))
    if params.remove_invalid_values:
        yield make("InfNanRemoveLogitsProcessor")
    if params.exponential_decay_length_penalty is not None and eos:
        yield make("ExponentialDecayLengthPenalty", params.exponential_decay_length_penalty, eos, given)
    if params.suppress_tokens:
        yield shared("SuppressTokensLogitsProcessor", params.suppress_tokens, device=str(device))
    if params.begin_suppress_tokens:
        begin = given + (given == 1 and params.forced_bos_token_id is not None)
        yield make("SuppressTokensAtBeginLogitsProcessor", params.begin_suppress_tokens, begin, device=str(device))


def _shaping(params: SamplingParams, library: Library, device: torch.device) -> Iterator[Step]:
    """What comes last. The part for sampling shapes the distribution, and always leaves some token that was there."""
    if params.do_sample:
        yield from _warpers(params, library, device)
    if params.renormalize_logits:
        yield Step("LogitNormalization", lambda ids, scores: scores.log_softmax(-1))


def _warpers(params: SamplingParams, library: Library, device: torch.device) -> Iterator[Step]:
    if params.temperature != 1.0:
        yield Step("TemperatureLogitsWarper", lambda ids, scores: scores / params.temperature)
    if params.top_h is not None:
        yield library.make("TopHLogitsWarper", params.top_h)
    for wanted, name, warp, amount in (
        (params.top_k > 0, "TopKLogitsWarper", top_k, params.top_k),
        (params.top_p < 1.0, "TopPLogitsWarper", top_p, params.top_p),
        (params.min_p > 0.0, "MinPLogitsWarper", min_p, params.min_p),
    ):
        if wanted:
            yield Step(name, _ignoring_ids(warp, amount))
    if params.typical_p < 1.0:
        yield library.make("TypicalLogitsWarper", params.typical_p)
    if 0.0 < params.epsilon_cutoff < 1.0:
        yield library.make("EpsilonLogitsWarper", params.epsilon_cutoff)
    if 0.0 < params.eta_cutoff < 1.0:
        yield library.make("EtaLogitsWarper", params.eta_cutoff, device=str(device))


def _ignoring_ids(warp: Callable[[Any, Tensor], Tensor], amount: float) -> Processor:
    return lambda ids, scores: warp(amount, scores)


def penalise(penalty: float, padding: int, ids: Tensor, scores: Tensor) -> Tensor:
    """`scores` (1, vocab), those of the tokens in `ids` (1, n) after the first `padding` pushed down by `penalty`."""
    seen = ids[:, padding:]
    values = scores.gather(1, seen)
    return scores.scatter(1, seen, torch.where(values < 0, values * penalty, values / penalty))


def forbid(tokens: Tensor, until: int, ids: Tensor, scores: Tensor) -> Tensor:
    """`scores` (1, vocab) without `tokens` (m,), while `ids` (1, n) are fewer than `until`."""
    return scores.index_fill(1, tokens, NOTHING) if ids.shape[1] < until else scores


def top_k(count: int, scores: Tensor) -> Tensor:
    """The `count` highest of `scores` (1, vocab), with all that equal the last of them."""
    if count >= scores.shape[-1]:
        return scores
    return scores.masked_fill(scores < torch.topk(scores, count).values[..., -1:], NOTHING)


def top_p(mass: float, scores: Tensor) -> Tensor:
    """The likeliest of `scores` (1, vocab) that hold `mass` of the probability together, at least one."""
    ordered, order = scores.sort(descending=False)
    tail = ordered.softmax(-1).cumsum(-1) <= 1.0 - mass
    tail[..., -1] = False
    return scores.masked_fill(tail.scatter(1, order, tail), NOTHING)


def min_p(share: float, scores: Tensor) -> Tensor:
    """Those of `scores` (1, vocab) that are at least `share` times as likely as the likeliest."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill(probabilities < share * probabilities.amax(-1, keepdim=True), NOTHING)
