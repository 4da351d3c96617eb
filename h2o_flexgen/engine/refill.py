"""Which rows a step computes: finished ones leave their lane, and waiting prompts take their places."""

from __future__ import annotations

from h2o_flexgen.engine.lane import Lane
from h2o_flexgen.engine.segments import MIN_SHARED, Segment, segments_of, shared_tokens
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.engine.waiting import Waiting

SOON = 4
"""A lane changes at once when one in so many of its rows is finished."""


class Refill:
    """The rows of lanes that go through the units together, step by step; `active` and `last` are what their schedule
    asks.

    A change of a lane costs at most about one step of it: rows are copied down to close the gaps, which is a read and a
    write of their K and V where a step reads all once, and every layer's books are made anew. A finished row that stays
    costs its share of every step. So a lane changes as soon as finished rows have idled for as many steps,
    counted over rows, as it has rows: what waiting has cost by then is what the change costs, and nobody who knew
    the future would have paid less than half of both. Where a SOON-th of the rows is finished, that is at most so many
    steps away, and it changes at once.

    A prefix that the waiting prompts share with those before them is computed anew for every change, so its tokens
    are part of the price. With all rows finished there is nothing to copy and nothing to wait for.
    """

    def __init__(
        self, lanes: list[Lane], first: list[list[Sequence]], waiting: Waiting, chunk: int, share: bool
    ) -> None:
        """`first`: the rows that each lane starts with. `waiting`: what is left of it when the block is over is
        another's work. `chunk`, `share`: as for `segments_of`."""
        self._lanes, self._waiting, self._chunk, self._share = lanes, waiting, chunk, share
        self._places = [len(rows) for rows in first]
        self._idle = [0] * len(lanes)
        self._newest = first[-1][-1]
        self._begin({i: ([], rows) for i, rows in enumerate(first)})

    def active(self, step: int) -> list[int]:
        """The lanes that still have rows to compute, made ready for `step`."""
        if step > 0:
            self._begin({i: self._exchange(i) for i, lane in enumerate(self._lanes) if lane.rows and self._pays(i)})
        return [lane.index for lane in self._lanes if not lane.finished]

    def last(self, step: int) -> bool:
        """Whether every row is done after this step: prompts that still wait then start a block of their own, which
        costs no more than filling empty lanes, and nothing is read ahead for rows that may not come."""
        return all(row.finished or row.remaining == 1 for lane in self._lanes for row in lane.rows)

    def _pays(self, index: int) -> bool:
        lane = self._lanes[index]
        rows, finished = len(lane.rows), sum(row.finished for row in lane.rows)
        self._idle[index] += finished
        if finished in (0, rows):
            return finished > 0
        if lane.ahead:
            return False
        again = self._again()
        return self._idle[index] >= rows + again or (not again and SOON * finished >= rows)

    def _again(self) -> int:
        """Tokens of the next prompt that were computed for the newest row, too."""
        if not self._share or not self._waiting:
            return 0
        shared = shared_tokens(self._newest.prompt_ids, self._waiting.first.prompt_ids)
        return shared if shared >= MIN_SHARED else 0

    def _exchange(self, index: int) -> tuple[list[int], list[Sequence]]:
        """Where the rows that stay are now, place by place, and as many waiting ones as there is room for."""
        staying = [place for place, row in enumerate(self._lanes[index].rows) if not row.finished]
        kept = list(range(len(staying)))
        # Only the last rows move, to where finished ones were.
        movers = (place for place in staying if place >= len(kept))
        for place in sorted(set(kept) - set(staying)):
            kept[place] = next(movers)
        fresh = self._waiting.take(self._places[index] - len(kept))
        self._newest = fresh[-1] if fresh else self._newest
        return kept, fresh

    def _begin(self, changes: dict[int, tuple[list[int], list[Sequence]]]) -> None:
        """A step in which these lanes change."""
        filled = [index for index, (_, fresh) in changes.items() if fresh]
        prompts = [[row.prompt_ids for row in changes[index][1]] for index in filled]
        packed = dict(zip(filled, segments_of(prompts, self._chunk, self._share), strict=True))
        for i, lane in enumerate(self._lanes):
            if i not in changes:
                lane.go_on()
                continue
            lane.change(*changes[i], packed.get(i, list[Segment]()))
            self._idle[i] = 0
