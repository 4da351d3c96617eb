"""When a job will be done: a range of seconds from the tokens that are left, how long answers get, and the pace.

The pace comes from the cost model where this machine's rates are known, from a sample of the requests, or from the job
itself as it goes; lengths of answers from `max_tokens`, a sample, or the answers so far.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from h2o_flexgen.engine.batching.scheduler import SOON
from h2o_flexgen.engine.requests.sequence import Sequence as Row

LEAST = 20
"""Answers from which lengths and pace are told where nothing else is known."""
_DRAWS, _MOST_ROWS = 64, 512
"""Of a forecast: jobs that are drawn, and sequences of each that are looked at, or as many as four blocks have."""
OF_PLAN, OF_SAMPLE, OF_JOB = 0.25, 0.17, 0.2
"""How far a pace is off, as the standard deviation of its logarithm, from the cost model, a sample or a job's begin."""
_LEFT_OVER = 0.04
"""The same near the end of a job."""
_NEXT, _LEAST_BETWEEN = 1.1, 0.05
"""How much later, at least, what is told of a whole job is kept again: times as late, and seconds."""


Array = np.ndarray[Any, Any]


class Percentiles(NamedTuple):
    """The 10th, 50th and 90th percentile."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Any) -> Percentiles:
        return cls(*map(float, np.percentile(values, (10, 50, 90))))

    def __add__(self, other: Percentiles) -> Percentiles:  # type: ignore[override]
        """Of two times one after the other, both of which are off as the same pace is."""
        return Percentiles(*map(sum, zip(self, other, strict=True)))

    def after(self, elapsed: float) -> Percentiles:
        """So many seconds later, of a time that is left."""
        return Percentiles(*(max(0.0, each - elapsed) for each in self))

    def to_json(self, digits: int = 3) -> dict[str, float]:
        return {name: round(value, digits) for name, value in self._asdict().items()}


class ToCome(NamedTuple):
    """A sequence of which nothing has been done: the tokens of its prompt, and those it may generate at most."""

    prompt_tokens: int
    max_new_tokens: int
    token_ids: Sequence[int] = ()
    finished: bool = False


@dataclass
class Lengths:
    """How long answers get: how many had so many tokens when they `ended` by themselves, and when they were `cut`."""

    ended: Counter[int] = field(default_factory=Counter)
    cut: Counter[int] = field(default_factory=Counter)

    def add(self, new: int, most: int) -> None:
        """An answer of so many tokens is finished, which might have had so many."""
        (self.ended if new < most else self.cut)[new] += 1

    def __len__(self) -> int:
        return self.ended.total() + self.cut.total()

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(self.ended + other.ended, self.cut + other.cut)

    def drawn(self, got: Array, most: Array, random: np.random.Generator) -> Array:
        """(draws, rows): lengths of answers that have `got` (rows,) tokens and may have so many at `most` (rows,).

        By the estimate of Kaplan and Meier: an answer that was cut, or is under way, counts as longer than its tokens
        so far. The observed lengths are one sample of many that were possible: each draw takes another.
        """
        under_way = Counter(got[got > 0].astype(int).tolist())
        sizes = np.array(sorted(self.ended), dtype=np.float64)
        if not len(sizes):
            return np.broadcast_to(most, (_DRAWS, len(most)))
        ended, rest = np.array([self.ended[int(size)] for size in sizes]), np.zeros(len(sizes))
        for size, count in (self.cut + under_way).items():
            place = int(np.searchsorted(sizes, size, side="right")) - 1
            if place >= 0:
                rest[place] += count
        ends = random.poisson(ended, (_DRAWS, len(sizes)))
        seen = ends + random.poisson(rest, ends.shape)
        longer = np.cumsum(seen[:, ::-1], axis=1)[:, ::-1]
        survive = np.cumprod(1 - ends / np.maximum(longer, 1), axis=1)
        before = np.concatenate([np.ones((_DRAWS, 1)), survive], axis=1)
        goals = random.random((_DRAWS, len(got))) * before[:, np.searchsorted(sizes, got, side="right")]
        every = np.append(sizes, np.inf)
        places = [np.searchsorted(-left, -goal, side="right") for left, goal in zip(survive, goals, strict=True)]
        return np.minimum(every[np.array(places)], most)


def block_steps(running: Array, waiting: Array, places: int, more: float) -> Array:
    """(draws,): steps until a block of so many places is done with rows that are `running` (draws, rows) and `waiting`
    (draws, some), both in steps; `more`: times as many wait as these.

    Finished rows give way as `BatchScheduler` has it, of all GPU batches together.
    """
    draws, count = waiting.shape
    rows = np.zeros((len(running), max(places, running.shape[1])))
    rows[:, : running.shape[1]] = running
    size, each = rows.shape[1], np.arange(len(rows))
    soon, clock, taken = -(-size // SOON), np.zeros(draws), np.zeros(draws, dtype=int)
    while (taken < count).any():
        gone = rows <= 0
        next_ = taken[:, None] + np.cumsum(gone, axis=1) - 1
        comes = gone & (next_ < count)
        rows = np.where(comes, waiting[each[:, None], np.minimum(next_, count - 1)], rows)
        taken = np.minimum(taken + gone.sum(axis=1), count)
        # Rows that finish first idle until they are many, or have idled for as long as a change takes.
        first = np.sort(np.partition(rows, soon - 1, axis=1)[:, :soon], axis=1)
        idled = (size + np.cumsum(first, axis=1)) / np.arange(1, soon + 1)
        changes = np.minimum(np.maximum(first, idled).min(axis=1), first[:, -1])
        wait = np.where(taken < count, np.ceil(np.maximum(changes, 1)), 0)
        clock += wait
        rows = rows - wait[:, None]
    return clock * more + np.maximum(rows.max(axis=1), 0)


@dataclass(frozen=True)
class Pace:
    """Seconds of a prompt's token, of a decode step of the block, of each new token in it, and of a request beside the
    computing; `first`: before the first token; `spread`: the standard deviation of the logarithm of what it is off."""

    prompt: float
    step: float
    token: float
    request: float = 0.0
    first: float = 0.0
    spread: float = OF_PLAN

    @classmethod
    def of_plan(cls, predicted: Mapping[str, Any], gen_len: int, rows: int) -> Pace:
        """Of what a cost model expects of one block."""
        prompts = max(1, int(predicted["prompt_tokens"]))
        steps = max(1, (gen_len - 1) * -(-int(predicted["generated_tokens"]) // max(1, gen_len * rows)))
        return cls(predicted["prefill_s"] / prompts, predicted["decode_s"] / steps, 0.0)


class Meter:
    """A handler for `LLM.on_progress` that learns the pace: (what, done, in all) of tokens in prefill and decode.

    Least squares of the seconds of decode steps by the new and the prompt tokens that they took. Calls of one engine
    one after another add up. `most`: new tokens of a step. The engine counts a finished sequence as all tokens that it
    asked for: `pass_over` takes the number that were not generated.
    """

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.seconds = 0.0
        self._sums, self._steps = np.zeros((3, 3)), 0
        self._last = {"prefill": 0, "generating": 0}
        self._passed_over = 0
        self._then: float | None = None
        self._begun = self._end = 0.0
        self._waiting = 0
        self._targets = np.zeros(3)

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._last:
            self._then = None
            return
        now, more = time.monotonic(), done - self._last[what]
        self._begun, self._end = self._begun or now, now
        self._last[what] = done
        if more < 0:  # another call has begun
            more = done
        if what == "prefill":
            self._waiting += more
            self._then = self._then or now
            return
        more, self._passed_over = max(0, min(more - self._passed_over, self.most)), 0
        if self._then is not None and more:
            seen = np.array([1.0, more, self._waiting])
            self._sums += np.outer(seen, seen)
            self._targets += seen * (now - self._then)
            self._steps += 1
            self.seconds += now - self._then
        self._then, self._waiting = now, 0

    def pause(self, seconds: float) -> None:
        """So many seconds went by that are no part of a request's."""
        self._begun += seconds if self._begun else 0.0

    @property
    def elapsed(self) -> float | None:
        """Seconds since the first token was told of, without pauses; None before."""
        return time.monotonic() - self._begun if self._begun else None

    def pass_over(self, tokens: int) -> None:
        """A sequence has ended, so many tokens before it had to."""
        self._passed_over += tokens

    def learn(self, other: Meter) -> None:
        """The steps that another one saw count, too: where all blocks of a job are alike, these alone do not tell the
        seconds of a step from those of its tokens."""
        self._sums += other._sums
        self._targets += other._targets

    def pace(self, requests: int) -> Pace | None:
        """From what was measured while so many requests were finished; None from too little."""
        if self._steps < 5:
            return None
        names = [0, 1, 2]
        while names:
            solved = np.linalg.lstsq(self._sums[np.ix_(names, names)], self._targets[names], rcond=None)[0]
            if (solved >= 0).all():
                break
            names.pop(int(np.argmin(solved)))
        found = dict(zip(names, map(float, solved), strict=True)) if names else {}
        step, token, prompt = (found.get(name, 0.0) for name in (0, 1, 2))
        return Pace(prompt, step, token, max(0.0, self._end - self._begun - self.seconds) / max(1, requests))


@dataclass
class Forecast:
    """The estimate of a job of so many `requests`, whose blocks have `slots` rows.

    `pace`, and `lengths` of answers: known before the job runs, from a sample or another job.
    """

    requests: int
    slots: int
    pace: Pace | None = None
    lengths: Lengths = field(default_factory=Lengths)
    rows: dict[int, list[Row | ToCome]] = field(default_factory=dict)
    """Of the requests that were read and are not finished, by their lines."""
    meter: Meter = field(default_factory=Meter)
    answers: Lengths = field(default_factory=Lengths)
    _done: int = 0
    _new: int = 0
    _expected: int = 0
    _seen: array[float] = field(default_factory=lambda: array("d"))
    """The prompt tokens of each sequence that was ever expected, and those that it may generate."""
    _read: tuple[int, float] = 0, 0.0
    """Requests that a job has read, and the seconds that it took."""
    _told: list[tuple[float, Percentiles]] = field(default_factory=list)
    """Of the whole job, after so many seconds."""

    def __post_init__(self) -> None:
        self.block(self.slots)

    def block(self, rows: int) -> None:
        """Blocks have so many rows, as far as is known."""
        self.slots = max(self.slots, rows)
        self.meter.most = self.slots if self.slots > 1 else self.meter.most

    def expect(self, line: int, rows: Iterable[Row | ToCome]) -> None:
        self.rows[line] = list(rows)
        self._expected += 1
        for row in self.rows[line]:
            self._seen.extend((row.prompt_tokens, row.max_new_tokens))

    def read(self, requests: int, seconds: float) -> None:
        """So many requests are read in all; for so long some of these were."""
        self._read = requests, self._read[1] + seconds
        self.meter.pause(seconds)

    def end(self, row: Row | ToCome, left: int) -> None:
        """A sequence is finished, so many tokens before it had to be."""
        self.meter.pass_over(left)
        self.answers.add(len(row.token_ids), row.max_new_tokens)

    def finish(self, line: int) -> None:
        self._new += sum(len(row.token_ids) for row in self.rows.pop(line, ()))
        self._done += 1

    def left(self, elapsed: float) -> Percentiles | None:
        """Seconds that the job still takes, `elapsed` after its begin; None where the pace, or once some requests are
        done the lengths of answers, are not known. The measured pace counts for twice the share of requests that are
        done, the one from before for the rest.
        """
        pace, known = self._paced(elapsed), len(self.lengths) or len(self.answers) >= LEAST
        if pace is None or (not known and self._done):
            return None
        left = max(0, self.requests - self._done)
        if not left:
            return Percentiles(0.0, 0.0, 0.0)
        read, took = self._read
        still = max(0, self.requests - read) * took / max(1, read)
        pace = replace(pace, first=still if self._done else pace.first)
        seconds = self._draws(pace, self.lengths + self.answers if known else Lengths(), left)[0]
        share = elapsed / max(1e-9, elapsed + float(np.median(seconds)))
        spread = _LEFT_OVER + (pace.spread - _LEFT_OVER) * (1 - share)
        # Evenly spread, so that percentiles are no matter of chance.
        normal = np.random.default_rng(1).permutation([*map(NormalDist().inv_cdf, (np.arange(_DRAWS) + 0.5) / _DRAWS)])
        return Percentiles.of(seconds * np.exp(spread * normal))

    def told(self, elapsed: float) -> Percentiles | None:
        """`left`, of which what it says of the whole job is kept now and then."""
        left = self.left(elapsed)
        if left is None:
            return None
        if not self._told or elapsed > _NEXT * self._told[-1][0]:
            self._told.append((elapsed, Percentiles(*(elapsed + seconds for seconds in left))))
        return left

    @property
    def first(self) -> Percentiles | None:
        """Of the whole job, the earliest that was told."""
        return self._told[0][1] if self._told else None

    def halfway(self, measured: float) -> Percentiles | None:
        """Of the whole job, what was told last in the first half of the seconds that it took."""
        return next((whole for elapsed, whole in reversed(self._told) if 2 * elapsed <= measured), None)

    def left_text(self, elapsed: float) -> str:
        """`told` for people, empty where nothing is known."""
        left = self.told(elapsed)
        return "" if left is None else f"{seconds_text(left)} left"

    def note(self, elapsed: float) -> None:
        """`told`, if it is time for one that is kept."""
        if not self._told or elapsed > _NEXT * self._told[-1][0] + _LEAST_BETWEEN:
            self.told(elapsed)

    def to_json(self, measured: float) -> dict[str, Any]:
        """The first estimate of the whole job's seconds, and the last by half-time, beside the `measured` ones."""
        told = {"first": self.first, "half": self.halfway(measured)}
        return {**{name: each and each.to_json() for name, each in told.items()}, "measured": round(measured, 3)}

    def tokens(self) -> Percentiles:
        """New tokens of all answers to come."""
        return Percentiles.of(self._draws(Pace(0, 0, 0), self.lengths, self.requests)[1])

    @property
    def known_pace(self) -> Pace | None:
        """The pace as it is known by now, for another job."""
        pace = self._paced(0.0)
        return pace and replace(pace, first=0.0, spread=OF_PLAN)

    def _paced(self, elapsed: float) -> Pace | None:
        # Requests that finish in one step are written one after another: all of them count.
        ready = self._done + sum(all(row.finished for row in rows) for rows in self.rows.values() if rows)
        measured = self.meter.pace(ready) if self._done >= min(LEAST, self.requests / 4) else None
        if measured is None and self.pace is None and self._done >= LEAST:  # too few steps
            new = self._new + sum(len(row.token_ids) for rows in self.rows.values() for row in rows)
            measured = Pace(0.0, 0.0, (self.meter.elapsed or elapsed) / max(1, new))
        if measured is None:
            return self.pace
        if self.pace is None:
            return replace(measured, spread=OF_JOB)
        share = min(1.0, 2 * self._done / max(1, self.requests))
        mixed = {
            name: (1 - share) * getattr(self.pace, name) + share * getattr(measured, name)
            for name in ("prompt", "step", "token", "request")
        }
        return replace(self.pace, **mixed)

    def _draws(self, pace: Pace, lengths: Lengths, requests: int) -> tuple[Array, Array]:
        """(draws,): seconds, by a pace that is right, and new tokens, of `requests` that are not finished."""
        random = np.random.default_rng(0)
        known = [row for rows in self.rows.values() for row in rows if not row.finished]
        numbers = [(row.prompt_tokens, row.max_new_tokens, len(row.token_ids)) for row in known]
        every = np.array(numbers, dtype=np.float64).reshape(-1, 3)
        running, waiting = every[every[:, 2] > 0], every[every[:, 2] == 0]
        # Requests that are not read yet are like all that were: of a window the shortest wait longest.
        seen = np.array(self._seen or [1.0, 1.0]).reshape(-1, 2)
        unread = max(0, requests - len(self.rows)) * len(seen) / max(1, self._expected)
        count = len(waiting) + unread
        prompts = waiting[:, 0].sum() + unread * seen[:, 0].mean()
        looked_at = min(int(np.ceil(count)), max(_MOST_ROWS, 4 * self.slots))
        of_unread = round(looked_at * unread / max(1, count))
        some = np.concatenate([_spread(waiting[:, :2], looked_at - of_unread), _spread(seen, of_unread)])
        some = np.pad(some[np.lexsort((-some[:, 0], -some[:, 1]))], ((0, 0), (0, 1)))  # as they are run
        rows, more = np.concatenate([running, some]), count / max(1, len(some))
        left = lengths.drawn(rows[:, 2], rows[:, 1], random) - rows[:, 2]
        first, rest = left[:, : len(running)], left[:, len(running) :]
        tokens = first.sum(axis=1) + rest.sum(axis=1) * more
        steps = block_steps(first, rest, self.slots, more)
        seconds = pace.first + pace.request * requests + pace.prompt * prompts + pace.step * steps + pace.token * tokens
        return seconds, tokens


def _spread(rows: Array, count: int) -> Array:
    """`count` of `rows` (n, 2), evenly spread over these."""
    return rows[np.arange(count) * len(rows) // max(1, count)]


def seconds_text(told: Percentiles) -> str:
    """A range as one says it: 4 to 6 min."""
    unit, name = next(
        (unit, name) for unit, name in ((3600, "h"), (60, "min"), (1, "s")) if told.high >= 2 * unit or unit == 1
    )
    low, high = (value / unit for value in (told.low, told.high))
    digits = 0 if low >= 10 else 1
    return f"{low:.{digits}f} to {high:.{digits}f} {name}"
