"""Forwards of transformers' modules, unit by unit: one for each part of a GPU batch, suspended between two units."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.cache.ring_slots import SlotChoice
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.engine.batching.gpu_batch import AttentionPart, GpuBatch
from h2o_flexgen.engine.execution.attention import TickAttention, TickStates
from h2o_flexgen.errors import ModelError
from h2o_flexgen.kernels.types import Logits
from h2o_flexgen.models.decoder import Routed, Weights
from h2o_flexgen.models.hf.attention import Call
from h2o_flexgen.models.hf.decoder import Forward, ModuleDecoder, RowForward
from h2o_flexgen.models.hf.experts import Routing


class Passes:
    """The forwards under way, by GPU batch. Belongs to one block; `close` ends what an interrupted block leaves."""

    def __init__(self, decoder: ModuleDecoder) -> None:
        self._decoder = decoder
        self._under_way: dict[int, list[tuple[AttentionPart, Forward]]] = {}

    def begin(self, gpu_batch: GpuBatch, unit: UnitSpec, weights: Weights, tokens: Tensor, positions: Tensor) -> None:
        """The first unit of a step: `tokens` and `positions` (T,) are those of all its parts."""
        self._end(gpu_batch.index)
        ends, parts = gpu_batch.last_places(), list[tuple[AttentionPart, Forward]]()
        for part in gpu_batch.parts:
            last = [end - part.span.start for end in ends if part.span.start <= end < part.span.stop]
            wanted = torch.tensor(last, dtype=torch.int64, device=tokens.device)
            parts.append((part, self._decoder.start(tokens[part.span], positions[part.span], wanted)))
        self._under_way[gpu_batch.index] = parts
        self.go_on(gpu_batch, unit, weights)

    def attend(
        self,
        gpu_batch: GpuBatch,
        unit: UnitSpec,
        weights: Weights,
        attention: TickAttention | None,
        states: TickStates | None,
    ) -> None:
        """The first half of a layer: attention, a mixer with states, or both."""
        with self._decoder.bound(unit.index, weights):
            for part, forward in self._under_way[gpu_batch.index]:
                attend = None if attention is None else partial(_attend, attention, part)
                forward.step(unit.index, attend, None if states is None else partial(states.mix, part))

    def go_on(self, gpu_batch: GpuBatch, unit: UnitSpec, weights: Weights) -> None:
        """A unit without attention, but for the last."""
        with self._decoder.bound(unit.index, weights):
            for _, forward in self._under_way[gpu_batch.index]:
                forward.step(unit.index)

    def route(self, gpu_batch: GpuBatch, unit: UnitSpec, weights: Weights) -> list[Routed]:
        """The second half of a layer with experts, up to these: the tokens of each part."""
        found = []
        with self._decoder.bound(unit.index, weights):
            for _, forward in self._under_way[gpu_batch.index]:
                routing = forward.step(unit.index)
                if not isinstance(routing, Routing):
                    raise ModelError(f"{self._decoder.spec.name} did not ask for experts in unit {unit.index}")
                found.append(Routed(routing.x, routing.experts.long(), routing.shares.float()))
        return found

    def give(self, gpu_batch: GpuBatch, made: Tensor | None) -> None:
        """Hands the experts' results, if there are any, to the next unit."""
        if made is not None:
            forwards = self._under_way[gpu_batch.index]
            pieces = made.split([forward.routed for _, forward in forwards])
            for (_, forward), piece in zip(forwards, pieces, strict=True):
                forward.give(piece)

    def head(self, gpu_batch: GpuBatch, unit: UnitSpec, weights: Weights) -> Tensor:
        """The last unit: logits (rows, vocab) float32, in the order of the rows."""
        ends, found = gpu_batch.last_places(), dict[int, Tensor]()
        with self._decoder.bound(unit.index, weights):
            for part, forward in self._under_way[gpu_batch.index]:
                here = [end for end in ends if part.span.start <= end < part.span.stop]
                if here:  # no one looks at what the others would say
                    found.update(zip(here, forward.step(unit.index), strict=True))  # type: ignore[arg-type]
        self._end(gpu_batch.index)
        return torch.stack([found[end] for end in ends])

    def hidden(self, gpu_batch: GpuBatch) -> Tensor:
        """A copy of the next unit's inputs, (T, hidden_size)."""
        parts = [forward.hidden for _, forward in self._under_way[gpu_batch.index]]
        return torch.cat([each.flatten(0, -2) for each in parts if each is not None])

    def _end(self, index: int) -> None:
        for _, forward in self._under_way.pop(index, ()):
            forward.close()

    def close(self) -> None:
        for index in list(self._under_way):
            self._end(index)


class RowPasses(Passes):
    """As `Passes`, of sequences that go through the modules one by one, with the modules' own caches."""

    def __init__(self, decoder: ModuleDecoder) -> None:
        super().__init__(decoder)
        self._caches: dict[int, dict[int, Any]] = {}  # the modules' caches by GPU batch and row
        self._places: dict[int, list[Tensor]] = {}  # places of each row's tokens among the step's packed ones

    def begin(self, gpu_batch: GpuBatch, unit: UnitSpec, weights: Weights, tokens: Tensor, positions: Tensor) -> None:
        """Finished rows, which stay for a while, are not computed."""
        self._end(gpu_batch.index)
        before = self._caches.get(gpu_batch.index, {})
        self._caches[gpu_batch.index] = {row.row_id: before.get(row.row_id) for row in gpu_batch.rows}
        forwards, places = list[tuple[AttentionPart, Forward]](), list[Tensor]()
        for row, where in zip(gpu_batch.rows, _places_of_rows(gpu_batch), strict=True):
            if row.finished:
                continue
            cache, ids = before.get(row.row_id), tokens[where.to(tokens.device)]
            seen = len(row.prompt_ids) + len(row.token_ids) - 1 if row.token_ids else 0
            if cache is None and row.token_ids:  # they keep nothing: all tokens go again
                ids, seen = torch.tensor([*row.prompt_ids, *row.token_ids], device=tokens.device), 0
            start = sum(part.span.stop - part.span.start for part, _ in forwards)
            part = AttentionPart(slice(start, start + len(ids)), 1, None)
            forwards.append((part, self._decoder.start_alone(ids, cache, seen)))
            places.append(where)
        self._under_way[gpu_batch.index], self._places[gpu_batch.index] = forwards, places
        self.go_on(gpu_batch, unit, weights)

    def head(self, gpu_batch: GpuBatch, unit: UnitSpec, weights: Weights) -> Tensor:
        """As of packed rows; zeros for those that are finished."""
        forwards, made = iter(self._under_way[gpu_batch.index]), list[Tensor | None]()
        with self._decoder.bound(unit.index, weights):
            for row in gpu_batch.rows:
                if row.finished:
                    made.append(None)
                    continue
                forward = next(forwards)[1]
                logits = forward.step(unit.index)
                if not isinstance(forward, RowForward) or not isinstance(logits, Tensor):
                    raise ModelError(f"{self._decoder.spec.name} gave no logits")
                made.append(logits[0])
                self._caches[gpu_batch.index][row.row_id] = forward.cache
        self._end(gpu_batch.index)
        there = next(each for each in made if each is not None)
        return torch.stack([torch.zeros_like(there) if each is None else each for each in made])

    def hidden(self, gpu_batch: GpuBatch) -> Tensor:
        forwards, places = self._under_way[gpu_batch.index], self._places[gpu_batch.index]
        parts = [(each.hidden, where) for (_, each), where in zip(forwards, places, strict=True)]
        shown = [(x.flatten(0, -2)[-len(where) :], where) for x, where in parts if x is not None]
        whole = shown[0][0].new_zeros(gpu_batch.decoding + gpu_batch.prompt_tokens, shown[0][0].shape[-1])
        for x, where in shown:
            whole[where.to(x.device)] = x
        return whole

    def close(self) -> None:
        super().close()
        self._caches.clear()


def _places_of_rows(gpu_batch: GpuBatch) -> list[Tensor]:
    """The places of each row's tokens among the step's packed ones, which rows do not share."""
    found = [torch.tensor([place]) for place in range(gpu_batch.decoding)]
    prompts: list[list[Tensor]] = [[] for _ in gpu_batch.fresh]
    for segment in gpu_batch.segments:
        for i, row in enumerate(segment.rows or (segment.rows.start,)):
            first = gpu_batch.decoding + segment.start + i * segment.length
            prompts[row].append(torch.arange(first, first + segment.length))
    return [*found, *(torch.cat(each) for each in prompts)]


def _attend(attention: TickAttention, part: AttentionPart, call: Call) -> Tensor:
    """Attention of a part's tokens: decode rows to their caches, prompts to themselves."""
    choice = None if call.choice is None else SlotChoice(call.choice, call.choice.layer == call.layer)
    for each in (attention, attention.prompts):
        if each is not None:
            each.logits, each.choice = Logits(each.logits.scale, call.soft_cap, call.sinks), choice
    if attention.prompts is not None:
        attention.prompts.behind = part.rows
    if part.chunk is None:
        return attention.decode(call.q, call.k, call.v)
    return attention.part(part, call.q, call.k, call.v)
