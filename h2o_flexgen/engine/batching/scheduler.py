"""Continuous batching: finished rows leave their GPU batch, and waiting prompts take their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from h2o_flexgen.cache.lengths import slots_needed
from h2o_flexgen.cache.prefix_store import NewPrefix, PrefixStore, StoredPrefix
from h2o_flexgen.engine.batching.gpu_batch import GpuBatch
from h2o_flexgen.engine.batching.prefix_tree import (
    MIN_SHARED,
    Prefixes,
    PromptSegment,
    segments_of,
    shared_first,
    shared_tokens,
)
from h2o_flexgen.engine.requests.sequence import RequestOutput, Sequence


class LateRows(Protocol):
    """Sequences of other requests, which arrive while a call runs."""

    @property
    def left(self) -> bool:
        """Whether any that `take` has looked at still wait."""

    def take(self, most: int, fits: Callable[[Sequence], bool]) -> list[Sequence]:
        """Up to `most` of those that fit, which run from then on."""

    def finished(self, row: Sequence, output: RequestOutput) -> bool:
        """Takes the result of a late row; False for any other sequence."""

    def fail(self, rows: Iterable[Sequence], message: str, code: str) -> None:
        """Takes the error of rows that cannot be run."""

    def again(self, rows: Iterable[Sequence] | None = None) -> None:
        """These rows wait again; None: all that are unfinished, as the call is over."""


class Newcomers:
    """The late rows of one call. Rows that join are added to its unfinished sequences `running`; none joins once the
    call's own are all finished."""

    def __init__(self, source: LateRows | None, running: dict[int, Sequence]) -> None:
        self._source, self._running = source, running
        self._own, self._joined, self._turn = len(running), set[int](), True

    @property
    def come(self) -> bool:
        return self._source is not None and self._own > 0

    @property
    def left(self) -> bool:
        return self._source is not None and self._own > 0 and self._source.left

    def take(self, most: int, fits: Callable[[Sequence], bool] = lambda row: True) -> list[Sequence]:
        if self._source is None or not self._own or not most:
            return []
        rows = self._source.take(most, fits)
        self._running.update({row.row_id: row for row in rows})
        self._joined.update(row.row_id for row in rows)
        return rows

    def apart(self) -> dict[int, Sequence]:
        """Every other time, those that wait, to be run by themselves."""
        self._turn = not self._turn
        return {row.row_id: row for row in self.take(_ALL)} if self._turn else {}

    def finished(self, row: Sequence) -> None:
        self._own -= row.row_id not in self._joined

    def refuse(self, rows: Mapping[int, Sequence], error: Exception) -> None:
        """Of `rows`, which cannot be planned, the longest get the error; the others wait again."""
        assert self._source is not None, "late rows come from somewhere"
        for row_id in rows:
            del self._running[row_id]
        most = max(sum(row.longest_pass) for row in rows.values())
        longest = [row for row in rows.values() if sum(row.longest_pass) == most]
        self._source.fail(longest, str(error).partition("\n")[0].removesuffix(":"), "out_of_memory")
        self._source.again(rows.values())


_ALL = 1 << 30
NOBODY = Newcomers(None, {})


class BlockRoom(NamedTuple):
    """Limits for rows that join a running block: cache slots by (layer, window), of its heads that look near and far
    where it has both, and prompt tokens."""

    slots: Mapping[tuple[int, int | None], tuple[int, ...]]
    prompt: int

    def holds(self, row: Sequence) -> bool:
        needs = ((row.budget_in(*where).part(i), n) for where, there in self.slots.items() for i, n in enumerate(there))
        return len(row.pass_ids) <= self.prompt and all(slots_needed([budget]) <= there for budget, there in needs)


class WaitingQueue:
    """FIFO queue of sequences. Suffix maxima are computed once, so that a block sizes its buffers in O(1).

    Newcomers that the block has `room` for take every other place, and buffers do not shrink from block to block then.
    If one does not fit, the queue is `closed`: no more are taken, so that the block ends.
    """

    def __init__(self, rows: Iterable[Sequence] = (), newcomers: Newcomers = NOBODY) -> None:
        self._rows, self._newcomers, self._turn = [*reversed(list(rows))], newcomers, 1
        self.room: BlockRoom | None = None
        self.closed = False
        self._by_layer = any(row.by_layer for row in self._rows)
        self._steps = list(accumulate((row.steps for row in self._rows), initial=0))
        self._prompts = self._largest(lambda row: len(row.pass_ids))
        self._slots: dict[tuple[int, int | None, int], list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def first(self) -> Sequence:
        """The next one; IndexError if the queue is empty."""
        return self._rows[-1]

    def take(self, count: int) -> list[Sequence]:
        """Removes the next `count`, or as many as there are."""
        late = list[Sequence]()
        if self.room is not None and self._newcomers.come and not self.closed:
            share = (count + self._turn) // 2 if self._rows else count
            self._turn ^= count & 1
            late = self._newcomers.take(share, self.room.holds)
            self.closed = len(late) < share and self._newcomers.left
        if self.closed:
            return late
        return late + [self._rows.pop() for _ in range(min(count - len(late), len(self)))]

    @property
    def steps(self) -> int:
        """The sum of their steps."""
        return self._steps[len(self)] + (_ALL if self._newcomers.come else 0)

    @property
    def longest_prompt(self) -> int:
        """In tokens; 0 if the queue is empty."""
        return self._prompts[-1 if self._newcomers.come else len(self)]

    def slots(self, layer: int, window: int | None, part: int = 0) -> int:
        """The most cache slots of any in a layer with this window, in one kind of its heads; 0 if the queue is
        empty."""
        alike = layer if self._by_layer else -1, window, part
        if alike not in self._slots:
            self._slots[alike] = self._largest(lambda row: slots_needed([row.budget_in(layer, window).part(part)]))
        return self._slots[alike][-1 if self._newcomers.come else len(self)]

    def _largest(self, size: Callable[[Sequence], int]) -> list[int]:
        """The largest `size` of the last 0, 1, 2, ... rows."""
        return list(accumulate((size(row) for row in self._rows), max, initial=0))


SOON = 4
"""A GPU batch changes at once when one in so many of its rows is finished."""


class BatchScheduler:
    """The rows of GPU batches that go through the units together; the schedule asks `active` and `last`.

    A change of a GPU batch costs about one of its steps, since rows move down to close the gaps; a finished row that
    stays wastes its share of every step. A GPU batch therefore changes once its finished rows have idled, summed over
    rows, for as many steps as it has rows, which costs at most twice the optimum; or at once if 1 / SOON of them, or
    all, are finished. A prefix that waiting prompts share with earlier ones is computed anew, and adds to the price.
    """

    def __init__(
        self,
        gpu_batches: list[GpuBatch],
        first: list[list[Sequence]],
        waiting: WaitingQueue,
        chunk: int,
        share: bool,
        store: PrefixStore | None = None,
        queries: Callable[[Sequence], int] = lambda row: 1,
    ) -> None:
        """first: the rows that each GPU batch starts with. chunk, share: as for `segments_of`. queries: how many of a
        row's last queries, which are not in the `store` of prefixes, its caches look at."""
        self._gpu_batches, self._waiting, self._chunk, self._share = gpu_batches, waiting, chunk, share
        self._store, self._queries = store, queries
        self._places = [len(rows) for rows in first]
        self._idle = [0] * len(gpu_batches)
        self._newest = first[-1][-1]
        self._begin({i: ([], rows) for i, rows in enumerate(first)})

    def active(self, step: int) -> list[int]:
        """The GPU batches that still have rows to compute, made ready for `step`."""
        if step > 0:
            self._begin(
                {
                    i: self._exchange(i)
                    for i, gpu_batch in enumerate(self._gpu_batches)
                    if gpu_batch.rows and self._pays(i)
                }
            )
        return [gpu_batch.index for gpu_batch in self._gpu_batches if not gpu_batch.finished]

    def last(self, step: int) -> bool:
        """Whether every row is done after this step; prompts that still wait then start another block."""
        return all(row.finished or row.remaining == 1 for gpu_batch in self._gpu_batches for row in gpu_batch.rows)

    def _pays(self, index: int) -> bool:
        gpu_batch = self._gpu_batches[index]
        rows, finished = len(gpu_batch.rows), sum(row.finished for row in gpu_batch.rows)
        self._idle[index] += finished
        if finished in (0, rows):
            return finished > 0
        if gpu_batch.ahead:
            return False
        again = self._again()
        return self._idle[index] >= rows + again or (not again and SOON * finished >= rows)

    def _again(self) -> int:
        """The length of the prefix that the next prompt shares with the newest row, and would be computed anew."""
        if not self._share or not self._waiting or self._store is not None:
            return 0  # a store has them
        shared = shared_tokens(self._newest.prompt_ids, self._waiting.first.prompt_ids)
        return shared if shared >= MIN_SHARED else 0

    def _exchange(self, index: int) -> tuple[list[int], list[Sequence]]:
        """The present places of the rows that stay, and as many waiting rows as there is room for."""
        staying = [place for place, row in enumerate(self._gpu_batches[index].rows) if not row.finished]
        kept = list(range(len(staying)))
        # Only the last rows move, to where finished ones were.
        movers = (place for place in staying if place >= len(kept))
        for place in sorted(set(kept) - set(staying)):
            kept[place] = next(movers)
        fresh = self._waiting.take(self._places[index] - len(kept))
        self._newest = fresh[-1] if fresh else self._newest
        return kept, fresh

    def _begin(self, changes: dict[int, tuple[list[int], list[Sequence]]]) -> None:
        filled = [index for index, (_, fresh) in changes.items() if fresh]
        prompts = [[row.pass_ids for row in changes[index][1]] for index in filled]
        own = [len(row.prompt_ids) for index in filled for row in changes[index][1]]
        prefixes = None
        if self._store is not None:
            prefixes = self._stored(self._store, [row for index in filled for row in changes[index][1]])
        packed = dict(zip(filled, segments_of(prompts, self._chunk, self._share, own, prefixes), strict=True))
        for i, gpu_batch in enumerate(self._gpu_batches):
            if i not in changes:
                gpu_batch.go_on()
                continue
            gpu_batch.change(*changes[i], packed.get(i, list[PromptSegment]()))
            self._idle[i] = 0

    def _stored(self, store: PrefixStore, rows: list[Sequence]) -> Prefixes:
        """The prefixes of `rows` in `store`; they stay in memory until it is asked again."""
        store.release(self)
        kinds = ["generated" if row.forced is None else "scored" for row in rows]

        def begin(row: int, start: int, end: int, depth: int) -> NewPrefix | None:
            return store.begin(rows[row].prompt_ids, start, end, depth, kinds[row])

        pieces = list[list[StoredPrefix]]()
        for row, kind in zip(rows, kinds, strict=True):
            most = min(len(row.prompt_ids) - 1, len(row.pass_ids) - self._queries(row))
            pieces.append(store.find(self, row.prompt_ids, most, kind))
        return Prefixes(pieces, [row.returns for row in rows], begin)


def in_order(sequences: Iterable[Sequence], share_prefixes: bool) -> list[Sequence]:
    """The order in which sequences are run: most steps first, as at the end no rows are left to take the places of
    finished ones; then longest prompts first, which shows at once whether memory suffices; but neighbours if they share
    a prefix."""
    longest = sorted(sequences, key=lambda s: (-s.steps, -len(s.prompt_ids), s.row_id))
    return [longest[i] for i in shared_first([row.prompt_ids for row in longest], share_prefixes)]


def note_returns(ordered: list[Sequence]) -> None:
    """Sets `returns`: the prefix that each sequence shares with its neighbours in the order of running."""
    for row in ordered:
        row.returns = 0
    for a, b in pairwise(ordered):
        common = shared_tokens(a.prompt_ids, b.prompt_ids)
        a.returns, b.returns = max(a.returns, common), max(b.returns, common)
