"""Chooses the next token of every row of a GPU batch and decides which rows are done."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from h2o_flexgen.engine.sequence import Sequence

Decode = Callable[[list[int]], str]


class Sampler:
    """Appends one token per unfinished row, in place. A row's choice depends on its own logits and generator."""

    def __init__(self, decode: Decode | None = None) -> None:
        self._decode = decode

    def step(self, rows: SequenceOf[Sequence], logits: Tensor) -> list[Sequence]:
        """`logits` (b, vocab) float32, one row per sequence. Returns the sequences that finished in this step."""
        best, greedy = torch.max(logits, dim=-1)
        bad = (~torch.isfinite(best)).tolist()
        choices = greedy.tolist()
        done: list[Sequence] = []
        for r, row in enumerate(rows):
            if row.finished:
                continue
            if bad[r]:
                row.finish_reason, row.error = "error", "the model produced logits that are not finite"
            else:
                self._advance(row, logits[r], choices[r])
            if row.finished:
                done.append(row)
        return done

    def _advance(self, row: Sequence, logits: Tensor, greedy: int) -> None:
        params = row.params
        if row.forced is not None:
            token = row.forced[len(row.token_ids)]
            row.greedy.append(token == greedy)
        elif _plain(row):
            token = greedy
        else:
            token = _choose(row, logits)
        if row.forced is not None or params.logprobs is not None:
            _record_logprobs(row, logits, token)
        row.token_ids.append(token)
        self._finish(row, token)

    def _finish(self, row: Sequence, token: int) -> None:
        free, params = row.forced is None, row.params
        if free and ((token in row.eos and not params.ignore_eos) or (params.stop_strings and self._stopped(row))):
            row.finish_reason = "stop"
        elif len(row.token_ids) >= row.max_new_tokens:
            row.finish_reason = "length"

    def _stopped(self, row: Sequence) -> bool:
        """Whether a stop string has just appeared. Only a tail is decoded: a character takes four tokens at most."""
        if self._decode is None:
            return False
        longest = max(map(len, row.params.stop_strings))
        tail = self._decode(row.token_ids[-(4 * longest + 8) :])
        row.stop_string = next((s for s in row.params.stop_strings if s in tail), None)
        return row.stop_string is not None


def _plain(row: Sequence) -> bool:
    """Whether the largest logit is the answer."""
    params = row.params
    return not params.do_sample and params.repetition_penalty == 1.0 and len(row.token_ids) >= params.min_new_tokens


def _choose(row: Sequence, logits: Tensor) -> int:
    """Processes one row's logits (vocab,) in the order of transformers' generate and picks a token."""
    params = row.params
    logits = logits.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.token_ids}), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if len(row.token_ids) < params.min_new_tokens and row.eos:
        logits[torch.tensor(sorted(row.eos), device=logits.device)] = float("-inf")
    if not params.do_sample:
        return int(logits.argmax())
    logits /= params.temperature
    if 0 < params.top_k < logits.numel():
        logits.masked_fill_(logits < torch.topk(logits, params.top_k).values[-1], float("-inf"))
    if params.top_p < 1.0:
        ordered, order = logits.sort(descending=False)
        # The tail whose probability sums to at most 1 - top_p goes; the likeliest token always stays.
        tail = ordered.softmax(-1).cumsum(-1) <= 1.0 - params.top_p
        tail[-1] = False
        logits[order[tail]] = float("-inf")
    return int(torch.multinomial(logits.softmax(-1), 1, generator=row.generator(logits.device)))


def _record_logprobs(row: Sequence, logits: Tensor, token: int) -> None:
    """Log-probabilities under the model itself, before penalties and temperature."""
    logprobs = logits.log_softmax(-1)
    row.logprobs.append(float(logprobs[token]))
    if row.params.logprobs:
        values, ids = logprobs.topk(row.params.logprobs)
        row.top_logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
