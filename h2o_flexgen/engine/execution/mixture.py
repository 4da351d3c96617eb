"""Mixtures of experts: the tokens of all GPU batches go through a layer's experts together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.errors import required
from h2o_flexgen.huge import LARGE
from h2o_flexgen.kernels.experts import Choices
from h2o_flexgen.models.decoder import Decoder, Routed, Weights
from h2o_flexgen.schedule.weight_room import reads_all

_NONE = "no tokens have been routed"
_MOST = 0.9  # of a layer's experts: where tokens chose fewer the last time, none are read before they choose


class Mixture:
    """Collects routed tokens of GPU batches, computes them expert by expert, and hands the results to each batch.

    A token's result does not depend on its neighbours: none is dropped, and experts' results add up in their order.
    """

    def __init__(self, decoder: Decoder, gpu_batches: Sequence[GpuBatch]) -> None:
        self._decoder, self._gpu_batches = decoder, gpu_batches
        self.step = 0
        self._few = set[int]()  # the units whose tokens chose few experts the last time
        self._parts: list[tuple[GpuBatch, int, Tensor, Tensor, Tensor | None]] = []  # tokens, and `Routed` without x
        self._x: Tensor | None = None  # of the parts together, or of all that there will be
        self._out: Tensor | None = None
        self._choices = Choices(torch.empty(0), torch.empty(0), [], [])
        self._pending: dict[int, Tensor] = {}
        self._most = 1  # tokens that go through an expert at once
        self.prompt_share = 0.0
        """The share of prompts in the tokens under way."""

    def route(self, gpu_batch: GpuBatch, w: Weights) -> None:
        """Routes the tokens of a GPU batch; `finish` updates its hidden states."""
        for part in gpu_batch.take_hidden().split(gpu_batch.chunk):
            self.add(gpu_batch, [self._decoder.route(w, part)])

    def add(self, gpu_batch: GpuBatch, routed: Sequence[Routed]) -> None:
        """Adds routed tokens of a GPU batch; `made` returns their results."""
        self._out, self._most = None, gpu_batch.chunk
        for each in routed:
            self._gather(each.x)
            self._parts.append((gpu_batch, len(each.x), each.experts, each.shares, each.shared))

    def _gather(self, x: Tensor) -> None:
        """Appends x (T, H) to that of the parts before, without a second copy of a large block's tokens."""
        first, there = sum(count for _, count, *_ in self._parts), self._x
        if first == 0:
            wanted = max(len(x), self._tokens())
            self._x = there = x if wanted == len(x) else LARGE.like(x, wanted)
        elif there is not None and first + len(x) > len(there):
            self._x = LARGE.like(x, first + len(x))
            self._x[:first] = there[:first]
        if self._x is not None and self._x is not x:
            self._x[first : first + len(x)] = x

    def _tokens(self, *, now: bool = True) -> int:
        """Tokens of unfinished GPU batches, in this step or in the next."""
        going = [gpu_batch for gpu_batch in self._gpu_batches if not gpu_batch.finished]
        return sum(each.decoding + each.prompt_tokens if now else len(each.rows) for each in going)

    def reads_ahead(self, step: int, unit: UnitSpec) -> bool:
        """Whether tokens of `step`, this one or the next, will choose nearly all experts of `unit`: they are enough,
        and did so the last time."""
        tokens = self._tokens(now=step == self.step)
        return unit.index not in self._few and reads_all(self._decoder.spec, tokens)

    def chosen(self, unit: UnitSpec) -> list[int]:
        """The experts of `unit` that any token of the pass chose, ascending."""
        batches, counts, experts, shares, shared = zip(*self._parts, strict=True)
        tokens, prompts = Counter[int](), {each.index: each.prompt_share for each in batches}
        for gpu_batch, count in zip(batches, counts, strict=True):
            tokens[gpu_batch.index] += count
        total = sum(counts)
        self.prompt_share = sum(tokens[index] * share for index, share in prompts.items()) / total
        self._parts.clear()
        self._x = required(self._x, _NONE)[:total]
        self._out = LARGE.like(self._x).zero_() if shared[0] is None else LARGE.joined(shared)
        self._pending = dict(zip(tokens, self._out.split(list(tokens.values())), strict=True))
        self._choices = Choices.of(LARGE.joined(experts), LARGE.joined(shares))
        numbers = self._choices.numbers
        (self._few.add if len(numbers) < _MOST * len(unit.experts) else self._few.discard)(unit.index)
        return numbers

    def compute(self, experts: Sequence[int], weights: Sequence[Weights]) -> None:
        """Computes neighbours among the chosen experts, for the tokens of all GPU batches."""
        first = self._choices.numbers.index(experts[0])
        places = range(first, first + len(experts))
        x, out = required(self._x, _NONE), required(self._out, _NONE)
        self._decoder.add_experts(x, out, self._choices, places, weights, self._most)

    def made(self, gpu_batch: GpuBatch) -> Tensor | None:
        """The results for the GPU batch's tokens (T, H), once; None if none are pending."""
        out = self._pending.pop(gpu_batch.index, None)
        if out is not None:
            self._x = self._out = None
        return out

    def finish(self, gpu_batch: GpuBatch) -> None:
        """Adds pending results to the GPU batch's hidden states."""
        out = self.made(gpu_batch)
        if out is not None:
            self._decoder.add_mixture(gpu_batch.take_hidden(), out)
