"""Continuous batching: finished rows leave their GPU batch, and waiting prompts take their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
    """Sequences of other requests, which come while a call runs."""

    @property
    def left(self) -> bool:
        """Whether any that `take` has looked at still wait."""

    def take(self, most: int, fits: Callable[[Sequence], bool]) -> list[Sequence]:
        """Up to `most` of those that fit, which run from then on."""

    def finished(self, row: Sequence, output: RequestOutput) -> bool:
        """One that ran has its result; False for a sequence that is none of these."""

    def fail(self, rows: Iterable[Sequence], message: str, code: str) -> None:
        """These cannot be run."""

    def again(self, rows: Iterable[Sequence] | None = None) -> None:
        """These wait again, or all that run and are not finished: the call is over."""


class Newcomers:
    """The late rows of one call, whose unfinished sequences are `running`: those that join are added to them. None
    joins once the call's own are all finished."""

    def __init__(self, source: LateRows | None, running: dict[int, Sequence]) -> None:
        self._source, self._running = source, running
        self._own, self._joined, self._turn = len(running), set[int](), True

    @property
    def come(self) -> bool:
        """Whether there may be any."""
        return self._source is not None and self._own > 0

    @property
    def left(self) -> bool:
        """Whether some wait that were looked at."""
        return self._source is not None and self._own > 0 and self._source.left

    def take(self, most: int, fits: Callable[[Sequence], bool] = lambda row: True) -> list[Sequence]:
        """Up to `most` of those that fit."""
        if self._source is None or not self._own or not most:
            return []
        rows = self._source.take(most, fits)
        self._running.update({row.row_id: row for row in rows})
        self._joined.update(row.row_id for row in rows)
        return rows

    def apart(self) -> dict[int, Sequence]:
        """Those that wait, to be run by themselves, every other time: between them the call's own go on."""
        self._turn = not self._turn
        return {row.row_id: row for row in self.take(_ALL)} if self._turn else {}

    def finished(self, row: Sequence) -> None:
        self._own -= row.row_id not in self._joined

    def refuse(self, rows: Mapping[int, Sequence], error: Exception) -> None:
        """Of rows that cannot be planned the longest get an error; the others wait again."""
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
    """What a row may need that comes into a block late: cache slots by (layer, window), and tokens of its prompt."""

    slots: Mapping[tuple[int, int | None], int]
    prompt: int

    def holds(self, row: Sequence) -> bool:
        needs = ((row.budget_in(*where), there) for where, there in self.slots.items())
        return len(row.pass_ids) <= self.prompt and all(slots_needed([budget]) <= there for budget, there in needs)


class WaitingQueue:
    """FIFO queue of sequences, which holds none that was taken. Suffix maxima are computed once, so that a block sizes
    its buffers in O(1).

    Where others may come while it is used, buffers do not become smaller from block to block, and those that the block
    has `room` for take every other place. Where there is none for one, the queue is `closed`: no more are taken, so
    that the block comes to its end.
    """

    def __init__(self, rows: Iterable[Sequence] = (), newcomers: Newcomers = NOBODY) -> None:
        self._rows, self._newcomers, self._turn = [*reversed(list(rows))], newcomers, 1
        self.room: BlockRoom | None = None
        self.closed = False
        self._by_layer = any(row.by_layer for row in self._rows)
        self._steps = list(accumulate((row.steps for row in self._rows), initial=0))
        self._prompts = self._largest(lambda row: len(row.pass_ids))
        self._slots: dict[tuple[int, int | None], list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def first(self) -> Sequence:
        """The one that comes in next; IndexError where the queue is empty."""
        return self._rows[-1]

    def take(self, count: int) -> list[Sequence]:
        """The next `count`, or as many as there are."""
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
        """Steps of all of them together."""
        return self._steps[len(self)] + (_ALL if self._newcomers.come else 0)

    @property
    def longest_prompt(self) -> int:
        """In tokens; 0 where the queue is empty."""
        return self._prompts[-1 if self._newcomers.come else len(self)]

    def slots(self, layer: int, window: int | None) -> int:
        """Cache slots of the one that needs most, in a layer with this window; 0 where the queue is empty."""
        alike = layer if self._by_layer else -1, window
        if alike not in self._slots:
            self._slots[alike] = self._largest(lambda row: slots_needed([row.budget_in(layer, window)]))
        return self._slots[alike][-1 if self._newcomers.come else len(self)]

    def _largest(self, size: Callable[[Sequence], int]) -> list[int]:
        """Of the last 0, 1, 2, ... rows."""
        return list(accumulate((size(row) for row in self._rows), max, initial=0))


SOON = 4
"""A GPU batch changes at once when one in so many of its rows is finished."""


@dataclass(frozen=True)
class StoredPrefixes:
    """A store for blocks. `queries`: how many of a row's last queries its caches look at, which are not stored."""

    store: PrefixStore
    queries: Callable[[Sequence], int]

    def of(self, user: object, rows: list[Sequence]) -> Prefixes:
        """The prefixes of `rows`; they stay in memory until `user` asks again."""
        self.store.release(user)

        def begin(row: int, start: int, end: int, depth: int) -> NewPrefix | None:
            return self.store.begin(rows[row].prompt_ids, start, end, depth, _kind(rows[row]))

        pieces = list[list[StoredPrefix]]()
        for row in rows:
            most = min(len(row.prompt_ids) - 1, len(row.pass_ids) - self.queries(row))
            pieces.append(self.store.find(user, row.prompt_ids, most, _kind(row)))
        return Prefixes(pieces, [row.returns for row in rows], begin)


def _kind(row: Sequence) -> str:
    return "scored" if row.forced is not None else "generated"


class BatchScheduler:
    """The rows of GPU batches that go through the units together, step by step; `active` and `last` are what their
    schedule asks.

    A change of a GPU batch costs about one of its steps, at most: rows move down to close the gaps (a read and a write
    of their K and V, where a step reads them once), and the records of every layer are made anew. A finished row that
    stays wastes its share of every step. A GPU batch therefore changes once its finished rows have idled, summed over
    rows, for as many steps as it has rows. Idling has then cost as much as the change does, so both together cost at
    most twice the optimum. If 1 / SOON of the rows is finished, that point is at most SOON steps away, and the GPU
    batch changes at once.

    Each change computes anew any prefix that waiting prompts share with earlier ones, so the prefix counts as part of
    the price. If all rows are finished there is nothing to copy, and the GPU batch changes at once.
    """

    def __init__(
        self,
        gpu_batches: list[GpuBatch],
        first: list[list[Sequence]],
        waiting: WaitingQueue,
        chunk: int,
        share: bool,
        prefixes: StoredPrefixes | None = None,
    ) -> None:
        """`first`: the rows that each GPU batch starts with. `waiting`: what is left of it when the block is over is
        another's work. `chunk`, `share`: as for `segments_of`. `prefixes`: a store, if prompts may share."""
        self._gpu_batches, self._waiting, self._chunk, self._share = gpu_batches, waiting, chunk, share
        self._prefixes = prefixes
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
        """Whether every row is done after this step: prompts that still wait then start a block of their own, which
        costs no more than filling empty GPU batches, and nothing is read ahead for rows that may not come."""
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
        """Tokens of the next prompt that were computed for the newest row, too."""
        if not self._share or not self._waiting or self._prefixes is not None:
            return 0  # a store has them
        shared = shared_tokens(self._newest.prompt_ids, self._waiting.first.prompt_ids)
        return shared if shared >= MIN_SHARED else 0

    def _exchange(self, index: int) -> tuple[list[int], list[Sequence]]:
        """Where the rows that stay are now, place by place, and as many waiting ones as there is room for."""
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
        """A step in which these GPU batches change."""
        filled = [index for index, (_, fresh) in changes.items() if fresh]
        prompts = [[row.pass_ids for row in changes[index][1]] for index in filled]
        own = [len(row.prompt_ids) for index in filled for row in changes[index][1]]
        prefixes = None
        if self._prefixes is not None:
            prefixes = self._prefixes.of(self, [row for index in filled for row in changes[index][1]])
        packed = dict(zip(filled, segments_of(prompts, self._chunk, self._share, own, prefixes), strict=True))
        for i, gpu_batch in enumerate(self._gpu_batches):
            if i not in changes:
                gpu_batch.go_on()
                continue
            gpu_batch.change(*changes[i], packed.get(i, list[PromptSegment]()))
            self._idle[i] = 0


def in_order(sequences: Iterable[Sequence], share_prefixes: bool) -> list[Sequence]:
    """The order in which sequences are run: those that may run longest first, but neighbours where they share a prefix.

    What comes last should be short: while it ends no rows are left to take the places of finished ones. Among rows of
    equal steps the longest prompts come first, which shows at once whether memory suffices, makes the estimate of a
    progress bar pessimistic, and lets prompts of one length go through attention together.
    """
    longest = sorted(sequences, key=lambda s: (-s.steps, -len(s.prompt_ids), s.row_id))
    return [longest[i] for i in shared_first([row.prompt_ids for row in longest], share_prefixes)]


def note_returns(ordered: list[Sequence]) -> None:
    """Tells each of the sequences, in the order in which they are run, what it shares with its neighbours."""
    for row in ordered:
        row.returns = 0
    for a, b in pairwise(ordered):
        common = shared_tokens(a.prompt_ids, b.prompt_ids)
        a.returns, b.returns = max(a.returns, common), max(b.returns, common)
