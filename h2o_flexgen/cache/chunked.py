"""The cache of a layer whose queries see their own chunk of a text alone (Llama 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.lengths import CacheLengths


class ChunkedCache(KVCache):
    """Holds nothing of a row but its present chunk: with the next one the row begins anew, as far as slots, scores and
    budgets go. `fill` gets what a prompt has of the chunk of its next token, which may be nothing.

    Positions of the lengths and slots count from the chunk's beginning, those that `pos`, `kept` and `next_pos` tell
    from the text's. Budgets are within a window of `chunk` tokens.
    """

    chunk: int
    _looked_at: CacheLengths | None = None
    _restarts = 0  # in this step of the lengths that were looked at

    def begins(self, row: int, start: int) -> None:
        """The tokens that `fill` gets for `row` begin at position `start` of its text."""
        self._lengths.starts[row] = start

    def attend(self, q: Tensor, *others: Any, **named: Any) -> Tensor:
        lengths = self._lengths
        if self._looked_at is not lengths:
            self._looked_at, self._restarts = lengths, lengths.step + self.chunk - max(lengths.next_pos)
        if lengths.step >= self._restarts:
            self._restart([row for row, position in enumerate(lengths.next_pos) if position >= self.chunk])
        return super().attend(q, *others, **named)

    def _restart(self, rows: list[int]) -> None:
        if not self._lengths.started:
            self._lengths.start()
            self._slots.start(rolling=False)
        self._slots.restart(rows)
        self._lengths, self._fused = self._lengths.restarted(rows), None
        self._slots.go_on(self._lengths)

    @property
    def repeats(self) -> bool:
        return False

    @property
    def next_pos(self) -> list[int]:
        return [start + pos for start, pos in zip(self._lengths.starts, self._lengths.next_pos, strict=True)]

    @property
    def pos(self) -> Tensor:
        pos = self._slots.positions()
        starts = torch.tensor(self._lengths.starts, dtype=pos.dtype, device=pos.device)
        return torch.where(pos < 0, pos, pos + starts.view(-1, 1, 1))
