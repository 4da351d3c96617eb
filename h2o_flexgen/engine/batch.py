"""A GPU batch while it runs: its rows, where each row's prompt lies in the packed hidden states, its caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.kernels import prefill_attention


class PromptGroup(NamedTuple):
    """Neighbouring rows whose prompts have one length: they go through attention together, without padding."""

    rows: range
    start: int
    length: int


@dataclass
class GpuBatch:
    """The sequences that go through a layer together. Owned and mutated by the executor.

    Prompts are packed one after another, so `hidden` is (sum of prompt lengths, hidden_size) during the prompt and
    (rows, hidden_size) afterwards: padding exists nowhere, whatever the lengths.
    """

    index: int
    rows: list[Sequence]
    device: torch.device
    caches: list[KVCache]
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        self.groups = _groups([len(row.prompt_ids) for row in self.rows])
        self._next_positions: Tensor | None = None

    @property
    def finished(self) -> bool:
        return all(row.finished for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.prompt_ids) for row in self.rows)

    def take_hidden(self) -> Tensor:
        """The current hidden states; a unit's forward consumes them."""
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

    def prompt_attention(self, cache: KVCache, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the packed prompts, (T, heads, d); pruned into `cache`, no full-length KV outlives it."""
        column_sums = cache.wants_column_sums
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, start, length in self.groups:
            stop = start + len(rows) * length
            shaped = [t[start:stop].unflatten(0, (len(rows), length)).transpose(1, 2) for t in (q, k, v)]
            mixed, sums = prefill_attention(shaped[0], shaped[1], shaped[2], scale, column_sums)
            cache.fill(list(rows), shaped[1], shaped[2], sums)
            out[start:stop] = mixed.transpose(1, 2).flatten(0, 1)
        return out


def _groups(lengths: list[int]) -> list[PromptGroup]:
    groups: list[PromptGroup] = []
    start = first = 0
    for row, length in enumerate(lengths):
        if row + 1 == len(lengths) or lengths[row + 1] != length:
            rows = range(first, row + 1)
            groups.append(PromptGroup(rows, start, length))
            start += len(rows) * length
            first = row + 1
    return groups
