"""When a job will be done: a range of seconds from the tokens that are left, how long answers get, and the pace.

The pace comes from the cost model where this machine's rates are known, from a sample of the requests, or from the job
itself as it goes; lengths of answers from `max_tokens`, a sample, or the answers so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.errors import PlanError
from h2o_flexgen.jobs.job import Job, bounded, opened
from h2o_flexgen.jobs.requests import Refused, RequestFormat
from h2o_flexgen.jobs.source import Record, Source
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.units import format_bytes

LEAST = 20
"""Answers from which lengths and pace are told where nothing else is known."""
_DRAWS, _MOST_ROWS = 128, 2048
_FULL = 0.87
"""The share of a block's rows that are busy while there is more to come, where that was not measured: a few are waited
for before others join."""
_OF_PLAN, _OF_SAMPLE, _OF_JOB = 0.25, 0.17, 0.2
"""How far a pace is off, as the standard deviation of its logarithm, from the cost model, a sample or a job's begin."""
_LEFT_OVER = 0.04
"""The same near the end of a job."""
_NEXT, _LEAST_BETWEEN = 1.1, 0.05
"""How much later, at least, what is told of a whole job is kept again: times as late, and seconds."""


class Percentiles(NamedTuple):
    """The 10th, 50th and 90th percentile."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Any) -> Percentiles:
        return cls(*map(float, np.percentile(values, (10, 50, 90))))

    def to_json(self, digits: int = 3) -> dict[str, float]:
        return {name: round(value, digits) for name, value in self._asdict().items()}


class ToCome(NamedTuple):
    """One sequence: the tokens of its prompt, and those it may generate at most."""

    prompt: int
    most: int


@dataclass(frozen=True)
class Pace:
    """Seconds of a prompt's token, of a decode step of the block, of each new token in it, and of a request beside the
    computing; `first`: before the first token; `spread`: the standard deviation of the logarithm of what it is off."""

    prompt: float
    step: float
    token: float
    request: float = 0.0
    first: float = 0.0
    spread: float = _OF_PLAN

    @classmethod
    def of_plan(cls, predicted: Mapping[str, Any], gen_len: int, rows: int) -> Pace:
        """Of what a cost model expects of one block."""
        prompts = max(1, int(predicted["prompt_tokens"]))
        steps = max(1, (gen_len - 1) * -(-int(predicted["generated_tokens"]) // max(1, gen_len * rows)))
        return cls(predicted["prefill_s"] / prompts, predicted["decode_s"] / steps, 0.0)


class Meter:
    """A handler for `LLM.on_progress` that learns the pace: (what, done, in all) of tokens in prefill and decode.

    Least squares of the seconds of decode steps by the new and the prompt tokens that they took. Calls of one engine
    one after another add up. `most`: new tokens of a step; rows that stop early count all that they might have had.
    """

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.prompts = self.new = 0
        self.seconds = 0.0
        self._sums, self._steps = np.zeros((3, 3)), 0
        self._last = {"prefill": 0, "generating": 0}
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
            self.prompts += more
            self._waiting += more
            self._then = self._then or now
            return
        more = min(more, self.most)
        self.new += more
        if self._then is not None and more:
            seen = np.array([1.0, more, self._waiting])
            self._sums += np.outer(seen, seen)
            self._targets += seen * (now - self._then)
            self._steps += 1
            self.seconds += now - self._then
        self._then, self._waiting = now, 0

    @property
    def busy(self) -> float | None:
        """New tokens of a step, which are the rows that are busy; None from too few steps."""
        return self.new / self._steps if self._steps >= LEAST else None

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
    """What is known of a job of so many `requests`, whose blocks have `slots` rows.

    `pace`: from before; `lengths`: the new tokens of answers and what they might have had, from a sample.
    """

    requests: int
    slots: int
    pace: Pace | None = None
    lengths: list[tuple[int, int]] = field(default_factory=list)
    rows: dict[int, list[ToCome]] = field(default_factory=dict)
    """Of the requests that were read and are not finished, by their lines."""
    meter: Meter = field(default_factory=Meter)
    _done: int = 0
    _prompts: int = 0
    _new: int = 0
    answers: list[tuple[int, int]] = field(default_factory=list)
    _read: int = 0
    _told: list[tuple[float, Percentiles]] = field(default_factory=list)
    """Of the whole job, after so many seconds."""

    def __post_init__(self) -> None:
        self.block(self.slots)

    def block(self, rows: int) -> None:
        """Blocks have so many rows, as far as is known."""
        self.slots = max(self.slots, rows)
        self.meter.most = self.slots if self.slots > 1 else self.meter.most

    def expect(self, line: int, rows: Iterable[tuple[int, int]]) -> None:
        """A request has been read."""
        self.rows[line] = [ToCome(*row) for row in rows]
        self._read += 1

    def finish(self, line: int, new: Iterable[int]) -> None:
        """A request is finished, with so many new tokens in each of its sequences."""
        rows = self.rows.pop(line, [])
        counts = list(new)
        self._done += 1
        self._prompts += sum(row.prompt for row in rows)
        self._new += sum(counts)
        if len(counts) == len(rows):
            self.answers += [(count, row.most) for count, row in zip(counts, rows, strict=True)]

    def left(self, elapsed: float) -> Percentiles | None:
        """Seconds that the job still takes, `elapsed` after its begin; None where nothing is known of the pace.

        What was measured counts for the share of the job that is done, what was expected for the rest.
        """
        pace = self._paced(elapsed)
        lengths = self.lengths if len(self.answers) < LEAST else self.answers + self.lengths
        if pace is None or (not lengths and self._done):
            return None
        left = max(0, self.requests - self._done)
        if not left:
            return Percentiles(0.0, 0.0, 0.0)
        begun = (max(0, self.meter.prompts - self._prompts), max(0, self.meter.new - self._new))
        pace = replace(pace, first=pace.first if not self._done else 0.0)
        seconds = self._draws(pace, lengths, left, begun)[0]
        share = elapsed / max(1e-9, elapsed + float(np.median(seconds)))
        spread = _LEFT_OVER + (pace.spread - _LEFT_OVER) * (1 - share)
        return Percentiles.of(seconds * np.exp(spread * np.random.default_rng(1).standard_normal(_DRAWS)))

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
        """What was told of the whole job's seconds first and at half-time, beside what it took."""
        told = {"first": self.first, "half": self.halfway(measured)}
        return {**{name: each and each.to_json() for name, each in told.items()}, "measured": round(measured, 3)}

    def tokens(self) -> Percentiles:
        """New tokens of all answers to come."""
        return Percentiles.of(self._draws(Pace(0, 0, 0), self.lengths, self.requests, (0, 0))[1])

    def _paced(self, elapsed: float) -> Pace | None:
        measured = self.meter.pace(self._done) if self._done >= min(LEAST, self.requests / 4) else None
        if measured is None and self.pace is None and self._done >= LEAST:  # nobody tells of steps
            measured = Pace(0.0, 0.0, elapsed / max(1, self._new))
        if measured is None:
            return self.pace
        if self.pace is None:
            return replace(measured, spread=_OF_JOB)
        share = min(1.0, 2 * self._done / max(1, self.requests))
        mixed = {
            name: (1 - share) * getattr(self.pace, name) + share * getattr(measured, name)
            for name in ("prompt", "step", "token", "request")
        }
        return replace(self.pace, **mixed)

    def _draws(
        self, pace: Pace, lengths: list[tuple[int, int]], requests: int, begun: tuple[int, int]
    ) -> tuple[Any, Any]:
        """Seconds, by a pace that is right, and new tokens (draws,) of `requests` more, of which tokens of prompts and
        answers have `begun`."""
        random = np.random.default_rng(0)
        known = [row for rows in self.rows.values() for row in rows] or [ToCome(1, 1)]
        every = np.array(known, dtype=np.float64)
        per_request = len(known) / max(1, len(self.rows))
        count = requests * per_request
        some = every if len(every) <= _MOST_ROWS else every[random.choice(len(every), _MOST_ROWS, replace=False)]
        most = np.broadcast_to(some[:, 1], (_DRAWS, len(some)))
        new = most
        if lengths:
            seen = np.array(lengths, dtype=np.float64)
            # The sample itself is one of many that might have been.
            again = random.integers(len(seen), size=(_DRAWS, len(seen)))
            chosen = np.take_along_axis(again, random.integers(len(seen), size=most.shape), axis=1)
            new = np.where(seen[chosen, 0] >= seen[chosen, 1], most, np.minimum(seen[chosen, 0], most))
        scale = count / len(some)
        tokens = np.maximum(0.0, new.sum(1) * scale - begun[1])
        longest = new.max(1)
        steps = np.maximum(1.0, longest - begun[1] / max(1.0, min(count, self.slots)))
        if count > self.slots:
            steps = np.maximum(longest, tokens / (self.meter.busy or _FULL * self.slots) + longest / 2)
        prompts = max(0.0, float(some[:, 0].sum()) * scale - begun[0])
        seconds = pace.first + pace.request * requests + pace.prompt * prompts + pace.step * steps + pace.token * tokens
        return seconds, tokens


def outlook_text(found: Mapping[str, Any]) -> str:
    """`Outlook.to_json` for people."""
    new, seconds = found["new_tokens"], found["seconds"]
    lines = [
        f"{found['requests']:,} requests, {found['prompt_tokens']:,} prompt tokens, "
        f"{new['low']:,.0f} to {new['high']:,.0f} new ones"
    ]
    if seconds is None:
        lines.append("time: not known here; --sample 50 measures it, and --calibrate this machine")
    else:
        lines.append(f"time: {seconds_text(Percentiles(**seconds))}, {seconds['middle']:,.1f} s in the middle")
        moved = found["bytes_moved"]
        if moved["high"]:
            lines.append(f"moved between tiers: {format_bytes(moved['low'])} to {format_bytes(moved['high'])}")
    for tier, used in found.get("memory", {}).items():
        sizes = " to ".join(dict.fromkeys(map(format_bytes, (used["low"], used["high"]))))
        lines.append(f"{tier} memory: {sizes} of {format_bytes(used['cap'])}")
    return "\n".join(lines) + "\n"


def seconds_text(told: Percentiles) -> str:
    """A range as one says it: 4 to 6 min."""
    unit, name = next(
        (unit, name) for unit, name in ((3600, "h"), (60, "min"), (1, "s")) if told.high >= 2 * unit or unit == 1
    )
    low, high = (value / unit for value in (told.low, told.high))
    digits = 0 if low >= 10 else 1
    return f"{low:.{digits}f} to {high:.{digits}f} {name}"


@dataclass
class _Kept:
    """Some requests, whose results are not wanted."""

    some: list[Record]
    state: bytearray

    def records(self) -> list[Record]:
        return self.some

    def add(self, line: int, text: str, failed: bool) -> None:
        self.state[line] = 1

    def sync(self) -> None:
        """Nothing is kept."""


@dataclass
class Outlook:
    """What a job will take: its forecast, and the plans for its longest rows and for those of the middle."""

    forecast: Forecast
    largest: Plan | None
    middle: Plan | None
    moved: float = 0.0
    """Bytes that move between tiers, a second."""

    def to_json(self) -> dict[str, Any]:
        """Tokens, seconds, bytes that move and bytes of memory by tier."""
        rows = [row for rows in self.forecast.rows.values() for row in rows]
        left = self.forecast.left(0.0)
        said: dict[str, Any] = {
            "requests": self.forecast.requests,
            "prompt_tokens": sum(row.prompt for row in rows),
            "new_tokens": self.forecast.tokens().to_json(0),
            "seconds": None if left is None else left.to_json(),
            "bytes_moved": None if left is None else Percentiles(*(self.moved * each for each in left)).to_json(0),
        }
        if self.largest is not None and self.middle is not None:
            least, most = self.middle.footprint, self.largest.footprint
            said["memory"] = {
                tier: {"low": least.total(tier), "high": max(least.total(tier), most.total(tier)), "cap": cap}
                for tier, cap in self.largest.request.capped.items()
            }
        return said


def expected(
    llm: LLM,
    source: Source,
    form: RequestFormat,
    requests: int,
    state: bytearray,
    at_risk: float | None,
    sample: int,
) -> Outlook:
    """What is known of a job before it goes on, of which `state` has what is done: nothing without a sample."""
    left = requests - (len(state) - state.count(0))
    nothing = Outlook(Forecast(left, 1), None, None)
    if not sample or not left:
        return nothing
    try:
        found = outlook(llm, source, form, requests, at_risk, sample)
    except PlanError:  # not all fit together: those that do not are refused one by one
        return nothing
    pace = found.forecast.pace and replace(found.forecast.pace, first=0.0)  # the weights are loaded by now
    forecast = replace(found.forecast, requests=left, pace=pace)
    forecast.rows = {line: rows for line, rows in forecast.rows.items() if not state[line]}
    forecast.told(0.0)
    return replace(found, forecast=forecast)


def outlook(
    llm: LLM, source: Source, form: RequestFormat, requests: int, at_risk: float | None, sample: int
) -> Outlook:
    """Reads all requests, has `sample` of them answered, and says what the job takes. `llm` is as the job has it."""
    forecast, refused = Forecast(requests, 1), 0
    records = list[Record]()
    random = np.random.default_rng(0)
    for record in source.records():
        try:
            forecast.expect(record.line, opened(llm, form, record).lengths)
        except Refused:
            refused += 1
            continue
        # A reservoir: each request is as likely to be among them.
        seen = len(forecast.rows)
        place = seen - 1 if seen <= sample else int(random.integers(seen))
        if place < sample:
            records[place : place + 1] = [record]
    forecast.requests -= refused
    rows = [row for rows in forecast.rows.values() for row in rows]
    if not rows:
        return Outlook(forecast, None, None)
    usual, planner = np.median(np.array(rows), axis=0), llm.planner
    llm.planner = bounded(planner, requests, at_risk)
    try:
        middle = llm.plan(Workload(int(usual[0]), max(1, int(usual[1])), len(rows)))
        largest = llm.plan(Workload(max(row.prompt for row in rows), max(row.most for row in rows), len(rows)))
        forecast.block(middle.policy.block_size)
        if middle.predicted is not None:
            forecast.pace = Pace.of_plan(middle.predicted, int(usual[1]), forecast.slots)
        moved = _run_sample(llm, form, forecast, records) if records else 0.0
    finally:
        llm.planner = planner
    return Outlook(forecast, largest, middle, moved)


def _run_sample(llm: LLM, form: RequestFormat, forecast: Forecast, records: list[Record]) -> float:
    """Has `records` answered, for the lengths of the answers and the pace. Bytes that moved, a second."""
    part = Forecast(len(records), forecast.slots)
    kept = _Kept(records, bytearray(max(record.line for record in records) + 1))
    shown = llm.on_progress

    def meter(what: str, done: int, total: int) -> None:
        shown(what, done, total)
        part.meter(what, done, total)

    llm.on_progress, started = meter, time.monotonic()
    try:
        Job(llm, kept, form, kept, len(records), forecast=part).run()
    finally:
        llm.on_progress = shown
    elapsed, record = time.monotonic() - started, llm.last_record
    load = 0.0 if record is None else record.load_s
    pace = part.meter.pace(len(records))
    forecast.lengths = part.answers
    if pace is not None:
        forecast.pace = replace(pace, first=load, spread=_OF_SAMPLE)
    bytes_ = 0 if record is None else sum(record.bytes_moved.values())
    return bytes_ / max(elapsed - load, 1e-3)
