"""The KV cache of a layer of which some heads look far: they keep other numbers of tokens than their neighbours.

DuoAttention (arXiv 2410.10819) found that few heads look far back, and that the others need few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction.base import AttendedPrompts
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.budget import Range
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.types import KeysValues, Logits, PackedPrompts

Some = slice | Tensor


class HeadsApart(KVCache):
    """Two caches of the same rows: one for the KV heads that attend to near tokens, one for the heads that attend far.

    Each has buffers of its own and decides for its heads as a cache of them alone would; `KVCache` documents the
    methods. Evicted tokens do not come back to such heads.
    """

    def __init__(self, shape: CacheShape, parts: Sequence[KVCache]) -> None:
        """parts: of `shape.parts`."""
        self.shape, self._parts = shape, tuple(parts)
        first = self._parts[0]
        self.device, self.row_ids, self._layer = first.device, first.row_ids, first._layer
        self.chooses = any(part.chooses for part in parts)
        self.wants_column_sums = any(part.wants_column_sums for part in parts)
        self.watch = self.recall = self.choice = None
        self._heads = [torch.tensor(heads, device=self.device) for heads in shape.heads]
        self._places: dict[int, list[tuple[KVCache, Some, Some]]] = {}

    @property
    def parts(self) -> tuple[KVCache, ...]:
        return self._parts

    @property
    def rewritten(self) -> int:  # type: ignore[override]
        return sum(part.rewritten for part in self._parts)

    def _asked(self, heads: Tensor, query_heads: int) -> Tensor:
        """The query heads of these KV heads."""
        group = query_heads // self.shape.kv_heads
        return (heads.unsqueeze(1) * group + torch.arange(group, device=heads.device)).flatten()

    def _at(self, query_heads: int) -> list[tuple[KVCache, Some, Some]]:
        """The parts, the places of their heads and of the query heads that ask them."""
        if query_heads not in self._places:
            self._places[query_heads] = [
                (part, _run(heads), _run(self._asked(heads, query_heads)))
                for part, heads in zip(self._parts, self._heads, strict=True)
            ]
        return self._places[query_heads]

    def _of(self, heads: Tensor, prompts: AttendedPrompts) -> AttendedPrompts:
        heads = heads.to(prompts.k.device)
        queries, sinks = prompts.queries, prompts.logits.sinks
        count = None if queries is None else queries.shape[1]
        count = count if sinks is None else len(sinks)
        return prompts.with_heads(heads, None if count is None else self._asked(heads, count))

    def settle_prompts(self, rows: Sequence[int], prompts: AttendedPrompts, length: int, raw: bool) -> None:
        for part, heads in zip(self._parts, self._heads, strict=True):
            part.settle_prompts(rows, self._of(heads, prompts), length, raw)

    def settle_packed(self, prompts: PackedPrompts, q: Tensor, k: Tensor) -> None:
        for part, heads in zip(self._parts, self._heads, strict=True):
            part.settle_packed(prompts, q[:, self._asked(heads, q.shape[1])], k[:, heads])

    def fill(
        self, rows: Sequence[int], k: Tensor, v: Tensor, scores: Tensor | None = None, past: KeysValues | None = None
    ) -> None:
        self._tell(rows, scores)
        for part, heads in zip(self._parts, self._heads, strict=True):
            earlier = None if past is None else KeysValues(past.k[heads], past.v[heads])
            own = scores[..., heads, :] if scores is not None and part.chooses else None
            part.fill(rows, k[:, heads], v[:, heads], own, earlier)

    def scores_of(self, rows: Sequence[int], prompts: AttendedPrompts) -> Tensor | None:
        joined: Tensor | None = None
        for part, heads in zip(self._parts, self._heads, strict=True):
            scores = part.scores_of(rows, self._of(heads, prompts)) if part.chooses else None
            if scores is not None:
                if joined is None:
                    joined = scores.new_zeros(*scores.shape[:-2], self.shape.kv_heads, scores.shape[-1])
                joined[..., heads.to(joined.device), :] = scores
        return joined

    def packing(self, spans: Sequence[tuple[int, int, int]]) -> PackedPrompts | None:
        """Of the heads that look near; `fill_packed` finds the others'."""
        found = [part.packing(spans) for part in self._parts]
        return None if None in found else found[0]

    def fill_packed(self, prompts: PackedPrompts, k: Tensor, v: Tensor, column_sums: Tensor | None = None) -> None:
        spans = [(row.place, row.first, row.length) for row in prompts.rows]
        sums = None if column_sums is None else self._by_prompt(prompts, column_sums)
        for row, of_row in zip(prompts.rows, sums or (), strict=False):
            self._tell([row.place], of_row.unsqueeze(0))
        for part, heads in zip(self._parts, self._heads, strict=True):
            own = prompts if part is self._parts[0] else required(part.packing(spans), "these prompts are not packed")
            scores = self._packed_sums(prompts, sums, heads) if part.wants_column_sums else None
            part.fill_packed(own, k[:, heads], v[:, heads], scores)

    def _by_prompt(self, prompts: PackedPrompts, sums: Tensor) -> list[Tensor]:
        count = self.shape.kv_heads
        spans = [(row.first * count, row.length) for row in prompts.rows]
        return [sums[first : first + length * count].view(count, length) for first, length in spans]

    def _packed_sums(self, prompts: PackedPrompts, sums: list[Tensor] | None, heads: Tensor) -> Tensor | None:
        """Of these heads the sums of all packed tokens, as `fill_packed` takes them."""
        if sums is None:
            return None
        packed = sums[0].new_zeros(prompts.tokens * len(heads))
        for row, of_row in zip(prompts.rows, sums, strict=True):
            start, own = row.first * len(heads), of_row[heads]
            packed[start : start + own.numel()] = own.flatten()
        return packed

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, table: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        if self.choice is not None:
            raise RuntimeError("an indexer chooses for all heads of a layer")
        out = torch.empty_like(q)
        for part, heads, asked in self._at(q.shape[1]):
            out[:, asked] = part.attend(q[:, asked], k[:, heads], v[:, heads], logits.of(asked), table)
        return out

    def again(self, qkv: tuple[Tensor, Tensor, Tensor], logits: Logits) -> Tensor:
        q, k, v = qkv
        out = torch.empty_like(q)
        for part, heads, asked in self._at(q.shape[1]):
            out[:, asked] = part.again((q[:, asked], k[:, heads], v[:, heads]), logits.of(asked))
        return out

    def drop(self, row_id: int, ranges: Sequence[Range]) -> None:
        for part in self._parts:
            part.drop(row_id, ranges)

    @property
    def repeats(self) -> bool:
        return all(part.repeats for part in self._parts)

    def repeat(self, steps: int = 1) -> None:
        for part in self._parts:
            part.repeat(steps)

    @property
    def next_pos(self) -> list[int]:
        return self._parts[0].next_pos

    @property
    def pos(self) -> Tensor:
        """(b, kv_heads, most slots of any head) int32, -1 where empty."""
        size = self.shape.batch, self.shape.kv_heads, self.shape.longest
        pos = torch.full(size, -1, dtype=torch.int32, device=self.device)
        for part, heads in zip(self._parts, self._heads, strict=True):
            own = part.pos
            pos[:, heads, : own.shape[-1]] = own.to(pos.dtype)
        return pos


def _run(places: Tensor) -> Some:
    """The same as a slice, which copies nothing, where they are neighbours."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first == len(places) - 1 else places
