"""A GPU batch: its rows, and how a step's tokens are packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.engine.batching.prefix_tree import PromptChunk, PromptSegment, chunks_of
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.errors import required
from h2o_flexgen.models.rotary import Angles, Rotary


class AttentionPart(NamedTuple):
    """Tokens of a step that go through the attention half at once: `span` of the packed hidden states, first `rows`
    decode rows, then the prompts of `chunk`, if there is one."""

    span: slice
    rows: int
    chunk: PromptChunk | None


@dataclass
class GpuBatch:
    """The sequences that go through a unit together. `BatchScheduler` changes its rows between two steps.

    A row is `fresh` in the step of its prompt, a decode row afterwards. Tokens are packed without padding: one token of
    each decode row, then the fresh prompts one after another, a shared prefix once. Belongs to one block.

    rows     by place: decode rows, then fresh ones
    kept     after a change of rows the former place of each decode row, never a lower one; else None
    hidden   (tokens, hidden_width), after the last attention half of a step (rows, hidden_width)
    rolling  caches hold keys before rotation
    ahead    the next step has been launched before this one's tokens are known, so that rows must not change
    """

    index: int
    chunk: int
    device: torch.device
    rolling: bool = False
    rows: list[Sequence] = field(default_factory=list)
    kept: list[int] | None = None
    hidden: Tensor | None = None
    ahead: bool = False

    def __post_init__(self) -> None:
        self._host_numbers = torch.empty(0)
        self._next: list[int] = []  # position of each row's next token
        self._planned: list[int] = []
        self._angles: dict[tuple[int, torch.dtype], tuple[Angles, Tensor | None]] = {}
        self._numbers = torch.empty(0)
        self._positions = self._lengths = self._totals = self._numbers
        self.go_on()

    def go_on(self) -> None:
        """Prepares a step without changes: every row decodes."""
        self.kept, self.fresh, self.segments = None, list[Sequence](), list[PromptSegment]()
        self.decoding, self.prompt_tokens, self.packed = len(self.rows), 0, False
        self.parts = [AttentionPart(slice(0, self.decoding), self.decoding, None)]

    def change(self, kept: list[int], fresh: list[Sequence], segments: list[PromptSegment]) -> None:
        """Prepares a step of the rows at the places `kept`, and of `fresh` ones with their prompts."""
        self.kept, self.fresh, self.segments = kept, fresh, segments
        self.rows = [*(self.rows[i] for i in kept), *fresh]
        self.decoding, self.packed = len(kept), bool(segments)
        self.prompt_tokens = segments[-1].stop if segments else 0
        lengths = [len(row.prompt_ids) for row in fresh]
        # Rotary factors that depend on the length: a sequence has those of its full length from its first token on. Its
        # last token is sampled, not computed.
        planned = [n + (0 if self.rolling else row.steps - 1) for n, row in zip(lengths, fresh, strict=True)]
        self._next = [*(self._next[i] for i in kept), *lengths]
        self._planned = [*(self._planned[i] for i in kept), *planned]
        self.parts = self._cut()

    @property
    def finished(self) -> bool:
        return all(row.finished for row in self.rows)

    @property
    def prompt_share(self) -> float:
        """The share of prompts in the tokens of `hidden`."""
        return self.prompt_tokens / max(1, self.decoding + self.prompt_tokens)

    def take_hidden(self) -> Tensor:
        """The hidden states, which units update in place; RuntimeError while they are parked."""
        return required(self.hidden, f"GPU batch {self.index}: hidden states are not on the compute tier")

    def keep_last_tokens(self) -> None:
        """After the last attention: only the last token of each prompt goes on."""
        self.hidden = self.take_hidden()[torch.tensor(self.last_places(), device=self.device)]
        self.go_last()

    def go_last(self) -> None:
        """From now on `hidden` has one token of each row."""
        self.prompt_tokens, self.packed = len(self.fresh), False

    def last_places(self) -> list[int]:
        """The places of the rows' last tokens among the packed ones, in the order of the rows."""
        ends, path = list(range(self.decoding)), list[PromptSegment]()
        for segment in self.segments:
            path[segment.depth :] = [segment]
            for i, row in enumerate(segment.rows):
                # A prompt that is replayed ends before its last segment does, perhaps in one of the row's own before.
                last = len(self.fresh[row].prompt_ids) - 1
                place = next(each for each in reversed(path) if each.past <= last)
                first = place.start + (i * place.length if place is segment else 0)
                ends.append(self.decoding + first + last - place.past)
        return ends

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Token ids and absolute positions of this step, both (T,) int64; a finished row idles on its last token. In a
        step without changes they are the tensors of the step before, with new values."""
        self.forget_angles()
        tokens = [row.last_token for row in self.rows[: self.decoding]]
        positions = torch.tensor(self._next[: self.decoding], dtype=torch.int64)
        lengths, totals = positions + 1, torch.tensor(self._planned[: self.decoding], dtype=torch.int64)
        if self.segments:
            places, ends, planned = [positions], [lengths], [totals]  # those of the packed prompts follow
            for segment in self.segments:
                for row in () if segment.held is not None else segment.rows or (segment.rows.start,):
                    prompt, stop = self.fresh[row].prompt_ids, segment.past + segment.length
                    tokens.extend(self.fresh[row].pass_ids[segment.past : stop])
                    places.append(torch.arange(segment.past, stop))
                    ends.append(torch.full((segment.length,), len(prompt)))
                    planned.append(torch.full((segment.length,), self._planned[self.decoding + row]))
            positions, lengths, totals = torch.cat(places), torch.cat(ends), torch.cat(planned)
        for row in range(self.decoding):
            self._next[row] += 1
        numbers = torch.stack([torch.tensor(tokens, dtype=torch.int64), positions, lengths, totals])
        if self.kept is None and self._numbers.shape == numbers.shape:
            self._numbers.copy_(numbers, non_blocking=True)
        else:
            self._numbers = numbers.to(self.device, non_blocking=True)
        self._host_numbers = numbers
        ids, self._positions, self._lengths, self._totals = self._numbers.unbind(0)
        return ids, self._positions

    def follow(self, tokens: Tensor) -> None:
        """Makes the inputs of the next step on the device, from a decode step's `tokens` (rows,)."""
        self._numbers[0].copy_(tokens)
        self._numbers[1:3].add_(1)

    def advance(self) -> None:
        """Instead of `inputs`, in a step whose inputs `follow` has made."""
        self._next = [position + 1 for position in self._next]

    def enter(self, device: torch.device) -> None:
        """Compute on `device` from now on."""
        if device == self.device:
            return
        self.device = device
        self.forget_angles()
        _, self._positions, self._lengths, self._totals = self._host_numbers.to(device, non_blocking=True).unbind(0)

    def forget_angles(self) -> None:
        """Drops angles of another step, or of a failed recording."""
        self._angles.clear()

    def angles(self, rotary: Rotary, dtype: torch.dtype) -> tuple[Angles, Tensor | None]:
        """The angles of `rotary` for this step's tokens, with rolling positions those of the prompts only, and the
        factors of its queries, see `Rotary.growth`; made once per step."""
        key = (id(rotary), dtype)
        if key not in self._angles:
            first = self.decoding if self.rolling else 0
            lengths = self._totals if rotary.spec.recomputed else self._lengths
            angles = rotary.angles(self._positions[first:], lengths[first:], dtype)
            self._angles[key] = angles, rotary.growth(self._positions, dtype)
        return self._angles[key]

    def rows_at(self) -> Iterator[tuple[slice, list[Sequence]]]:
        """Spans of `hidden`, and the rows whose tokens they hold."""
        single = self.decoding if self.packed else len(self.rows)
        for i, row in enumerate(self.rows[:single]):
            yield slice(i, i + 1), [row]
        for segment in self.segments if self.packed else ():
            first = self.decoding + segment.start
            for i, index in enumerate(segment.rows):
                start = first + i * segment.length
                yield slice(start, start + segment.length), [self.fresh[index]]
            if not segment.rows and segment.held is None:
                ids = self.fresh[segment.rows.start].pass_ids[: segment.past + segment.length]
                members = [row for row in self.fresh if row.pass_ids[: len(ids)] == ids]
                yield slice(first, first + segment.length), members

    def _cut(self) -> list[AttentionPart]:
        """The parts of a step: decode rows go with the first prompts if a chunk has room for both."""
        rows, parts = self.decoding, list[AttentionPart]()
        for chunk in chunks_of(self.segments, self.chunk):
            span = slice(rows + chunk.start, rows + chunk.stop)
            if rows and not parts:
                if rows + chunk.stop > self.chunk:
                    parts.append(AttentionPart(slice(0, rows), rows, None))
                else:
                    parts.append(AttentionPart(slice(0, span.stop), rows, chunk))
                    continue
            parts.append(AttentionPart(span, 0, chunk))
        return parts or [AttentionPart(slice(0, rows), rows, None)]
