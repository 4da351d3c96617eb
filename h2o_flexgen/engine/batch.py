"""A GPU batch while it runs: its rows, and where each row's prompt lies in the packed hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.kernels import prefill_attention
from h2o_flexgen.schedule.footprint import PROMPT_CHUNK


class PromptGroup(NamedTuple):
    """Neighbouring rows whose prompts have one length: they go through attention together, without padding.

    `start` is where the first of them begins in its chunk.
    """

    rows: range
    start: int
    length: int


class PromptChunk(NamedTuple):
    """Whole prompts, tokens [start, stop) of the packed batch, that go through a unit at once."""

    start: int
    stop: int
    groups: list[PromptGroup]


@dataclass
class GpuBatch:
    """The sequences that go through a layer together. Owned and mutated by the executor.

    Prompts are packed one after another, so `hidden` is (sum of prompt lengths, hidden_size) during the prompt and
    (rows, hidden_size) afterwards: padding exists nowhere, whatever the lengths.
    """

    index: int
    rows: list[Sequence]
    device: torch.device
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        self.chunks = _chunks([len(row.prompt_ids) for row in self.rows])
        self._next_positions: Tensor | None = None

    @property
    def finished(self) -> bool:
        return all(row.finished for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.prompt_ids) for row in self.rows)

    def take_hidden(self) -> Tensor:
        """The current hidden states, which a unit's forward updates in place; RuntimeError while they are parked."""
        if self.hidden is None:
            raise RuntimeError(f"GPU batch {self.index}: hidden states are not on the compute tier")
        return self.hidden

    def last_tokens(self) -> Tensor:
        """Where each row's last prompt token lies in the packed hidden states: (rows,)."""
        ends = torch.tensor([len(row.prompt_ids) for row in self.rows]).cumsum(0) - 1
        return ends.to(self.device)

    def inputs(self, step: int, max_positions: int) -> tuple[Tensor, Tensor]:
        """Token ids and absolute positions of this step, both (T,) int64.

        A finished row idles on its last token until its GPU batch is done, its position clamped to the model's range.
        """
        if step == 0:
            tokens = [token for row in self.rows for token in row.prompt_ids]
            positions = torch.cat([torch.arange(len(row.prompt_ids)) for row in self.rows])
            self._next_positions = torch.tensor([len(row.prompt_ids) for row in self.rows], device=self.device)
        else:
            tokens = [row.token_ids[-1] if row.token_ids else row.prompt_ids[-1] for row in self.rows]
            if self._next_positions is None:
                raise RuntimeError("decode step before the prompt step")
            positions = self._next_positions.clamp(max=max_positions - 1)
            self._next_positions += 1
        return torch.tensor(tokens, device=self.device), positions.to(self.device)


def prompt_attention(chunk: PromptChunk, cache: KVCache, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a chunk of packed prompts, (t, heads, d); pruned into `cache`, no full-length KV outlives it."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for rows, start, length in chunk.groups:
        stop = start + len(rows) * length
        queries, keys, values = (t[start:stop].unflatten(0, (len(rows), length)).transpose(1, 2) for t in (q, k, v))
        mixed, sums = prefill_attention(queries, keys, values, scale, cache.wants_column_sums)
        place = cache.device
        cache.fill(list(rows), keys.to(place), values.to(place), None if sums is None else sums.to(place))
        out[start:stop] = mixed.transpose(1, 2).flatten(0, 1)
    return out


def _chunks(lengths: list[int]) -> list[PromptChunk]:
    """Neighbouring rows, as many as PROMPT_CHUNK tokens hold and at least one, grouped by length within."""
    chunks: list[PromptChunk] = []
    for row, length in enumerate(lengths):
        last = chunks[-1] if chunks else None
        if last is None or last.stop - last.start + length > PROMPT_CHUNK:
            start = 0 if last is None else last.stop
            chunks.append(PromptChunk(start, start + length, [PromptGroup(range(row, row + 1), 0, length)]))
            continue
        group = last.groups[-1]
        if group.length == length:
            last.groups[-1] = group._replace(rows=range(group.rows.start, row + 1))
        else:
            last.groups.append(PromptGroup(range(row, row + 1), last.stop - last.start, length))
        chunks[-1] = last._replace(stop=last.stop + length)
    return chunks
