"""The order in which a block's prompts are computed: shared prefixes once, long prompts in parts.

Rows with a common prefix are neighbours (`shared_first`), so that their prompts form a tree, which is computed depth
first: a segment that several rows continue, or that is one part of a long prompt, leaves its keys and values on a
*path*; tokens that follow attend to the path and to themselves. The path holds no more than one prompt.

Segments that a store of prefixes has are *held*: they go onto the path without being computed. Segments that several
rows share, in this block or over blocks, are stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from h2o_flexgen.cache.prefix_store import GRAIN, NewPrefix, StoredPrefix

MIN_SHARED = 16
"""Tokens from which on a common prefix is worth a segment of its own."""


class PromptSegment(NamedTuple):
    """Tokens of a GPU batch's packed prompts that go through attention together.

    start, length   `max(1, len(rows))` times `length` packed tokens from `start` on
    past, depth     tokens and segments before them in their prompts, on the path
    rows            rows of the GPU batch that end with this segment; none, from a row on that has these tokens in its
                    prompt, for a segment that goes onto the path
    held            the stored keys and values, if they are not computed: such tokens are not packed
    new             where they are stored for later blocks
    """

    start: int
    length: int
    past: int
    depth: int
    rows: range
    held: StoredPrefix | None = None
    new: NewPrefix | None = None

    @property
    def stop(self) -> int:
        return self.start if self.held is not None else self.start + max(1, len(self.rows)) * self.length


class PromptChunk(NamedTuple):
    """Segments whose packed tokens, [start, stop), go through a unit at once."""

    start: int
    stop: int
    segments: tuple[PromptSegment, ...]


def shared_first(prompts: Sequence[list[int]], share: bool = True) -> list[int]:
    """A stable order of `prompts` in which those with a common prefix of MIN_SHARED tokens are neighbours."""
    if not share:
        return list(range(len(prompts)))
    by_text = sorted(range(len(prompts)), key=prompts.__getitem__)
    common = [shared_tokens(prompts[a], prompts[b]) for a, b in pairwise(by_text)]
    order: list[int] = []
    todo = [(0, len(by_text), 0)] if by_text else []  # rows [low, high), with `past` tokens in common
    while todo:
        low, high, past = todo.pop()
        if high - low == 1:
            order.append(by_text[low])
            continue
        least = min(common[low : high - 1])
        parts = _cut(common, low, high, max(least, past + MIN_SHARED - 1))
        past = least if least - past >= MIN_SHARED else past
        first = {part: min(by_text[i] for i in range(*part)) for part in parts}
        todo.extend((*part, past) for part in sorted(parts, key=lambda part: -first[part]))
    return order


def _cut(common: Sequence[int], low: int, high: int, at_most: int) -> list[tuple[int, int]]:
    """The parts of [low, high) between neighbours that have `at_most` tokens in common."""
    cuts = [low, *(i + 1 for i in range(low, high - 1) if common[i] <= at_most), high]
    return list(pairwise(cuts))


def shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix, without the last token of either, which every row computes itself; may be 0 if
    it is less than MIN_SHARED."""
    limit = min(len(a), len(b)) - 1
    if limit < MIN_SHARED or a[0] != b[0]:
        return 0
    low, high = 0, limit  # the first difference by bisection: comparing slices is fast, looping over tokens is not
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class _Batch:
    """One GPU batch's segments while they are collected."""

    first_row: int
    segments: list[PromptSegment]
    tokens: int = 0

    def add(
        self, path: _Path, length: int, rows: range, held: StoredPrefix | None = None, new: NewPrefix | None = None
    ) -> _Path:
        """A segment behind `path`; returns the path with it."""
        shifted = range(rows.start - self.first_row, rows.stop - self.first_row)
        segment = PromptSegment(self.tokens, length, *path, shifted, held, new)
        self.segments.append(segment)
        self.tokens = segment.stop
        return _Path(path.past + length, path.depth + 1)


class _Path(NamedTuple):
    """Tokens and segments that are on the path."""

    past: int = 0
    depth: int = 0


@dataclass(frozen=True)
class Prefixes:
    """The pieces of prompts that a store of prefixes has for the rows of a block, by their numbers in it.

    held      of each row's prompt, from its first token on, those that it may take
    returns   of each row, how many first tokens come back outside of this block; at most those that it shares
    begin     (row, start, end, depth) to where these tokens go, None for those that are not kept; None: no store
    """

    held: Sequence[Sequence[StoredPrefix]]
    returns: Sequence[int]
    begin: Callable[[int, int, int, int], NewPrefix | None] | None = None

    def reach(self, row: int, most: int = sys.maxsize) -> int:
        """The tokens of `row` up to which something is held, at most `most`."""
        return max((piece.name.end for piece in self.held[row] if piece.name.end <= most), default=0)

    def take(self, batch: _Batch, row: int, most: int, path: _Path) -> _Path:
        """Puts what is held of the first `most` tokens of `row` onto the path, if that is worth a segment."""
        if self.reach(row, most) - path.past < MIN_SHARED:
            return path
        for piece in self.held[row]:
            if path.past < piece.name.end <= most:
                path = batch.add(path, piece.name.end - path.past, range(row, row), held=piece)
        return path

    def compute(self, batch: _Batch, row: int, end: int, path: _Path, chunk: int) -> _Path:
        """Puts tokens of `row` up to `end` onto the path, in parts; with a store only whole GRAINs."""
        end = end if self.begin is None else end // GRAIN * GRAIN
        for part in parts_of(end - path.past, chunk):
            new = None if self.begin is None else self.begin(row, path.past, path.past + part, path.depth)
            path = batch.add(path, part, range(row, row), new=new)
        return path

    def alone(self, batch: _Batch, row: int, end: int, path: _Path, chunk: int) -> _Path:
        """The path of a row of `end` tokens that goes alone."""
        path, returns = self.take(batch, row, end - 1, path), self._returning(row, end)
        return self.compute(batch, row, returns, path, chunk) if returns - path.past >= MIN_SHARED else path

    def apart(self, rows: range, past: int, ends: Sequence[int]) -> Iterator[range]:
        """Splits `rows` so that each of which more than `past` tokens are held or come back goes alone."""
        if self.begin is None:
            yield rows
            return
        worth = [max(self.reach(row, ends[row] - 1), self._returning(row, ends[row])) - past for row in rows]
        for run in _runs(rows, lambda row: worth[row - rows.start] >= MIN_SHARED):
            single = worth[run.start - rows.start] >= MIN_SHARED
            yield from (range(row, row + 1) for row in run) if single else (run,)

    def _returning(self, row: int, end: int) -> int:
        return min(self.returns[row], end - 1) // GRAIN * GRAIN


def segments_of(
    batches: Sequence[Sequence[Sequence[int]]],
    chunk: int,
    share: bool = True,
    own: Sequence[int] | None = None,
    prefixes: Prefixes | None = None,
) -> list[list[PromptSegment]]:
    """The segments of each GPU batch of a block, given the token ids of its rows; all segments depth first.

    A segment has at most `chunk` tokens per row. A path may reach from one GPU batch into the next. share: whether
    equal tokens have equal keys; if not, only long prompts are cut. own: the length of each row's prompt, if more
    tokens follow it, which are not shared. prefixes: pieces of the rows' prompts that a store has."""
    prompts = [ids for batch in batches for ids in batch]
    ends = [len(ids) for ids in prompts] if own is None else own
    batch_of = [index for index, batch in enumerate(batches) for _ in batch]
    texts = [ids if len(ids) == end else ids[:end] for ids, end in zip(prompts, ends, strict=True)]
    common = [shared_tokens(a, b) if share else 0 for a, b in pairwise(texts)]
    out = [_Batch(batch_of.index(index), []) for index in range(len(batches))]
    shared = prefixes or Prefixes([()] * len(prompts), [0] * len(prompts))
    todo = [(0, len(prompts), _Path())]  # rows [low, high) have what is on the path in common
    while todo:
        low, high, path = todo.pop()
        inside = common[low : high - 1]
        if max(inside, default=0) - path.past < MIN_SHARED:
            for rows in _runs(range(low, high), lambda row: (batch_of[row], len(prompts[row]), ends[row])):
                for part in shared.apart(rows, path.past, ends):
                    batch, before = out[batch_of[part.start]], path
                    if len(part) == 1:
                        before = shared.alone(batch, part.start, ends[part.start], path, chunk)
                    _add_rows(batch, part, len(prompts[part.start]), before, chunk)
            continue
        if (end := min(inside)) - path.past >= MIN_SHARED:
            batch = out[batch_of[low]]
            path = shared.take(batch, low, min(end, *map(shared.reach, range(low, high))), path)
            if end - path.past >= MIN_SHARED:
                path = shared.compute(batch, low, end, path, chunk)
        parts = _families(_cut(common, low, high, path.past + MIN_SHARED - 1))
        todo.extend((*part, path) for part in reversed(parts))
    return [batch.segments for batch in out]


def _families(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`parts`, with neighbours of one row each joined: they have nothing in common, and go side by side."""
    runs = [list(run) for _, run in groupby(parts, key=lambda part: part[1] - part[0] > 1)]
    return [part for run in runs for part in (run if run[0][1] - run[0][0] > 1 else [(run[0][0], run[-1][1])])]


def _runs(rows: range, key: Callable[[int], object]) -> Iterator[range]:
    """Neighbours among `rows` that have one `key`."""
    for _, run in groupby(rows, key):
        first, *others = run
        yield range(first, first + 1 + len(others))


def _add_rows(batch: _Batch, rows: range, length: int, shared: _Path, chunk: int) -> None:
    """The own tokens of `rows`, of `length` each with those that they share; a row with more than a chunk of its own
    goes alone, in parts."""
    own = length - shared.past
    if own <= chunk:
        # Rows that fill more than a chunk are several segments, so that a chunk is never much larger than it should be.
        fitting = max(1, chunk // own)
        for start in range(rows.start, rows.stop, fitting):
            batch.add(shared, own, range(start, min(start + fitting, rows.stop)))
        return
    for row in rows:
        path, (*parts, last) = shared, parts_of(own, chunk)
        for part_length in parts:
            path = batch.add(path, part_length, range(row, row))
        batch.add(path, last, range(row, row + 1))


def parts_of(length: int, chunk: int) -> list[int]:
    return [min(chunk, length - start) for start in range(0, length, chunk)]


def chunks_of(segments: Sequence[PromptSegment], chunk: int) -> list[PromptChunk]:
    """Neighbouring segments, as many as `chunk` tokens hold and at least one."""
    chunks: list[PromptChunk] = []
    for segment in segments:
        last = chunks[-1] if chunks else None
        # Held segments are at hand only in a chunk that has tokens.
        if last is None or (segment.stop - last.start > chunk and last.stop > last.start):
            chunks.append(PromptChunk(segment.start, segment.stop, (segment,)))
        else:
            chunks[-1] = PromptChunk(last.start, segment.stop, (*last.segments, segment))
    return chunks
