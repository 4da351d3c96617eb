"""Chooses the next token of every row of a GPU batch, and decides which rows are done."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.engine.requests.grammars import Guide
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.requests.tokenizer import Decode, find_stop
from h2o_flexgen.engine.sampling.processors import Chooser, Group, Made, Usual, guided, pick, rows_of, sent
from h2o_flexgen.kernels.layers import largest, likeliest, logprobs, takes_scores

_CHUNK = 1 << 20  # log-probabilities that torch makes at once


class Sampler:
    """Appends one token per unfinished row, in place. A row's choice depends on its own logits and generator.

    A step copies once from the device, for likeliest tokens and groups of rows with usual settings; rows with special
    settings and log-probabilities cost one more copy each. Serves one call of the engine: `max_time` counts from its
    first `start`.
    """

    def __init__(self, decode: Decode | None = None) -> None:
        self._decode = decode
        self._made = Made()
        self._groups: dict[Usual, Group] = {}
        self._started: float | None = None

    def start(self) -> None:
        """Starts the clock of `max_time`, if it does not run yet."""
        self._started = self._started or time.perf_counter()

    def step(self, rows: SequenceOf[Sequence], logits: Tensor) -> list[Sequence]:
        """logits: (b, vocab) float32. Returns the sequences that finished in this step."""
        self.start()
        going, together, own, plain = list[int](), dict[Usual, list[int]](), dict[int, Chooser](), list[int]()
        for r, row in enumerate(rows):
            if row.finished or row.take_fed():
                continue
            going.append(r)
            chooser = self._chooser(row, logits)
            if isinstance(chooser, Usual):
                together.setdefault(chooser, []).append(r)
            elif chooser is not None:
                own[r] = chooser
            elif row.guide is not None and not row.given:
                plain.append(r)
        asked = list(largest(logits))
        for usual, members in together.items():
            if usual not in self._groups:
                self._groups[usual] = Group(usual, rows[members[0]].params, logits.device)
            asked.append(self._groups[usual].choose([rows[r] for r in members], logits, members))
        best, tokens, *drawn = lists(asked)
        for members, chosen in zip(together.values(), drawn, strict=True):
            for r, token in zip(members, chosen, strict=True):
                tokens[r] = token
        # Most of the likeliest tokens are allowed; the scores of a row are masked only where its own is not.
        if barred := [r for r in plain if _usable(rows[r], best[r]) and not rows[r].guide.tries(tokens[r])]:
            for r, token in zip(barred, _allowed(rows, barred, logits), strict=True):
                tokens[r] = token
        own = {r: chooser for r, chooser in own.items() if _usable(rows[r], best[r])}
        if own:
            (chosen,) = lists([torch.cat([each.choose(rows[r], logits[r : r + 1]) for r, each in own.items()])])
            for r, token in zip(own, chosen, strict=True):
                tokens[r] = token
        return self._settle(rows, going, best, tokens, logits)

    def take(self, rows: SequenceOf[Sequence], best: list[float], tokens: list[int]) -> list[Sequence]:
        """`step` of rows that all take the likeliest token: `best` logits and their `tokens`."""
        self.start()
        return self._settle(rows, [r for r, row in enumerate(rows) if not row.finished], best, tokens, None)

    def _chooser(self, row: Sequence, logits: Tensor) -> Chooser | Usual | None:
        """The chooser of `row` at this step; None: the largest logit is the answer, or none is needed."""
        if not row.prepared:
            row.prepared = True
            if row.forced is None:
                row.chooser = Usual.of(row) or Chooser(row, self._made, logits.device)
        if row.grammar is not None and row.guide is None and not row.thinks:
            row.guide = Guide(row, logits.shape[1])
        if isinstance(row.chooser, Usual):
            row.chooser = row.chooser.after(len(row.token_ids))
        return row.chooser

    def _settle(
        self,
        rows: SequenceOf[Sequence],
        going: SequenceOf[int],
        best: list[float],
        tokens: list[int],
        logits: Tensor | None,
    ) -> list[Sequence]:
        """Appends the `tokens` chosen, negative if none is allowed; best: the largest logits, by row. logits: for
        log-probabilities; None: no row asks for them."""
        taken: dict[int, int] = {}
        sampled = {r for r in going if not rows[r].given}
        for r in going:
            row, token = rows[r], tokens[r]
            if not _usable(row, best[r]):
                row.fail("the model produced logits that are not finite", "numbers")
                continue
            if row.guide is not None and row.guide.error:
                row.fail(row.guide.error, row.guide.fault)
                continue
            if row.forced is not None:
                row.greedy.append(row.forced[len(row.token_ids)] == token)
                token = row.forced[len(row.token_ids)]
            elif row.given:
                token = row.given.pop(0)
            elif row.grammar is not None and token in row.eos and row.thinks:
                row.close_thought()
                token = row.given.pop(0)
            if token < 0:
                if row.guide is None:
                    row.fail("its settings forbid every token", "settings")
                else:
                    row.fail("its response_format and other settings forbid every token", "response_format")
            else:
                taken[r] = int(token)
        if logits is not None:
            _record_logprobs(rows, taken, logits)
        for r, token in taken.items():
            self._append(rows[r], token, sampled=r in sampled)
        if guiding := [rows[r] for r in taken if rows[r].guide is not None and rows[r].finish_reason is None]:
            guiding[0].guide.follow(guiding)
        return [rows[r] for r in going if rows[r].finished]

    def _append(self, row: Sequence, token: int, *, sampled: bool) -> None:
        row.append(token, sampled=sampled)
        stopped = isinstance(row.chooser, Chooser) and row.chooser.chosen(row)
        if row.hooks is not None and row.hooks.on_token is not None and len(row.token_ids) > row.hooks.told:
            row.hooks.told = len(row.token_ids)
            row.hooks.on_token(token)
        params = row.params
        if row.forced is None:
            stopped = stopped or (token in row.eos and not params.ignore_eos)
            stopped = stopped or (row.guide is not None and row.guide.ends_with(token))
            if params.stop_strings and self._decode is not None and not stopped:
                row.stop_string = find_stop(self._decode, row)
            if stopped or row.stop_string is not None:
                row.finish_reason = "stop"
                return
        late = params.max_time is not None and time.perf_counter() - (self._started or 0.0) > params.max_time
        if late or len(row.token_ids) >= row.max_new_tokens:
            row.finish_reason = "length"


def lists(tensors: SequenceOf[Tensor]) -> list[list[Any]]:
    """The numbers in tensors of one device, by one copy. From a GPU integers come as floats."""
    if tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    return unpacked(pack(tensors).cpu(), tensors)


def pack(tensors: SequenceOf[Tensor]) -> Tensor:
    """Numbers one after the other as float64, which holds every float32 and token id."""
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


def unpacked(packed: Tensor, tensors: SequenceOf[Tensor]) -> list[list[Any]]:
    """The numbers of `pack`, in the shapes of `tensors`."""
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).tolist() for part, tensor in zip(parts, tensors, strict=True)]


def _usable(row: Sequence, best: float) -> bool:
    """Whether a token can be chosen from logits whose largest is `best`."""
    return math.isfinite(best) or row.params.remove_invalid_values


def _allowed(rows: SequenceOf[Sequence], barred: list[int], logits: Tensor) -> list[int]:
    """The likeliest tokens that the grammars of these rows allow, negative if there is none."""
    if takes_scores(logits):
        return [likeliest(logits[r], rows[r].guide.mask) for r in barred]
    allowed = guided([rows[r] for r in barred], rows_of(logits, barred))
    return lists([pick(allowed, None)])[0]


def _record_logprobs(rows: SequenceOf[Sequence], tokens: Mapping[int, int], logits: Tensor) -> None:
    """Log-probabilities under the model itself, before penalties and temperature, of `tokens` by row."""
    wanted: dict[int, list[int]] = {}
    for r in tokens:
        if rows[r].forced is not None or rows[r].params.logprobs is not None:
            wanted.setdefault(rows[r].params.logprobs or 0, []).append(r)
    find, many = (logprobs, len(rows)) if takes_scores(logits) else (_by_torch, max(1, _CHUNK // logits.shape[1]))
    for count, members in wanted.items():
        parts = (members[i : i + many] for i in range(0, len(members), many))
        found = zip(*(find(logits, part, [tokens[r] for r in part], count) for part in parts), strict=True)
        for r, (logprob, *top), ids in zip(members, *lists([torch.cat(each) for each in found]), strict=True):
            rows[r].logprobs.append(logprob)
            if count:
                rows[r].top_logprobs.append(dict(zip(map(int, ids), top, strict=True)))


def _by_torch(logits: Tensor, rows: list[int], tokens: list[int], count: int) -> tuple[Tensor, Tensor]:
    """`kernels.layers.logprobs` on any device."""
    found = rows_of(logits, rows).log_softmax(-1)
    top = found.topk(count)
    return torch.cat([found.gather(1, sent(tokens, logits.device)[:, None]), top.values], dim=1), top.indices
