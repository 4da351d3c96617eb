"""Chooses the next token of every row of a GPU batch and decides which rows are done."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from h2o_flexgen.engine.processors import Library, make_chooser
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.engine.text import Decode, find_stop


class Sampler:
    """Appends one token per unfinished row, in place. A row's choice depends on its own logits and generator.

    One serves one call of the engine: `max_time` counts from its first `start`.
    """

    def __init__(self, decode: Decode | None = None) -> None:
        self._decode = decode
        self._library = Library()
        self._started: float | None = None

    def start(self) -> None:
        """The clock of `max_time` runs from now on, if it does not yet."""
        self._started = self._started or time.perf_counter()

    def step(self, rows: SequenceOf[Sequence], logits: Tensor) -> list[Sequence]:
        """`logits` (b, vocab) float32, one row per sequence. Returns the sequences that finished in this step."""
        self.start()
        best, greedy = torch.max(logits, dim=-1)
        bad = (~torch.isfinite(best)).tolist()
        choices = greedy.tolist()
        done: list[Sequence] = []
        for r, row in enumerate(rows):
            if row.finished or row.take_fed():
                continue
            if bad[r] and not row.params.remove_invalid_values:
                row.finish_reason, row.error = "error", "the model produced logits that are not finite"
            else:
                self._advance(row, logits[r], choices[r])
            if row.finished:
                done.append(row)
        return done

    def _advance(self, row: Sequence, logits: Tensor, greedy: int) -> None:
        if not row.prepared:
            row.chooser, row.prepared = make_chooser(row, self._library, logits.device), True
        chooser = row.chooser
        if chooser is not None and len(row.token_ids) >= chooser.until:
            chooser = row.chooser = None
        token: int | None = greedy
        if row.forced is not None:
            token = row.forced[len(row.token_ids)]
            row.greedy.append(token == greedy)
        elif chooser is not None:
            token = chooser.choose(row, logits)
        if token is None:
            row.finish_reason, row.error = "error", "its settings forbid every token"
            return
        if row.forced is not None or row.params.logprobs is not None:
            _record_logprobs(row, logits, token)
        row.token_ids.append(token)
        stopped = chooser is not None and chooser.chosen(row)
        if row.hooks is not None and row.hooks.on_token is not None and len(row.token_ids) > row.hooks.told:
            row.hooks.told = len(row.token_ids)
            row.hooks.on_token(token)
        self._finish(row, token, stopped)

    def _finish(self, row: Sequence, token: int, stopped: bool) -> None:
        params = row.params
        if row.forced is None:
            stopped = stopped or (token in row.eos and not params.ignore_eos)
            if params.stop_strings and self._decode is not None and not stopped:
                row.stop_string = find_stop(self._decode, row)
            if stopped or row.stop_string is not None:
                row.finish_reason = "stop"
                return
        late = params.max_time is not None and time.perf_counter() - (self._started or 0.0) > params.max_time
        if late or len(row.token_ids) >= row.max_new_tokens:
            row.finish_reason = "length"


def _record_logprobs(row: Sequence, logits: Tensor, token: int) -> None:
    """Log-probabilities under the model itself, before penalties and temperature."""
    logprobs = logits.log_softmax(-1)
    row.logprobs.append(float(logprobs[token]))
    if row.params.logprobs:
        values, ids = logprobs.topk(row.params.logprobs)
        row.top_logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
