"""The tokens of a pass on their way through the experts of a layer, all GPU batches together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.huge import LARGE
from h2o_flexgen.kernels.experts import Choices
from h2o_flexgen.models.decoder import Decoder, Routed, Weights
from h2o_flexgen.schedule.weight_room import reads_all

_MOST = 0.9  # of a layer's experts: where tokens chose fewer the last time, none are read before they choose


class Mixture:
    """Collects what routers say of GPU batches, sorts their tokens by expert, and has results ready for each batch.

    A token's result does not depend on its neighbours: none is dropped, and it gets its experts' in their order.
    """

    def __init__(self, decoder: Decoder, gpu_batches: Sequence[GpuBatch]) -> None:
        """`gpu_batches`: of the block."""
        self._decoder, self._gpu_batches = decoder, gpu_batches
        self.step = 0
        """That they are in."""
        self.read = self.of = 0
        """Experts that were chosen, and those that there were to choose among."""
        self._few = set[int]()  # the units whose tokens chose few experts the last time
        self._parts: list[tuple[GpuBatch, Routed]] = []
        self._routed: Routed | None = None
        self._choices = Choices(torch.empty(0), torch.empty(0), [], [])
        self._pending: dict[int, Tensor] = {}
        self._most = 1  # tokens that go through an expert at once
        self.prompt_share = 0.0
        """How much of the tokens under way is prompts."""

    def route(self, gpu_batch: GpuBatch, w: Weights) -> None:
        """Routes the tokens of a GPU batch, whose hidden states stay as they are until `finish`."""
        self._routed, self._most = None, gpu_batch.chunk
        for part in gpu_batch.take_hidden().split(gpu_batch.chunk):
            self._parts.append((gpu_batch, self._decoder.route(w, part)))

    def add(self, gpu_batch: GpuBatch, routed: Sequence[Routed]) -> None:
        """Tokens of a GPU batch that were routed elsewhere; `made` has what becomes of them."""
        self._routed, self._most = None, gpu_batch.chunk
        self._parts.extend((gpu_batch, each) for each in routed)

    def reads_ahead(self, step: int, unit: UnitSpec) -> bool:
        """Whether tokens of `step`, this one or the next, are going to choose about all experts of `unit`: there are
        enough of them, and they did so before."""
        tokens = (
            gpu_batch.decoding + gpu_batch.prompt_tokens if step == self.step else len(gpu_batch.rows)
            for gpu_batch in self._gpu_batches
            if not gpu_batch.finished
        )
        return unit.index not in self._few and reads_all(self._decoder.spec, sum(tokens))

    def chosen(self, unit: UnitSpec) -> list[int]:
        """The experts of `unit` that any token of the pass chose, ascending."""
        parts = [routed for _, routed in self._parts]
        whole = parts[0] if len(parts) == 1 else Routed(*(LARGE.joined(each) for each in zip(*parts, strict=True)))
        tokens = Counter[int]()
        for gpu_batch, routed in self._parts:
            tokens[gpu_batch.index] += len(routed.x)
        outs = whole.out.split(list(tokens.values()))
        self._pending = dict(zip(tokens, outs, strict=True))
        prompts = {gpu_batch.index: gpu_batch.prompt_share for gpu_batch, _ in self._parts}
        self.prompt_share = sum(tokens[index] * share for index, share in prompts.items()) / len(whole.x)
        self._parts.clear()
        self._routed, self._choices = whole, Choices.of(whole.experts, whole.shares)
        numbers = self._choices.numbers
        self.read += len(numbers)
        self.of += len(unit.experts)
        (self._few.add if len(numbers) < _MOST * len(unit.experts) else self._few.discard)(unit.index)
        return numbers

    def compute(self, experts: Sequence[int], weights: Sequence[Weights]) -> None:
        """The results of some experts that follow one another among those chosen, for the tokens of all GPU batches."""
        if self._routed is None:
            raise RuntimeError("no tokens have been routed")
        first = self._choices.numbers.index(experts[0])
        places = range(first, first + len(experts))
        self._decoder.add_experts(self._routed, self._choices, places, weights, self._most)

    def made(self, gpu_batch: GpuBatch) -> Tensor | None:
        """What experts have made of the GPU batch's tokens (T, H), once; None: nothing new."""
        out = self._pending.pop(gpu_batch.index, None)
        if out is not None:
            self._routed = None
        return out

    def finish(self, gpu_batch: GpuBatch) -> None:
        """Adds to the GPU batch's hidden states what its experts have made, if that is still to be done."""
        out = self.made(gpu_batch)
        if out is not None:
            self._decoder.add_mixture(gpu_batch.take_hidden(), out)
