"""A GPU batch while it runs: its rows, and where their prompts lie in the packed hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from h2o_flexgen.engine.segments import Segment, chunks_of
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.models.rotary import Angles, Rotary


@dataclass
class GpuBatch:
    """The sequences that go through a layer together. Owned and mutated by the executor.

    Prompts are packed one after another, prefixes that rows share only once: `hidden` is (tokens, hidden_width) during
    the prompt and (rows, hidden_width) afterwards. Padding exists nowhere, whatever the lengths. `rolling`: the caches
    hold keys that are not rotated.
    """

    index: int
    rows: list[Sequence]
    segments: list[Segment]
    chunk: int
    device: torch.device
    rolling: bool = False
    hidden: Tensor | None = None
    _angles: dict[tuple[int, torch.dtype], Angles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chunks = chunks_of(self.segments, self.chunk)
        self.tokens = self.segments[-1].stop
        lengths = torch.tensor([len(row.prompt_ids) for row in self.rows])
        # Two sets of factors, for short and for long sequences, cannot both be in one cache: a sequence has from its
        # first token on the one that all it is planned to compute calls for. Its last token is sampled, not computed.
        self._planned = lengths + (0 if self.rolling else torch.tensor([row.steps - 1 for row in self.rows]))
        self._next_positions = lengths.to(self.device)
        self._positions = self._lengths = self._totals = torch.empty(0)

    @property
    def finished(self) -> bool:
        return all(row.finished for row in self.rows)

    def take_hidden(self) -> Tensor:
        """The current hidden states, which a unit's forward updates in place; RuntimeError while they are parked."""
        if self.hidden is None:
            raise RuntimeError(f"GPU batch {self.index}: hidden states are not on the compute tier")
        return self.hidden

    def last_tokens(self) -> Tensor:
        """Where each row's last prompt token lies in the packed hidden states: (rows,)."""
        ends = [
            segment.start + (i + 1) * segment.length - 1 for segment in self.segments for i in range(len(segment.rows))
        ]
        return torch.tensor(ends, device=self.device)

    def inputs(self, step: int) -> tuple[Tensor, Tensor]:
        """Token ids and absolute positions of this step, both (T,) int64; a finished row idles on its last token."""
        self._angles.clear()
        if step == 0:
            tokens = self._prompts()
        else:
            tokens = torch.tensor([row.last_token for row in self.rows])
            self._positions = self._next_positions
            self._lengths, self._totals = self._positions + 1, self._planned
            self._next_positions = self._positions + 1
        return tokens.to(self.device), self._positions

    def angles(self, rotary: Rotary, dtype: torch.dtype) -> Angles:
        """What `rotary` turns this step's queries and keys by; made once per step."""
        key = (id(rotary), dtype)
        if key not in self._angles:
            lengths = self._totals if rotary.spec.scaling == "longrope" else self._lengths
            self._angles[key] = rotary.angles(self._positions, lengths.to(self.device), dtype)
        return self._angles[key]

    def rows_at(self) -> Iterator[tuple[slice, list[Sequence]]]:
        """Spans of the packed prompts, and the rows whose tokens they hold."""
        for segment in self.segments:
            for i, row in enumerate(segment.rows):
                start = segment.start + i * segment.length
                yield slice(start, start + segment.length), [self.rows[row]]
            if not segment.rows:
                ids = self.rows[segment.source].prompt_ids[: segment.past + segment.length]
                members = [row for row in self.rows if row.prompt_ids[: len(ids)] == ids]
                yield slice(segment.start, segment.stop), members

    def _prompts(self) -> Tensor:
        """All prompt tokens as they are packed; notes their positions and the lengths of their sequences."""
        tokens: list[int] = []
        positions, lengths, totals = [], [], []
        for segment in self.segments:
            for row in segment.rows or (segment.source,):
                ids, stop = self.rows[row].prompt_ids, segment.past + segment.length
                tokens.extend(ids[segment.past : stop])
                positions.append(torch.arange(segment.past, stop))
                lengths.append(torch.full((segment.length,), len(ids)))
                totals.append(torch.full((segment.length,), int(self._planned[row])))
        self._positions = torch.cat(positions).to(self.device)
        self._lengths, self._totals = torch.cat(lengths), torch.cat(totals)
        return torch.tensor(tokens)
