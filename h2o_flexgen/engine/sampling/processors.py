"""From logits to the next token: the processors of transformers' `generate`, in its order.

The usual ones are plain torch and serve all rows with equal settings together; the rare ones are transformers' own
classes, row by row. Choosing by the usual ones (`Group`) does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.sequence import Hooks, Processor, Sequence
from h2o_flexgen.kernels.layers import SOME_OF_EQUAL, drawn, largest, takes_scores

NOTHING = float("-inf")
"""The score of a token that cannot be chosen."""
_CHUNK = 1 << 20  # scores of rows that are processed together: sorting them takes some 25 bytes each


_DRAWN = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"}
"""Processors that `kernels.layers.drawn` stands for."""


def sent(numbers: list[Any], device: torch.device) -> Tensor:
    """Host integers as a tensor on `device`, without waiting for it."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


class LogitsStep(NamedTuple):
    """A processor under the name of transformers' class; a caller's own processor of that class replaces it."""

    name: str
    apply: Processor


Made = WeakValueDictionary[tuple[Any, ...], Any]
"""Processors that rows with equal settings share, as long as one runs: some hold a bias as large as the vocabulary."""


def make(name: str, *args: Any, **options: Any) -> LogitsStep:
    """One of transformers' processors."""
    from transformers.generation import logits_process

    return LogitsStep(name, getattr(logits_process, name)(*args, **options))


class Usual(NamedTuple):
    """The settings of most rows that need more than the largest logit. eos: forbidden before `min_new_tokens`."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    renormalize_logits: bool
    repetition_penalty: float
    min_new_tokens: int
    eos: tuple[int, ...]

    @classmethod
    def of(cls, row: Sequence) -> Usual | None:
        """None for a row with other settings, or with hooks on its scores."""
        if not row.params.usual or _watched(row.hooks):
            return None
        values = [getattr(row.params, name) for name in cls._fields[:-1]]
        return cls._make([*values, tuple(sorted(row.eos))])

    def after(self, tokens: int) -> Usual | None:
        """The settings that still matter after so many new tokens; None: the largest logit is the answer."""
        rest = self._replace(min_new_tokens=0, eos=()) if tokens >= self.min_new_tokens or not self.eos else self
        return rest if rest.do_sample or rest.repetition_penalty != 1.0 or rest.eos else None


class Last:
    """The last steps to a token, of rows with equal settings for them: sampling, which always leaves a token, and
    normalisation."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._params = params
        self._steps = [*(_warpers(params, device) if params.do_sample else ())]
        self._native = params.do_sample and all(step.name in _DRAWN for step in self._steps)
        if params.renormalize_logits:
            self._steps.append(LogitsStep("LogitNormalization", lambda ids, scores: scores.log_softmax(-1)))

    def draws(self, scores: Tensor) -> bool:
        """Whether the kernel draws tokens by `scores`."""
        return self._native and takes_scores(scores)

    def drawn(self, rows: SequenceOf[Sequence], scores: Tensor, members: SequenceOf[int], ids: Tensor) -> Tensor:
        """The tokens of rows whose scores are the `members` of `scores`, without what their grammars forbid."""
        numbers, names = numbers_of(rows, scores.device), ("temperature", "top_k", "top_p", "min_p")
        allowed = [None if row.guide is None else row.guide.mask for row in rows]
        tokens = drawn(scores, members, numbers, allowed, **{name: getattr(self._params, name) for name in names})
        for r in np.flatnonzero(tokens.numpy() == SOME_OF_EQUAL).tolist():
            one = slice(r, r + 1)
            left = self.left(ids[one], guided(rows[one], rows_of(scores, members[one])))
            tokens[r] = pick(left, numbers[one])
        return tokens

    def left(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The scores (n, vocab) of tokens that may be chosen; -inf for others."""
        for step in self._steps:
            scores = step.apply(ids, scores)
        return scores

    def chosen(self, rows: SequenceOf[Sequence], scores: Tensor) -> Tensor:
        """The tokens of rows by what is `left` of their scores (n, vocab)."""
        return pick(scores, numbers_of(rows, scores.device) if self._params.do_sample else None)


class Group:
    """Chooses the tokens of rows with equal usual settings, each as if it were alone. Owns their ids on the logits'
    device, for a repetition penalty. Rows may come and go."""

    def __init__(self, usual: Usual, params: SamplingParams, device: torch.device) -> None:
        self._usual, self._device = usual, device
        self._eos = torch.tensor(usual.eos, dtype=torch.int64, device=device)
        self._last = Last(params, device)
        self._known: list[tuple[int, int]] = []  # of each row: which it is, and its number of new tokens
        self._ids = torch.empty(0)

    def choose(self, rows: SequenceOf[Sequence], logits: Tensor, members: SequenceOf[int]) -> Tensor:
        """Tokens (m,) int64 for m rows whose scores are the `members` of `logits` (n, vocab) float32, ascending, which
        are not changed; negative if none is allowed."""
        penalised = self._usual.repetition_penalty != 1.0
        if penalised:
            self._find(rows)
        elif self._last.draws(logits) and not self._usual.eos:
            return self._last.drawn(rows, logits, members, self._ids)  # of which none is copied
        many = max(1, _CHUNK // logits.shape[1])
        parts = (slice(i, min(i + many, len(rows))) for i in range(0, len(rows), many))
        tokens = [self._choose(rows[part], rows_of(logits, members[part]), self._ids[part]) for part in parts]
        found = torch.cat(tokens) if len(tokens) > 1 else tokens[0]
        if penalised:
            self._ids = torch.cat([self._ids, found.clamp(min=0).unsqueeze(1)], dim=1)
            # Rows that get tokens given do not get those found here.
            asked = any(row.given or row.thinks for row in rows)
            self._known = [] if asked else [(row, new + 1) for row, new in self._known]
        return found

    def _choose(self, rows: SequenceOf[Sequence], scores: Tensor, ids: Tensor) -> Tensor:
        if self._usual.repetition_penalty != 1.0:
            scores = penalise(self._usual.repetition_penalty, 0, ids, scores)
        if self._usual.eos:
            scores = scores.index_fill(1, self._eos, NOTHING)
        if self._last.draws(scores):
            return self._last.drawn(rows, scores, range(len(rows)), ids)
        return self._last.chosen(rows, self._last.left(ids, guided(rows, scores)))

    def _find(self, rows: SequenceOf[Sequence]) -> None:
        """Makes `_ids` (n, most) of `rows`, in any order, padded with an id of the row's own."""
        wanted = [(row.row_id, len(row.token_ids)) for row in rows]
        if wanted == self._known:
            return
        known = {key: place for place, key in enumerate(self._known)}
        if all(key in known for key in wanted):
            self._ids = self._ids.index_select(0, sent([known[key] for key in wanted], self._device))
        else:
            seen = [sorted({*(_context(row)), *row.token_ids}) for row in rows]
            most = max(map(len, seen))
            self._ids = sent([ids + ids[:1] * (most - len(ids)) for ids in seen], self._device)
        self._known = wanted


def rows_of(logits: Tensor, rows: SequenceOf[int]) -> Tensor:
    """Some rows, ascending; without a copy if they are neighbours."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return logits[rows[0] : rows[-1] + 1]
    return logits.index_select(0, sent([*rows], logits.device))


def guided(rows: SequenceOf[Sequence], scores: Tensor) -> Tensor:
    """A copy of `scores` (n, vocab) float32 with -inf for tokens that their rows' grammars forbid; `scores` where none
    has a grammar."""
    if all(row.guide is None for row in rows):
        return scores
    allowed = np.ones(scores.shape, dtype=np.bool_)
    for bits, row in zip(allowed, rows, strict=True):
        if row.guide is not None:
            bits[:] = np.unpackbits(row.guide.mask.numpy().view(np.uint8)[0], count=bits.size, bitorder="little")
    return torch.where(torch.from_numpy(allowed).to(scores.device, non_blocking=True), scores, NOTHING)


def numbers_of(rows: SequenceOf[Sequence], device: torch.device) -> Tensor:
    """A number of each row's generator, (n,) float64, from 0 to below 1."""
    like = torch.empty(1, dtype=torch.float64, device=device)
    return torch.cat([like.clone().uniform_(generator=row.generator(device)) for row in rows])


def pick(scores: Tensor, numbers: Tensor | None) -> Tensor:
    """The likeliest token of each row of `scores` (n, vocab), or one drawn by its number: (n,) int64, negative if none
    is allowed."""
    if numbers is None:
        best, tokens = largest(scores)
        return torch.where(best.isfinite(), tokens, -1)
    # By one number of each row. torch.multinomial draws one for each token, which took longer than some models' steps,
    # waits for the device, and takes one generator for all.
    sums = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # Rounded, a product may be the total, behind which no token is.
    place = torch.minimum(numbers.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(sums, place, right=True)
    return torch.where(total.isnan(), -1, tokens).squeeze(-1)


class Chooser:
    """Picks the tokens of one row with special settings. Owns the row's ids on the logits' device."""

    def __init__(self, row: Sequence, made: Made, device: torch.device) -> None:
        self._hooks = row.hooks
        context = row.hooks.context if row.hooks else row.given_ids
        self._given = len(context)
        known = torch.tensor(context + row.token_ids, dtype=torch.int64)
        self._ids = torch.zeros(1, self._given + row.max_new_tokens, dtype=torch.int64, device=device)
        self._ids[0, : known.numel()] = known.to(device)
        self._steps = _corrected(row, context, made, device)
        self._last = Last(row.params, device)

    def choose(self, row: Sequence, logits: Tensor) -> Tensor:
        """A token (1,) for `logits` (1, vocab) float32, which are not changed; negative if none is allowed."""
        scores, ids = logits, self._ids[:, : self._given + len(row.token_ids)]
        for step in self._steps:
            scores = step.apply(ids, scores)
        if self._hooks is None and self._last.draws(scores):
            return self._last.drawn([row], scores, [0], ids)
        scores = self._last.left(ids, guided([row], scores))
        if self._hooks is not None:
            self._record(self._hooks, logits[0], scores[0])
        return self._last.chosen([row], scores)

    def chosen(self, row: Sequence) -> bool:
        """Takes the row's last token; returns whether one of the caller's criteria stops the row."""
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


def _watched(hooks: Hooks | None) -> bool:
    """Whether the caller's code sees or changes scores."""
    if hooks is None:
        return False
    own = hooks.prefix is not None or hooks.processors or hooks.criteria
    return bool(own or hooks.logits is not None or hooks.scores is not None)


def _context(row: Sequence) -> list[int]:
    """The prompt, without padding."""
    return row.hooks.context[row.hooks.padding :] if row.hooks else row.given_ids


def _corrected(row: Sequence, context: list[int], made: Made, device: torch.device) -> list[LogitsStep]:
    """`_corrections`, then the caller's processors, which replace ours of the same class."""
    steps = list(_corrections(row, context, made, device))
    own = list(row.hooks.processors) if row.hooks else []
    for i, step in enumerate(steps):
        same = next((processor for processor in own if type(processor).__name__ == step.name), None)
        if same is not None:
            steps[i] = LogitsStep(step.name, same)
    placed = [step.apply for step in steps]
    return steps + [LogitsStep(type(processor).__name__, processor) for processor in own if processor not in placed]


def _corrections(row: Sequence, context: list[int], made: Made, device: torch.device) -> Iterator[LogitsStep]:
    """Processors of greedy and sampled rows. context: the prompt with the caller's padding."""
    params, given = row.params, len(context)
    eos = sorted(row.eos)

    def shared(name: str, settings: Any, *args: Any, **options: Any) -> LogitsStep:
        key = name, settings, row.eos, device
        made[key] = apply = made.get(key) or make(name, *args, **options).apply
        return LogitsStep(name, apply)

    if params.sequence_bias:
        bias = {word: float(value) for word, value in params.sequence_bias}
        yield shared("SequenceBiasLogitsProcessor", params.sequence_bias, sequence_bias=bias)
    prompt = torch.tensor([context], device=device)
    if params.encoder_repetition_penalty != 1.0:
        penalty = float(params.encoder_repetition_penalty)
        yield make("EncoderRepetitionPenaltyLogitsProcessor", penalty, encoder_input_ids=prompt)
    if params.repetition_penalty != 1.0:
        padding = row.hooks.padding if row.hooks else 0
        yield LogitsStep("RepetitionPenaltyLogitsProcessor", partial(penalise, params.repetition_penalty, padding))
    if params.presence_penalty or params.frequency_penalty:
        yield LogitsStep("", partial(lessen, params.presence_penalty, params.frequency_penalty, given))
    if params.no_repeat_ngram_size:
        yield make("NoRepeatNGramLogitsProcessor", params.no_repeat_ngram_size)
    if params.encoder_no_repeat_ngram_size:
        yield make("EncoderNoRepeatNGramLogitsProcessor", params.encoder_no_repeat_ngram_size, prompt)
    # An eos alone is no bad word: it is what ends the sequence.
    if bad := [list(word) for word in params.bad_words_ids if word not in {(token,) for token in eos}]:
        yield shared("NoBadWordsLogitsProcessor", params.bad_words_ids, bad)
    if params.min_new_tokens and eos:
        until = given + params.min_new_tokens
        yield LogitsStep("MinNewTokensLengthLogitsProcessor", partial(forbid, torch.tensor(eos, device=device), until))
    if row.hooks is not None and row.hooks.prefix is not None:
        yield LogitsStep("PrefixConstrainedLogitsProcessor", row.hooks.prefix)
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
        barred = params.suppress_tokens
        yield shared("SuppressTokensLogitsProcessor", barred, barred, device=str(device))
    if params.begin_suppress_tokens:
        begin = given + (given == 1 and params.forced_bos_token_id is not None)
        yield make("SuppressTokensAtBeginLogitsProcessor", params.begin_suppress_tokens, begin, device=str(device))


def _warpers(params: SamplingParams, device: torch.device) -> Iterator[LogitsStep]:
    if params.temperature != 1.0:
        yield LogitsStep("TemperatureLogitsWarper", lambda ids, scores: scores / params.temperature)
    if params.top_h is not None:
        yield make("TopHLogitsWarper", params.top_h)
    if params.top_k > 0:
        yield LogitsStep("TopKLogitsWarper", lambda ids, scores: top_k(params.top_k, scores))
    if params.top_p < 1.0:
        yield LogitsStep("TopPLogitsWarper", lambda ids, scores: top_p(params.top_p, scores))
    if params.min_p > 0.0:
        yield LogitsStep("MinPLogitsWarper", lambda ids, scores: min_p(params.min_p, scores))
    if params.typical_p < 1.0:
        yield make("TypicalLogitsWarper", params.typical_p)
    if 0.0 < params.epsilon_cutoff < 1.0:
        yield make("EpsilonLogitsWarper", params.epsilon_cutoff)
    if 0.0 < params.eta_cutoff < 1.0:
        yield make("EtaLogitsWarper", params.eta_cutoff, device=str(device))


def penalise(penalty: float, padding: int, ids: Tensor, scores: Tensor) -> Tensor:
    """`scores` (b, vocab), lowered by `penalty` for tokens in `ids` (b, n) after the first `padding`."""
    seen = ids[:, padding:]
    values = scores.gather(1, seen)
    return scores.scatter(1, seen, torch.where(values < 0, values * penalty, values / penalty))


def lessen(presence: float, frequency: float, given: int, ids: Tensor, scores: Tensor) -> Tensor:
    """OpenAI's penalties: `scores` (b, vocab) less `presence` for each token in `ids` (b, n) after the first `given`,
    and less `frequency` for each time it is there."""
    new = ids[:, given:]
    counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
    return scores.scatter(1, new, scores.gather(1, new) - frequency * counts.gather(1, new) - presence)


def forbid(tokens: Tensor, until: int, ids: Tensor, scores: Tensor) -> Tensor:
    """`scores` (1, vocab) without `tokens` (m,) while `ids` (1, n) are fewer than `until`."""
    return scores.index_fill(1, tokens, NOTHING) if ids.shape[1] < until else scores


def top_k(count: int, scores: Tensor) -> Tensor:
    """The `count` highest of `scores` (b, vocab), ties included."""
    if count >= scores.shape[-1]:
        return scores
    return scores.masked_fill(scores < torch.topk(scores, count).values[..., -1:], NOTHING)


def top_p(mass: float, scores: Tensor) -> Tensor:
    """The likeliest of `scores` (b, vocab) with `mass` of the probability together, at least one."""
    if scores.device.type == "cpu":  # numpy sorts values many times as fast, but not places
        ordered = scores.clone()
        ordered.numpy().sort()
        gone = _tail(mass, ordered).sum(-1, keepdim=True)
        least = ordered.gather(-1, gone)
        tied = (ordered.gather(-1, (gone - 1).clamp(min=0)) == least) & (gone > 0)
        if not tied.numpy().any():
            return scores.masked_fill(scores < least, NOTHING)
    ordered, order = scores.sort(descending=False)
    tail = _tail(mass, ordered)
    return scores.masked_fill(tail.scatter(1, order, tail), NOTHING)


def _tail(mass: float, ordered: Tensor) -> Tensor:
    """Which of the `ordered` scores (b, vocab), lowest first, are left out by `top_p`."""
    tail = ordered.softmax(-1).cumsum(-1) <= 1.0 - mass
    tail[..., -1].zero_()
    return tail


def min_p(share: float, scores: Tensor) -> Tensor:
    """The `scores` (b, vocab) of tokens at least `share` times as likely as the likeliest; -inf for the others."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill(probabilities < share * probabilities.amax(-1, keepdim=True), NOTHING)
