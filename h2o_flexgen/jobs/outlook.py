"""Tokens, seconds and bytes that a job will take, before it runs: by all its requests and a sample of answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.limits.plan import Plan
from h2o_flexgen.errors import PlanError
from h2o_flexgen.jobs.forecast import OF_SAMPLE, Forecast, Pace, Percentiles, ToCome, seconds_text
from h2o_flexgen.jobs.job import GivenRequests, Job, Summary, bounded, opened, under_way
from h2o_flexgen.jobs.requests import Refused, RequestFormat
from h2o_flexgen.jobs.source import Record, Source
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.units import counted, format_bytes


def outlook_text(found: Mapping[str, Any]) -> str:
    new, seconds = found["new_tokens"], found["seconds"]
    lines = [
        f"{counted(found['requests'], 'request')}, {counted(found['prompt_tokens'], 'prompt token')}, "
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


_GLIMPSED = 128
"""Requests of a job that waits, from which it is told how long it will take."""


@dataclass
class Outlook:
    """A job's forecast, and the plans for rows of its largest and of its median lengths."""

    forecast: Forecast
    largest: Plan | None
    middle: Plan | None
    moved: float = 0.0
    """Bytes that move between tiers, a second."""
    reading: float = 0.0
    """Seconds that it took to read all requests."""

    def to_json(self) -> dict[str, Any]:
        """Tokens, seconds, bytes that move and bytes of memory by tier."""
        rows = [row for rows in self.forecast.rows.values() for row in rows]
        left = self.forecast.left(0.0)
        said: dict[str, Any] = {
            "requests": sum(map(bool, self.forecast.rows.values())),
            "prompt_tokens": sum(row.prompt_tokens for row in rows),
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
    told: Callable[[Summary], None] = lambda summary: None,
) -> Outlook:
    """The outlook of a job before it goes on, empty without a sample. `state` has the finished requests."""
    left = requests - (len(state) - state.count(0))
    nothing = Outlook(Forecast(left, 1), None, None)
    if not sample or not left:
        return nothing
    try:
        found = outlook(llm, source, form, requests, at_risk, sample, told)
    except PlanError:  # not all fit together: requests that do not are refused one by one
        return nothing
    # The weights are loaded by now, and requests are read again.
    pace = found.forecast.pace and replace(found.forecast.pace, first=found.reading)
    forecast = replace(found.forecast, requests=left, pace=pace)
    forecast.rows = {line: rows for line, rows in forecast.rows.items() if not state[line]}
    forecast.told(0.0)
    return replace(found, forecast=forecast)


def outlook(
    llm: LLM,
    source: Source,
    form: RequestFormat,
    requests: int,
    at_risk: float | None,
    sample: int,
    told: Callable[[Summary], None] = lambda summary: None,
) -> Outlook:
    """Reads all requests, has `sample` of them answered, and says what the job takes. `llm` is as the job has it;
    `told`: called after each request of the sample."""
    forecast, seen, started = Forecast(requests, 1), 0, time.monotonic()
    records = list[Record]()
    random = np.random.default_rng(0)
    for record in source.records():
        try:
            forecast.expect(record.line, [ToCome(*each) for each in opened(llm, form, record).lengths])
        except Refused:
            forecast.expect(record.line, ())
            continue
        # A reservoir: each request is as likely to be among them.
        seen += 1
        place = seen - 1 if seen <= sample else int(random.integers(seen))
        if place < sample:
            records[place : place + 1] = [record]
    reading = time.monotonic() - started
    rows = [row for rows in forecast.rows.values() for row in rows]
    if not rows:
        return Outlook(forecast, None, None)
    usual, planner = np.median([(row.prompt_tokens, row.max_new_tokens) for row in rows], axis=0), llm.planner
    llm.planner = bounded(planner, requests, at_risk)
    try:
        middle = llm.plan(Workload(int(usual[0]), max(1, int(usual[1])), len(rows)))
        longest, most = max(row.prompt_tokens for row in rows), max(row.max_new_tokens for row in rows)
        largest = llm.plan(Workload(longest, most, len(rows)))
        forecast.block(middle.policy.block_size)
        if middle.predicted is not None:
            forecast.pace = Pace.of_plan(middle.predicted, int(usual[1]), forecast.slots)
        moved = _run_sample(llm, form, forecast, records, told) if records else 0.0
    finally:
        llm.planner = planner
    if forecast.pace is not None:
        forecast.pace = replace(forecast.pace, first=forecast.pace.first + reading)
    return Outlook(forecast, largest, middle, moved, reading)


def glimpse(llm: LLM, source: Source, form: RequestFormat, like: Forecast, done: int) -> Percentiles | None:
    """Seconds of a job that waits, of which so many requests are `done`, from some of its requests, and from the pace
    and the lengths of answers of a job that runs; None where nothing is known of these."""
    records, requests = source.some(_GLIMPSED)
    bound = under_way(like.requests, None)
    slots = under_way(requests, None) if like.slots == bound else like.slots
    job = Forecast(max(0, requests - done), slots, like.known_pace, like.lengths + like.answers)
    for place, record in enumerate(records):
        try:
            job.expect(place, [ToCome(*each) for each in opened(llm, form, record).lengths])
        except Refused:
            job.expect(place, ())
    return job.left(0.0)


def _run_sample(
    llm: LLM, form: RequestFormat, forecast: Forecast, records: list[Record], told: Callable[[Summary], None]
) -> float:
    """Has `records` answered, for the lengths of the answers and the pace. Bytes that moved, a second."""
    part = Forecast(len(records), forecast.slots)
    kept = GivenRequests(records)
    shown = llm.on_progress

    def meter(what: str, done: int, total: int) -> None:
        if shown is not None:
            shown(what, done, total)
        part.meter(what, done, total)

    llm.on_progress, started = meter, time.monotonic()
    try:
        Job(llm, kept, form, kept, len(records), told=told, forecast=part).run()
    finally:
        llm.on_progress = shown
    elapsed, record = time.monotonic() - started, llm.last_record
    load = 0.0 if record is None else record.load_s
    pace = part.meter.pace(len(records))
    forecast.lengths = part.answers
    forecast.meter.learn(part.meter)
    if pace is not None:
        forecast.pace = replace(pace, first=load, spread=OF_SAMPLE)
    bytes_ = 0 if record is None else sum(record.bytes_moved.values())
    return bytes_ / max(elapsed - load, 1e-3)
